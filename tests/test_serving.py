"""Serving without an engine: the exported folder, strict loading, and the tables of what the plug-ins rely on."""

import json
import logging
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from dspine_hf import DSpineConfig, DSpineDraftModel
from dspine_hf.cli import main
from dspine_hf.serving import sglang as sglang_plugin
from dspine_hf.serving import signatures
from dspine_hf.serving import vllm as vllm_plugin
from dspine_hf.serving.export import export
from dspine_hf.serving.signatures import Engine, Relied, drift
from dspine_hf.serving.tensors import drafter_tensors
from dspine_hf.serving.walk import lattice, realised_scores
from dspine_hf.transfer_dspine import TransitionCache
from helpers.launch import stand_in_python

SHAPES = {
    "hidden_size": 16,
    "vocab_size": 31,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "num_target_layers": 6,
    "transfer_rank": 4,
    "num_candidates": 3,
    "block_size": 4,
}
SOURCE = """
class Model:
    field: int
    other: str = ""

    def forward(self, ids, positions, *, embeds=None):
        pass

def helper(a, b=2):
    pass
"""


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    DSpineDraftModel(DSpineConfig(**SHAPES, pad_token_id=7)).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_an_export_shares_the_weights_and_has_what_the_engines_parse(folder, tmp_path):
    main_exit(["export", str(folder), str(tmp_path / "out")])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["DSpineDraftModel"] and config["block_size"] == 4
    assert (
        config["dflash_config"] | {"mask_token_id": 7, "block_size": 4, "num_target_layers": 6}
        == config["dflash_config"]
    )
    assert config["dflash_config"]["target_layer_ids"] == config["target_layer_ids"]
    assert (config["dflash_config"]["selector_rank"], config["dflash_config"]["selector_top_k"]) == (4, 3)
    assert (tmp_path / "out" / "model.safetensors").samefile(folder / "model.safetensors")
    ours, theirs = (AutoModel.from_pretrained(place).state_dict() for place in (folder, tmp_path / "out"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_export_in_place_changes_the_config_alone_and_can_be_copied_on(folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    export(folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert [name for name in after if after[name] != before.get(name)] == ["config.json"]
    export(folder, tmp_path / "copy", copy=True)
    assert not (tmp_path / "copy" / "model.safetensors").samefile(folder / "model.safetensors")


def test_an_own_mask_token_is_kept_and_a_plain_dflash_drafter_has_no_selector(tmp_path):
    config = DSpineConfig(**SHAPES, mask_token_id=5, injection="none", selection="independent")
    DSpineDraftModel(config).save_pretrained(tmp_path)
    export(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    assert fields["mask_token_id"] == 5 and "selector_top_k" not in fields


def test_an_export_never_overwrites_and_refuses_an_incomplete_drafter(folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="new or empty"):
        export(folder, tmp_path / "full")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_for_the_engines_walk_names_a_second_architecture_after_our_own(folder, tmp_path):
    main_exit(["export", str(folder), str(tmp_path / "walked"), "--engine-walk", "9"])
    export(folder, tmp_path / "plain")
    walked, plain = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("walked", "plain"))
    assert walked["dflash_config"] == plain["dflash_config"] | {"selector_top_k": 9}
    names = ["DSpineDraftModel", "DFlash2DraftModel"]
    assert walked == plain | {"architectures": names, "dflash_config": walked["dflash_config"]}
    for wrong in (-1, 0, 2, SHAPES["vocab_size"] + 1):
        with pytest.raises(
            ValueError, match=f"num_candidates=3, or more, up to the vocabulary, {SHAPES['vocab_size']}"
        ):
            export(folder, tmp_path / "no", engine_walk=wrong)
    independent = DSpineConfig(**SHAPES, injection="none", selection="independent")
    DSpineDraftModel(independent).save_pretrained(tmp_path / "independent")
    with pytest.raises(ValueError, match="has candidates to walk"):
        export(tmp_path / "independent", tmp_path / "no", engine_walk=9)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("walk", [[], ["--engine-walk", "9"]])
def test_vllms_script_asks_for_sampled_drafts_where_the_engine_walks(folder, tmp_path, walk):
    main_exit(["export", str(folder), str(tmp_path / "out"), *walk])
    script = Path(__file__).resolve().parents[1] / "examples" / "serve_vllm.sh"
    environment = stand_in_python(tmp_path)
    words = ["bash", str(script), "TARGET", str(tmp_path / "out"), "--port", "9"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[-2:] == ["--port", "9"]
    config = {"method": "dflash", "model": str(tmp_path / "out"), "num_speculative_tokens": 3}
    wanted = config | ({"draft_sample_method": "probabilistic"} if walk else {})
    assert json.loads(found[found.index("--speculative-config") + 1]) == wanted


def main_exit(arguments):
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 0


@pytest.mark.parametrize("damage", ["missing", "superfluous", "there twice", "of another shape"])
def test_tensors_that_are_not_exactly_the_drafters_are_refused(folder, damage):
    tensors = list(load_file(folder / "model.safetensors").items())
    config = DSpineConfig.from_pretrained(folder)
    assert len(drafter_tensors(config, tensors)) == len(tensors)
    if damage == "missing":
        tensors = [pair for pair in tensors if pair[0] != "norm.weight"]
    elif damage == "superfluous":
        tensors.append(("lm_head.weight", torch.zeros(31, 16)))
    elif damage == "there twice":
        tensors.append(tensors[0])
    else:
        tensors = [(name, t[:1] if name == "norm.weight" else t) for name, t in tensors]
    with pytest.raises(ValueError, match=f"1 are {damage}.*: "):
        drafter_tensors(config, tensors)


@torch.no_grad()
def test_realised_scores_are_those_that_the_transition_cache_walks():
    torch.manual_seed(1)
    first, pairs = torch.randn(3, 5), torch.randn(3, 4, 5, 5)
    rows, cache, index = realised_scores(first, pairs), TransitionCache(first, pairs), None
    for slot in range(1, 6):
        wanted = cache.scores(slot, index)
        assert torch.equal(rows[:, slot - 1], wanted)
        index = wanted.argmax(-1)


@torch.no_grad()
def test_a_lattice_walked_from_its_first_row_has_the_scores_of_the_transition_cache():
    torch.manual_seed(2)
    unary, pairs = torch.randn(3, 5, 5), torch.randn(3, 4, 5, 5)
    table, cache = lattice(unary, pairs), TransitionCache(unary[:, 0], pairs)
    assert table.shape == (3, 5, 5, 5)
    index, previous = None, torch.zeros(3, dtype=torch.long)
    for slot in range(1, 6):
        row = table[torch.arange(3), slot - 1, previous]
        assert torch.equal(row, cache.scores(slot, index))
        index = previous = torch.randint(0, 5, (3,))


def test_a_lattice_wider_than_the_known_predecessors_gives_the_others_the_unary_scores():
    unary, pairs = torch.randn(3, 5, 8), torch.randn(3, 4, 2, 8)
    table = lattice(unary, pairs)
    assert torch.equal(table[:, 1:, :2], pairs)
    assert torch.equal(table[:, 1:, 2:], unary[:, 1:, None].expand(-1, -1, 6, -1))
    assert torch.equal(table[:, 0], unary[:, :1].expand(-1, 8, -1))


def engine(*table: Relied) -> Engine:
    return Engine("engine", "1.2.3", table)


@pytest.mark.parametrize(
    ("relied", "found"),
    [
        (Relied("m.py", "Model.forward", "override", ("self", "ids", "positions", "embeds")), None),
        (Relied("m.py", "Model.forward", "override", ("self", "ids", "positions")), "embeds"),
        (Relied("m.py", "Model.forward", "call", ("self", "ids", "positions")), None),
        (Relied("m.py", "Model.forward", "call", ("self", "ids")), "positions"),
        (Relied("m.py", "helper", "call", ("a",)), None),
        (Relied("m.py", "helper", "call", ("a", "c")), "c"),
        (Relied("m.py", "Model", "fields", ("field", "other")), None),
        (Relied("m.py", "Model", "fields", ("missing",)), "no field missing"),
        (Relied("m.py", "Model.backward", "call", ("self",)), "not found"),
        (Relied("n.py", "helper", "call", ("a",)), "no such file"),
    ],
)
def test_a_drift_of_the_engines_source_is_found(tmp_path, relied, found):
    (tmp_path / "m.py").write_text(SOURCE)
    problems = drift(engine(relied), tmp_path)
    assert len(problems) == (found is not None)
    assert found is None or found in problems[0]


@pytest.mark.parametrize(("plugin", "table"), [(vllm_plugin, "VLLM"), (sglang_plugin, "SGLANG")])
def test_a_plug_in_on_an_unknown_engine_registers_nothing_and_names_the_version_that_works(
    monkeypatch, caplog, plugin, table
):
    known = getattr(signatures, table)
    monkeypatch.setattr(plugin, table, Engine("json", known.version, known.table))  # a package of another kind
    with caplog.at_level(logging.WARNING):
        assert plugin.register() is False
    assert f"differs from {known.version}, which works" in caplog.text and "no such file" in caplog.text


def test_both_engines_find_their_entry_point_and_the_pinned_version_is_the_tables():
    for group, plugin in (("vllm.general_plugins", vllm_plugin), ("sglang.srt.plugins", sglang_plugin)):
        (entry,) = [e for e in entry_points(group=group) if e.name == "dspine"]
        assert entry.load() is plugin.register


def test_nothing_imports_an_engine_unasked():
    code = "import sys, dspine_hf.cli, dspine_hf.serving.vllm, dspine_hf.serving.sglang\n"
    code += "print({m.split('.')[0] for m in sys.modules} & {'vllm', 'sglang'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
