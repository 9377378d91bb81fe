"""The recipes behind the figures for SmolLM2: their lists are valid, and they run and resume on a tiny target."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from dspine_hf import DSpineConfig, DSpineDraftModel
from dspine_hf.baselines import BASELINES
from dspine_hf.lab import Variant, read_sequences, write_sequences
from dspine_hf.losses import LossWeights
from helpers.tiny_files import random_sequences, save_tiny_target, tiny_chat_target, write_jsonl

RECIPE = Path(__file__).resolve().parents[1] / "examples" / "recipes" / "smollm2-135m"
LISTS = sorted(path.stem for path in RECIPE.glob("*.json"))


@pytest.mark.parametrize("name", LISTS)
def test_every_variant_of_a_list_can_be_built(name):
    for fields in json.loads((RECIPE / f"{name}.json").read_text()):
        variant = Variant(**fields)
        assert variant.kind in ("dspine", *BASELINES)
        DSpineConfig(**{"hidden_size": 256, **variant.config})
        LossWeights(**variant.loss)


def test_variants_of_all_lists_have_names_of_their_own():
    names = [fields["name"] for name in LISTS for fields in json.loads((RECIPE / f"{name}.json").read_text())]
    assert len(set(names)) == len(names) > 20


def command_in(tmp_path, prompts: str = "prompts") -> tuple[list[str], dict[str, str]]:
    """The recipe over a tiny target and tiny lists, and its environment; folders have spaces in their names."""
    for split in ("train", "eval"):
        (tmp_path / "prompts" / split).mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / "prompts" / split / "some.jsonl", [{"turns": ["w1 w2"]}, {"turns": ["w9 w7 w3"]}])
    small = {"config": {"block_size": 4, "transfer_rank": 8}, "steps": 2, "sequences": 2, "anchors": 2}
    for name in ("final", "parts"):
        (tmp_path / f"{name}.json").write_text(json.dumps([{"name": name, **small}]))
    target = save_tiny_target(tmp_path / "the target")
    environment = {**os.environ, "TINY": "1", "GPUS": "0 1", "LISTS": "final parts", "VARIANTS": str(tmp_path)}
    environment |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return [
        "bash",
        str(RECIPE / "run.sh"),
        str(target),
        str(tmp_path / prompts),
        str(tmp_path / "its output"),
    ], environment


def test_the_recipe_runs_and_goes_on_where_it_was(tmp_path):
    command, environment = command_in(tmp_path)
    out = tmp_path / "its output"

    def run() -> list[str]:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        logs = "".join(path.read_text() for path in out.glob("*.log"))
        assert done.returncode == 0, done.stderr + logs
        return sorted(line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("=="))

    assert run() == ["== final", "== parts"]
    results = out / "results"
    assert (results / "final" / "model.safetensors").exists()
    (results / "parts.json").unlink()
    kept = (results / "final.json").stat().st_mtime_ns
    assert run() == ["== final", "== parts"]
    assert (results / "parts.json").exists()
    assert (results / "final.json").stat().st_mtime_ns == kept
    assert run() == ["== final", "== parts"]  # nothing is left to do
    again = [
        sys.executable,
        str(RECIPE.parents[1] / "compare_drafters.py"),
        "--target",
        command[2],
        "--max-length",
        "64",
    ]
    again += ["--train", f"{out}/train.npz", "--continuations", f"{out}/eval.jsonl", "--out", str(results)]
    again += ["--variants", f"{tmp_path}/parts.json", "--measure", f"{results}/final"]
    (results / "parts.json").unlink()
    done = subprocess.run(again, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert (results / "final.json").stat().st_mtime_ns == kept  # its training's record is not written over
    assert (results / "parts.json").exists()
    twice = [*again[:-1], f"{tmp_path}/parts"]
    done = subprocess.run(twice, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode and "found one twice" in done.stderr


INTERPRETER = """#!{python}
import json, pathlib, sys
with open("{log}", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if "--out" in sys.argv:
    out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    if not out.suffix:
        out.mkdir(parents=True, exist_ok=True)
        (out / "eval.jsonl").touch()
"""


@pytest.mark.parametrize("lines", [[], ["older/*.npz"], ["my data/a b.npz", "", "other data/*.npz"]], ids=len)
def test_more_sources_are_named_one_a_line(tmp_path, lines):
    """A stand-in for the interpreter keeps the words that it is started with."""
    command, environment = command_in(tmp_path)
    fake, log = tmp_path / "python", tmp_path / "log.jsonl"
    fake.write_text(INTERPRETER.format(python=sys.executable, log=log))
    fake.chmod(0o755)
    environment |= {"PYTHON": str(fake), "SOURCES": "\n".join(lines)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    calls = [words for words in map(json.loads, log.read_text().splitlines()) if "--sources" in words]
    wanted = [f"{command[-1]}/gen*/train.npz", *filter(None, lines)]
    assert len(calls) == 2
    for words in calls:
        assert words[words.index("--sources") + 1 : words.index("--tokens")] == wanted


def processes_with(word: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [int(path.parent.name)] if word.encode() in path.read_bytes() else []
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are looked up in /proc")
def test_a_recipe_that_is_ended_leaves_no_process_behind(tmp_path):
    command, environment = command_in(tmp_path)
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len(processes_with(str(tmp_path))) < 3 and time.monotonic() < until:
        time.sleep(0.1)
    assert len(processes_with(str(tmp_path))) >= 3
    running.terminate()
    running.wait(30)
    until = time.monotonic() + 3  # sooner than any of them would have ended by itself
    while processes_with(str(tmp_path)) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes_with(str(tmp_path)) == []


def test_a_recipe_without_prompts_or_without_gpus_says_so_at_once(tmp_path):
    (tmp_path / "no prompts").mkdir()
    command, environment = command_in(tmp_path, "no prompts")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode and "no prompts/train/*.jsonl'; found none" in done.stdout + done.stderr
    del environment["TINY"]
    environment["GPUS"] = "77"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode and "expected a GPU 77 on this host" in done.stderr


def test_one_command_makes_the_figures_and_names_those_that_it_did_not(tmp_path):
    command, environment = command_in(tmp_path)
    target, prompts, out = command[2:]
    drafter = tmp_path / "drafter"
    DSpineDraftModel.for_target(tiny_chat_target(), block_size=4, transfer_rank=8).save_pretrained(drafter)
    measure = ["bash", str(RECIPE / "measure.sh"), target, str(drafter), prompts, out]
    done = subprocess.run([*measure, "commands"], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr + (Path(out) / "commands.log").read_text()
    found = json.loads((Path(out) / "commands.json").read_text())
    assert found["regenerate"]["equal"] == found["regenerate"]["responses"] == 4
    assert found["train"]["steps"] == 4 and found["train"]["killed"]["killed"]
    for curve in (found["train"], found["train"]["again"]):
        assert (curve["same_steps"], curve["largest_relative_difference"]) == (4, 0)
    assert found["eval"]["whole"].keys() == {"seconds", "killed", "0", "1"}
    assert all(part["same"] for part in found.values()) and not list(Path(out).glob("*.work"))
    made = (Path(out) / "commands.json").stat().st_mtime_ns
    measure[3] = str(tmp_path / "nowhere")
    environment["LIMIT"] = "60"
    done = subprocess.run(
        [*measure, "commands", "decode"], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode and "not measured: decode" in done.stderr
    assert (Path(out) / "commands.json").stat().st_mtime_ns == made
    done = subprocess.run([*measure, "everything"], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode and "found 'everything'" in done.stderr
    done = subprocess.run(measure[:3], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode and "found 1 arguments" in done.stderr


@pytest.fixture
def measuring(tmp_path, monkeypatch):
    """Makes measure_commands.py's figures with a stand-in for `dspine`; returns the runs as (command, way, data).

    Run number `stop` fails; `odd` is the way in which the second step of training has another loss.
    """
    for split in ("train", "eval"):
        (tmp_path / "prompts" / split).mkdir(parents=True)
        write_jsonl(tmp_path / "prompts" / split / "some.jsonl", [{"turns": ["w1"]}])
    spec = importlib.util.spec_from_file_location("measure_commands", RECIPE / "measure_commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def measure(*words: str, stop: int | None = None, odd: str | None = None) -> list[tuple[str, str, str | None]]:
        made = []

        def run(command, until=None):
            options = dict(zip(command, command[1:], strict=False))
            folder = Path(options["--output-dir"])
            way = folder.parent.name if folder.name == command[0] else folder.name
            if len(made) == stop:
                raise SystemExit(f"dspine {command[0]} ended with 1.")
            made.append((command[0], way, options.get("--data") and Path(options["--data"]).name))
            assert (until is not None) == (way == "killed") and not folder.exists()
            folder.mkdir(parents=True)
            if command[0] == "regenerate":
                Dataset.from_list([{"tokens": [1, 2]}, {"tokens": [3]}]).save_to_disk(str(folder))
                (folder / "regenerate.json").touch()
            elif command[0] == "train":
                assert "--full-determinism" in command
                curve = [{"loss": loss} for loss in (4.0, 3.0 if way == odd else 2.0, 1.0)]
                (folder / "trainer_state.json").write_text(json.dumps({"log_history": curve}))
            else:
                found = {"temperatures": {"0": {"mean_acceptance_length": 2.5}}}
                (folder / "results.json").write_text(json.dumps(found))
            return {"seconds": 1.0, "killed": way == "killed"}

        monkeypatch.setattr(module, "run", run)
        inputs = ["--target", "target", "--drafter", "drafter", "--prompts", str(tmp_path / "prompts")]
        monkeypatch.setattr(sys, "argv", ["", *inputs, "--out", str(tmp_path / "commands.json"), *words])
        with pytest.raises(SystemExit) if stop is not None else contextlib.nullcontext():
            module.main()
        return made

    return measure


BOTH = ("whole", "killed")
REGENERATED = [("regenerate", way, None) for way in BOTH]
EVALUATED = [("eval", way, None) for way in BOTH]


def test_commands_go_on_with_the_run_that_is_missing(tmp_path, measuring):
    trained = [("train", way, "regenerate") for way in (*BOTH, "again")]
    assert measuring(stop=3) == [*REGENERATED, trained[0]]
    found = json.loads((tmp_path / "commands.json").read_text())
    assert found["regenerate"]["equal"] == found["regenerate"]["responses"] == 2
    assert found["train"].keys() == {"whole"}
    assert measuring(stop=3, odd="killed") == [*trained[1:], EVALUATED[0]]
    found = json.loads((tmp_path / "commands.json").read_text())
    assert (found["train"]["same_steps"], found["train"]["largest_relative_difference"]) == (1, 0.5)
    assert found["train"]["again"]["same_steps"] == found["train"]["steps"] == 3
    assert not found["train"]["same"] and (tmp_path / "commands.work").is_dir()
    assert measuring() == EVALUATED[1:]
    assert not (tmp_path / "commands.work").exists()
    assert measuring() == []


def test_parts_of_the_commands_need_no_others(tmp_path, measuring):
    data, trained = ("regenerate", "data", None), [("train", way, "data") for way in (*BOTH, "again")]
    assert measuring("--parts", "eval") == EVALUATED
    assert measuring("--parts", "train", stop=2) == [data, trained[0]]
    assert measuring(odd="again") == [*REGENERATED, *trained[1:]]  # on what the first run was trained on
    found = json.loads((tmp_path / "commands.json").read_text())
    assert found["train"]["same"] and found["train"]["again"]["largest_relative_difference"] == 0.5
    (tmp_path / "commands.json").unlink()
    (tmp_path / "commands.work" / "data").mkdir(parents=True)  # of a run whose figures are gone
    assert measuring("--parts", "train") == [data, *trained]


def test_the_script_of_the_figures_names_those_of_some_commands_apart(tmp_path):
    command, environment = command_in(tmp_path)
    fake, log = tmp_path / "python", tmp_path / "log.jsonl"
    fake.write_text(INTERPRETER.format(python=sys.executable, log=log))
    fake.chmod(0o755)
    environment |= {"PYTHON": str(fake), "COMMANDS": "train eval"}
    measure = ["bash", str(RECIPE / "measure.sh"), command[2], "drafter", *command[3:], "commands"]
    subprocess.run(measure, env=environment, capture_output=True, timeout=60)
    words = json.loads(log.read_text().splitlines()[-1])
    assert words[words.index("--parts") + 1 :] == [
        "train",
        "eval",
        "--tiny",
        "--out",
        f"{command[-1]}/commands-train-eval.part",
    ]


def test_figures_of_kernels_and_of_two_processes_are_made_on_a_cpu(tmp_path):
    command, environment = command_in(tmp_path)
    target, prompts, out = command[2:]
    sequences = [(row["tokens"], row["prompt_length"]) for row in random_sequences(24)]
    write_sequences(tmp_path / "some.npz", sequences)
    environment |= {"SEQUENCES": str(tmp_path / "some.npz")}
    environment.pop("TRITON_INTERPRET", None)
    measure = ["bash", str(RECIPE / "measure.sh"), target, "unused", prompts, out, "kernels", "pair"]
    done = subprocess.run(measure, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert json.loads((Path(out) / "kernels.json").read_text())["trees"]
    assert json.loads((Path(out) / "products.json").read_text())["products"]
    found = json.loads((Path(out) / "pair.json").read_text())
    losses = found["one, fp32"]["loss"]
    assert len(losses) == 4
    for name in ("two, fp32", "two, then one", "one, then two"):
        assert found[name]["loss"] == pytest.approx(losses, abs=1e-3), name


@pytest.mark.parametrize("largest", [200, 151_000])
def test_sequences_are_read_as_they_were_written(tmp_path, largest, monkeypatch):
    sequences = [([3, 1, largest], 2), (np.array([7, 5]), 1)]
    write_sequences(tmp_path / "some.npz", sequences)
    found = read_sequences(str(tmp_path / "*"))  # nothing else lies there
    assert [(tokens.tolist(), prompt) for tokens, prompt in found] == [([3, 1, largest], 2), ([7, 5], 1)]

    def killed(file, **arrays):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", killed)
    with pytest.raises(KeyboardInterrupt):
        write_sequences(tmp_path / "some.npz", sequences[1:])
    assert len(read_sequences(str(tmp_path / "*.npz"))) == 2
