"""vLLM on CPU for real: the shipped drafter on SmolLM2-135M-Instruct, fp32, T = 0. See make test-vllm."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dspine_hf import DSpineConfig, DSpineDraftModel, load_embedded_target
from dspine_hf.embedded import embedded_drafter_folder
from dspine_hf.features import TargetReader
from dspine_hf.offline import offline_drafts, walk_rounds
from dspine_hf.serving.export import export

pytest.importorskip("vllm", reason="run 'make test-vllm'")

pytestmark = pytest.mark.timeout(3600)
RUN = Path(__file__).parent / "helpers" / "vllm_run.py"
TOKENS = 48
PROMPTS = [
    "Write a short story about a fox.",
    "What is 17 * 3? Think step by step.",
    "Explain how photosynthesis works.",
    "Write a Python function that reverses a list.",
    "List five fruits and one fact about each.",
    "Translate 'good morning' into French, Spanish and German.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Summarise the water cycle in three sentences.",
    "Write a haiku about autumn.",
    "How do I sort a dictionary by value in Python?",
    "A train travels 60 km in 45 minutes. What is its speed?",
    "Name the planets of the solar system in order.",
    "Write a polite e-mail that declines an invitation.",
    "What is the difference between a virus and a bacterium?",
    "Count from 1 to 20.",
    "Tell me three tips for better sleep.",
    "Write an SQL query that counts users by country.",
    "Who wrote Romeo and Juliet, and what is it about?",
    "Describe the taste of a lemon.",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A plain folder of the target, and the drafter as exported."""
    home = tmp_path_factory.mktemp("vllm")
    model, tokenizer = load_embedded_target(torch.float32)
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(home / "target")
    tokenizer.save_pretrained(home / "target")
    export(embedded_drafter_folder(), home / "drafter")
    return home


def run(home: Path, drafter: str | None, **changes) -> subprocess.CompletedProcess:
    settings = {
        "target": str(home / "target"),
        "drafter": drafter and str(home / drafter),
        "prompts": PROMPTS,
        "tokens": TOKENS,
        "output": str(home / f"{drafter or 'plain'}.json"),
        **changes,
    }
    file = home / f"{drafter or 'plain'}-settings.json"
    file.write_text(json.dumps(settings))
    return subprocess.run([sys.executable, str(RUN), str(file)], capture_output=True, text=True, timeout=1700)


@pytest.fixture(scope="module")
def answers(folders):
    """What vLLM says with the drafter and without."""
    read = []
    for drafter in ("drafter", None):
        done = run(folders, drafter)
        assert done.returncode == 0, done.stderr[-3000:]
        read.append(json.loads((folders / f"{drafter or 'plain'}.json").read_text()))
    return read


def test_speculation_changes_no_token_alone_or_in_a_batch(answers):
    spec, plain = answers
    assert [a[1] for a in spec["alone"]] == [a[1] for a in plain["alone"]]
    assert spec["together"] == plain["together"]


def test_every_draft_is_that_of_the_transformers_drafter_and_so_is_the_acceptance_length(answers, folders):
    target = load_embedded_target(torch.float32)[0]
    drafter = DSpineDraftModel.from_pretrained(folders / "drafter", dtype=torch.float32).eval()
    view, reader = drafter.bind_target(target), TargetReader(target, drafter.config.target_layer_ids)
    tokens, rounds, replayed = 0, 0, 0
    for prompt, answer, recorded in answers[0]["alone"]:
        sequence = torch.tensor(prompt + answer)
        features = reader(sequence[None])[0]
        wanted = offline_drafts(drafter, view, features, sequence, len(prompt))
        used = [r for r in recorded if r[1][0] - len(prompt) < len(wanted)]
        for (anchor,), (position,), (draft,) in used:
            assert anchor == sequence[position]
            assert draft == wanted[position - len(prompt)].tolist()
        rounds += len(used)
        tokens += len(answer) - 1
        replayed += walk_rounds(wanted, sequence[len(prompt) :], stopped=answer[-1] == 2).rounds
    assert rounds >= 100
    assert tokens / rounds > 2  # the drafter is a help at all
    assert tokens / rounds == pytest.approx(tokens / replayed, rel=0.02)


@pytest.mark.parametrize(("damage", "named"), [("missing", "norm.weight"), ("superfluous", "extra")])
def test_a_damaged_checkpoint_is_refused_at_load(folders, damage, named):
    from safetensors.torch import load_file, save_file

    export(folders / "drafter", folders / damage, copy=True)
    index = json.loads((folders / damage / "model.safetensors.index.json").read_text())["weight_map"]
    shard = folders / damage / index["norm.weight"]
    tensors = load_file(shard)
    if damage == "missing":
        del tensors[named]
    else:
        tensors[named] = torch.zeros(3)
    save_file(tensors, shard)
    done = run(folders, damage, prompts=PROMPTS[:1], tokens=2)
    assert done.returncode != 0
    assert f"1 are {damage}: {named}" in done.stderr + done.stdout


@pytest.mark.parametrize(("field", "value"), [("chain_passes", 1), ("context_window", 4)])
def test_a_drafter_whose_drafts_would_be_wrong_is_refused_and_the_cure_named(field, value):
    from dspine_hf.serving.vllm_model import refuse_what_is_not_supported

    def engine(**fields):
        own = DSpineConfig(rewrite_layers=1, injection_placement="mlp", **fields)
        return SimpleNamespace(
            speculative_config=SimpleNamespace(
                draft_model_config=SimpleNamespace(hf_config=own),
                num_speculative_tokens=own.num_draft_slots,
                num_speculative_tokens_per_batch_size=None,
                kv_cache_dtype=None,
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            model_config=SimpleNamespace(
                get_hidden_size=lambda: own.hidden_size,
                get_vocab_size=lambda: own.vocab_size,
                get_total_num_hidden_layers=lambda: own.num_target_layers,
            ),
        )

    refuse_what_is_not_supported(engine())
    with pytest.raises(ValueError, match=f"{field}={value} is not supported with vLLM; use the drafter in Transf"):
        refuse_what_is_not_supported(engine(**{field: value}))
