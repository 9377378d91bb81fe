"""Converted checkpoints: DFlash drafts as its package does; the others start from its backbone and write nothing."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel
from typer.testing import CliRunner

from drafter_cases import filled_cache, tiny_drafter, tiny_target
from dspine_hf.cli import app
from dspine_hf.convert import convert
from helpers.oracle import prompt

dflash = pytest.importorskip("dflash.model", reason="needs dflash 0.1.0: pip install --no-deps dflash==0.1.0")
from test_dflash import CONFIGS, MASK, dflash_twin, record_rounds  # noqa: E402

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def target():
    target = tiny_target()
    target.get_output_embeddings().weight.mul_(0.2)
    return target


def twin_for(target, **overrides):
    return dflash_twin(
        tiny_drafter(target, injection="none", selection="independent", mask_token_id=MASK, **overrides)
    )


@torch.no_grad()
def assert_drafts_of_the_package(drafter, twin, target, temperature=0.0):
    """Round by round, what the dflash package's own loop drafted."""
    text, rounds = record_rounds(twin, target, temperature)
    view, cache = drafter.bind_target(target), drafter.new_cache()
    for expected in rounds:
        block = expected.embeds.shape[1]
        new = expected.positions.shape[1] - block
        drafter.extend_context(cache, expected.features, expected.positions[:, :new])
        anchor = text[:, expected.positions[0, new]]
        draft = drafter.draft_block(view, cache, anchor, expected.positions[:, new], num_slots=block - 1)
        logits = twin.compute_logits(expected.hidden[:, 1:], target.get_output_embeddings())
        wanted = logits.topk(drafter.config.num_candidates, dim=-1)
        torch.testing.assert_close(draft.unary, wanted.values, rtol=0, atol=TOLERANCE)
        assert draft.candidates.tolist() == wanted.indices.tolist()
    assert len(rounds) > 3


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_checkpoint_of_the_dflash_package_drafts_identically(tmp_path, target, overrides):
    twin = twin_for(target, **overrides)
    twin.save_pretrained(tmp_path / "dflash")
    conversion = convert(tmp_path / "dflash")
    assert conversion.kind == "dflash" and conversion.exact and not conversion.dropped
    assert set(conversion.taken) == set(twin.state_dict())
    conversion.drafter.save_pretrained(tmp_path / "dspine")
    for drafter in (conversion.drafter, AutoModel.from_pretrained(tmp_path / "dspine")):
        assert (drafter.config.injection, drafter.config.selection) == ("none", "independent")
        assert_drafts_of_the_package(drafter, twin, target)


def test_scales_and_soft_cap_of_the_dflash_package_are_kept(tmp_path, target):
    twin = twin_for(target)
    twin.config.dflash_config |= {
        "input_embedding_scale": 2.5,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 3.0,
    }
    twin.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="scales its embeddings by 2.5"):
        convert(tmp_path)
    drafter = convert(tmp_path, target).drafter
    assert (drafter.config.embedding_scale, drafter.config.logit_scale, drafter.config.logit_softcap) == (
        2.5,
        0.5,
        3.0,
    )
    assert_drafts_of_the_package(drafter, twin, target)


def test_an_injection_that_is_added_writes_nothing_until_it_is_trained(tmp_path, target):
    twin = twin_for(target)
    twin.save_pretrained(tmp_path)
    options = {"injection": "all", "injection_placement": "mlp", "rewrite_layers": 1, "transfer_rank": 6}
    conversion = convert(tmp_path, target, **options)
    assert conversion.exact and all("injection" in n or "transfer" in n or n == "fingerprint" for n in conversion.new)
    drafter = conversion.drafter
    assert_drafts_of_the_package(drafter, twin, target)
    assert bool(drafter.transfer.W.any()) and drafter.config.selection == "transition"
    drafter.check_target(target)
    plain = convert(tmp_path).drafter
    ids = prompt(9)
    drafts = []
    for model in (plain, drafter):
        target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=model)
        drafts.append(model.generation_stats.to_dict())
    assert drafts[0] == drafts[1]


def test_an_injection_needs_the_target(tmp_path, target):
    twin_for(target).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--target"):
        convert(tmp_path, injection="last")
    with pytest.raises(ValueError, match="trained for hidden_size"):
        convert(tmp_path, tiny_target(vocab_size=67))


def dflash2_folder(folder, target):
    """A checkpoint of the dflash package's second method, with random weights."""
    config = twin_for(target).config
    config.dflash_config |= {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5}
    torch.manual_seed(0)
    model = dflash.DFlash2DraftModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def dspark_folder(folder, target):
    """A checkpoint in DeepSpec's layout: DFlash's backbone, the target's embeddings, two heads of its own."""
    twin = twin_for(target)
    V, d = target.config.vocab_size, target.config.hidden_size
    tensors = {name: value.contiguous() for name, value in twin.state_dict().items()} | {
        "embed_tokens.weight": torch.randn(V, d),
        "lm_head.weight": torch.randn(V, d),
        "markov_head.markov_w1.weight": torch.randn(V, 4),
        "markov_head.markov_w2.weight": torch.randn(V, 4),
        "confidence_head.proj.weight": torch.randn(1, d + 4),
        "confidence_head.proj.bias": torch.randn(1),
    }
    config = twin.config.to_dict()
    inner = config.pop("dflash_config")
    config |= {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": inner["target_layer_ids"], "block_size": 7}
    config |= {"mask_token_id": MASK, "num_anchors": 16, "markov_rank": 4, "enable_confidence_head": True}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("make", "kind", "block_size", "dropped"),
    [(dflash2_folder, "dflash2", 5, "candidate_selector"), (dspark_folder, "dspark", 8, "markov_head")],
)
def test_other_methods_give_their_backbone_and_new_parts_that_write_nothing(
    tmp_path, target, make, kind, block_size, dropped
):
    conversion = convert(make(tmp_path / "source", target), target)
    assert (conversion.kind, conversion.exact) == (kind, False)
    drafter = conversion.drafter
    assert (drafter.config.block_size, drafter.config.injection) == (block_size, "all")
    assert any(name.startswith(dropped) for name in conversion.dropped)
    assert set(conversion.taken) | set(conversion.new) == set(drafter.state_dict())
    assert not any(layer.injection.U.weight.any() for layer in drafter.layers)
    cache = filled_cache(drafter, torch.randn(6, 2 * drafter.config.hidden_size), list(range(6)))
    draft = drafter.draft_block(drafter.bind_target(target), cache, torch.tensor([7]), torch.tensor([6]))
    unary = draft.unary[:, 1:].unsqueeze(2).expand_as(draft.transitions.pairs)
    torch.testing.assert_close(draft.transitions.pairs, unary, rtol=0, atol=TOLERANCE)


def break_config(folder, **fields):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **fields}))


BROKEN = {
    "sliding layers": (lambda f: break_config(f, layer_types=["sliding_attention"] * 3), "full, bidirectional"),
    "causal": (lambda f: break_config(f, is_causal=True), "full, bidirectional"),
    "a DSpine drafter": (lambda f: break_config(f, model_type="dspine"), "found a DSpine drafter"),
    "no config": (lambda f: (f / "config.json").unlink(), "found no config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "found neither"),
    "no mask": (lambda f: break_config(f, dflash_config={}), "mask_token_id"),
    "pickled": (lambda f: torch.save({}, f / "pytorch_model.bin"), "pickled"),
    "unknown layout": (
        lambda f: save_file({"encoder.weight": torch.ones(2)}, f / "model.safetensors"),
        "unknown: enc",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_what_cannot_be_converted_is_refused(tmp_path, target, damage, message):
    twin_for(target).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        convert(tmp_path)


def test_the_command_says_what_was_taken_dropped_and_new(tmp_path, target):
    source = dspark_folder(tmp_path / "dspark", target)
    target.save_pretrained(tmp_path / "target")
    from helpers.tiny_files import tiny_tokenizer

    tiny_tokenizer().save_pretrained(tmp_path / "target")
    arguments = ["convert", str(source), str(tmp_path / "out"), "--target", str(tmp_path / "target")]
    result = CliRunner().invoke(app, [*arguments, "--config", "injection=last"], catch_exceptions=False)
    assert result.exit_code == 0
    for line in (
        "DSpark: a start for training",
        "taken: ",
        "dropped: 6 tensors",
        "  markov_head.markov_w1.weight",
        "new: ",
    ):
        assert line in result.stdout
    drafter = AutoModel.from_pretrained(tmp_path / "out")
    assert drafter.config.injection == "last"
    drafter.check_target(target)
