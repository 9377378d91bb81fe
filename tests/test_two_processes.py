"""Two gloo processes share one global batch: the loss curve is that of one process, also across a resume."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dspine_hf.run_record import RECORD
from helpers.launch import launcher
from helpers.tiny_files import random_sequences, save_tiny_target, write_jsonl
from helpers.training_runs import SHAPES, command, run_command, run_here, saved_losses, torch

CURVE = 1e-3


def launched(words: list[str], processes: int) -> list[str]:
    """The same command in several processes."""
    return [*launcher(processes), *words[1:], "--ddp-backend", "gloo"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of: one process; two; and two that resume what one process began."""
    folder = tmp_path_factory.mktemp("runs")
    target = save_tiny_target(folder / "target")
    rows = write_jsonl(folder / "rows.jsonl", random_sequences(24))
    shapes = [word for name, value in SHAPES.items() for word in ("--config", f"{name}={value}")]

    def words(name: str, batch: int):
        options = ["--target", target, "--target-dtype", "float32", "--data", rows, *shapes, "--use-cpu"]
        options += ["--max-steps", 6, "--save-steps", 3, "--logging-steps", 1, "--anchors-per-sequence", 4]
        options += ["--forcing", 0.5, "--eval-size", 3, "--learning-rate", 0.003]
        return command("train", *options, "--per-device-train-batch-size", batch, "--output-dir", folder / name)

    run_here(words("one", 4))
    shutil.copytree(folder / "one" / "checkpoint-3", folder / "resumed" / "checkpoint-3")
    shutil.copy(folder / "one" / RECORD, folder / "resumed")
    run_command(launched(words("two", 2), 2))
    run_command(launched(words("resumed", 2), 2))
    return folder


def test_two_processes_have_the_loss_curve_of_one(runs: Path):
    expected = saved_losses(runs / "one")
    assert len(expected) == 6 and len(set(expected)) == 6
    assert saved_losses(runs / "two") == pytest.approx(expected, abs=CURVE)


def test_resume_with_another_number_of_processes_has_the_same_loss_curve(runs: Path):
    assert saved_losses(runs / "resumed") == pytest.approx(saved_losses(runs / "one"), abs=CURVE)
    one, resumed = (load_file(runs / name / "model.safetensors") for name in ("one", "resumed"))
    for name, weight in one.items():
        torch.testing.assert_close(resumed[name], weight, rtol=1e-3, atol=1e-4, msg=name)


def test_a_run_says_how_many_processes_did_which_steps(runs: Path):
    found = {name: json.loads((runs / name / "training.json").read_text())["procedure"] for name in ("two", "resumed")}
    assert (found["two"]["hardware"], found["resumed"]["hardware"]) == ("2 x CPU", "CPU; from step 3 on: 2 x CPU")
    assert found["two"]["steps"] == found["resumed"]["steps"] == "6 of 4 sequences x 4 blocks"


def test_processes_share_the_evaluation(runs: Path):
    one, two = (
        [e for e in json.loads((runs / name / "trainer_state.json").read_text())["log_history"] if "eval_slot_1" in e]
        for name in ("one", "two")
    )
    assert len(one) == len(two) == 2
    for ours, theirs in zip(one, two, strict=True):
        assert ours["eval_acceptance_length"] == pytest.approx(theirs["eval_acceptance_length"], abs=1e-6)
