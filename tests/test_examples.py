"""Every example runs as it stands, against a Hub that serves tiny models under the names that it loads."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModel

from helpers.hub_server import TOKEN, HubServer
from helpers.published import tiny_published
from helpers.tiny_files import save_tiny_target, tiny_chat_target, write_jsonl

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TARGET, DRAFTER = "HuggingFaceTB/SmolLM2-135M-Instruct", "dspine-hf/dspine-smollm2-135m-instruct"
RUNS = {
    "generate": [],
    "chat": ["--max-new-tokens", "12"],
    "train": [],
    "train on a file": ["--prompts", "prompts.jsonl", "--steps", "2", "--output", "from-file"],
    "adapt_lora": ["--rank", "4"],
    "evaluate": ["--max-new-tokens", "16"],
    "evaluate sampled": ["--max-new-tokens", "16", "--temperature", "1", "--prompts", "prompts.jsonl"],
    "load_from_hub": [],
    "load_from_hub without a patch": ["--patch-free"],
    "push": ["published", "someone/my-drafter"],
    "check_exactness": ["--target", "target", "--drafter", "published", "--prompts", "turns.jsonl"],
    "analyse_injection": [
        "--target",
        "target",
        "--drafter",
        "published",
        "--prompts",
        "turns.jsonl",
        "--per-set",
        "1",
    ],
}
BULK = "--target target --prompts turns.jsonl --evaluate turns.jsonl --own 4 --dialogues 4 --batch 4 --new-tokens 24"
RUNS["bulk_generate"] = f"{BULK} --length 320 --longest 500 --evaluate-length 64 --out bulk".split()
INPUTS = "--target target --train bulk/train.npz --continuations bulk/eval.jsonl --variants variants.json"
RUNS["compare_drafters"] = f"{INPUTS} --max-length 64 --out compared --save small".split()
RUNS["select_sequences"] = "--sources bulk/train.npz --tokens 300 --out chosen.npz".split()
RUNS["dry_run"] = "--shapes tiny --sequences 2 --anchors 2 --length 32 --steps 2 --warm-up 1".split()
RUNS["dry_run"] += ["--config", '{"block_size": 4, "transfer_rank": 8}', "--out", "dry-run.json"]
DRIVER = """
import contextlib, io, json, runpy, sys, traceback
runs, folder, found = json.loads(sys.argv[1]), sys.argv[2], {}
for name, arguments in runs.items():
    sys.argv = [name, *arguments]
    sys.stdin = io.StringIO("w1 w2\\nw3 w4\\n\\n")
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(f"{folder}/{name.split()[0]}.py", run_name="__main__")
        found[name] = [out.getvalue(), ""]
    except BaseException:
        found[name] = [out.getvalue(), traceback.format_exc()]
print("\\n" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def server():
    server = HubServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def home(server, tmp_path_factory):
    home = tmp_path_factory.mktemp("examples")
    server.add_folder(TARGET, save_tiny_target(home / "target"))
    published = tiny_published(home / "published")
    server.add_folder(DRAFTER, published)
    write_jsonl(home / "prompts.jsonl", [{"prompt": "w1 w2"}, {"prompt": "w5"}, {"prompt": "w9 w7 w3"}])
    write_jsonl(home / "turns.jsonl", [{"turns": ["w1 w2"]}, {"turns": ["w9 w7 w3"]}])
    variant = {"name": "small", "config": {"block_size": 4}, "steps": 2, "sequences": 2, "anchors": 2}
    (home / "variants.json").write_text(json.dumps([variant]))
    return home


@pytest.fixture(scope="module")
def printed(server, home):
    """What each example printed; they share a process, which is started like a user's."""
    environment = {**os.environ, **server.environment(home / "hf"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DRIVER, json.dumps(RUNS), str(EXAMPLES)]
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def snippets(path):
    return re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / path).read_text(), re.DOTALL)


PUBLISHED = [snippet for snippet in snippets("README.md") if "trust_remote_code" in snippet]
PUBLISHED += snippets("model_cards/dspine-smollm2-135m-instruct/README.md")


@pytest.mark.parametrize("snippet", PUBLISHED, ids=["README", "card", "card, without the package"])
def test_a_snippet_loads_a_published_drafter_as_it_stands(snippet, server, home, tmp_path):
    environment = {**os.environ, **server.environment(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", snippet]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


EXPECTED = {
    "generate": ["--- plain:", "--- drafted:", "tokens per pass", "acceptance by slot"],
    "chat": ["you>", "per pass of the target]"],
    "train": ["4 sequences", "The drafter is in my-drafter"],
    "train on a file": ["3 sequences", "The drafter is in from-file"],
    "adapt_lora": ["training ", "The adapted drafter is in my-domain-drafter"],
    "evaluate": ["acceptance length ", "speed-up ", "the same text as without the drafter: 100%"],
    "evaluate sampled": ["acceptance length ", "speed-up "],
    "load_from_hub": ["tokens per pass of the target"],
    "load_from_hub without a patch": ["tokens per pass of the target"],
    "push": ["Sending to ", "model.safetensors", "Done: "],
    "check_exactness": ["2 prompts, 0 differ"],
    "analyse_injection": ["Covering and choosing", "nearest of z", "over 1 texts, written to analysis"],
    "bulk_generate": [" responses, "],
    "compare_drafters": ["== small: ", '"1": {"mean_acceptance_length": '],
    "select_sequences": [" sequences, 0.00 M tokens, "],
    "dry_run": ['"peak_memory_gib": null', '"blocks_per_second": ', '"target_forward_seconds": ', '"total": '],
}


@pytest.mark.parametrize("name", RUNS)
def test_the_example_runs_as_it_stands(printed, name):
    text, error = printed[name]
    assert not error
    for part in EXPECTED[name]:
        assert part in text, text


def test_both_turns_of_the_chat_were_answered(printed):
    assert printed["chat"][0].count("per pass of the target]") == 2


def test_the_recipe_gives_the_same_text(printed):
    assert printed["load_from_hub"][0] == printed["load_from_hub without a patch"][0]


@pytest.mark.parametrize("folder", ["my-drafter", "from-file", "my-domain-drafter", "compared/small"])
def test_what_was_trained_is_a_drafter_of_its_target(printed, home, folder):
    drafter = AutoModel.from_pretrained(home / folder)
    drafter.check_target(tiny_chat_target())
    assert not any("lora" in name for name in drafter.state_dict())


def test_the_pushed_drafter_is_on_the_hub_and_the_token_in_no_output(printed, server):
    assert {"README.md", "results.json", "modeling_dspine.py"} <= server.repositories[
        "someone/my-drafter"
    ].files.keys()
    assert TOKEN not in json.dumps(printed)


@pytest.mark.parametrize("name", sorted({name.split()[0] for name in RUNS}))
def test_an_example_is_short_and_opens_with_its_command(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) < 100
    assert f"python examples/{name}.py" in text.split('"""')[1]
