"""What the commands print beside their results: no bars of loading, who is held out, a table that fits."""

import os
import re
import subprocess
import sys

import datasets
import huggingface_hub.utils
import pytest
import torch
from rich.console import Console
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging
from typer.testing import CliRunner

from dspine_hf import DSpineDraftModel
from dspine_hf.cli import app
from dspine_hf.commands import common
from dspine_hf.commands.eval import tables
from dspine_hf.commands.train import parse_arguments
from dspine_hf.training import DSpineTrainer
from helpers.tiny_files import random_sequences, save_tiny_target, tiny_chat_target, tiny_tokenizer, write_jsonl

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds a tiny target and its drafter."""
    path = tmp_path_factory.mktemp("pair")
    save_tiny_target(path / "target")
    torch.manual_seed(1)
    DSpineDraftModel.for_target(tiny_chat_target(), block_size=4).save_pretrained(path / "drafter")
    return path


@pytest.fixture
def bars(monkeypatch):
    """Bars are on, as in a fresh process."""
    monkeypatch.setattr(logging, "_tqdm_active", True)


def test_loading_draws_no_bars_in_a_command(folder, bars, capsys):
    AutoModelForCausalLM.from_pretrained(folder / "target")
    assert "Loading weights" in capsys.readouterr().err  # without the command there would be one
    words = ["generate", "--target", folder / "target", "--drafter", folder / "drafter", "--prompt", "w1"]
    result = RUNNER.invoke(app, [*map(str, words), "--max-new-tokens", "4", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "Loading weights" not in result.stderr and "target passes" in result.stderr
    words = ["convert", folder / "drafter", folder / "converted", "--target", folder / "target"]
    assert "Loading weights" not in RUNNER.invoke(app, [*map(str, words)]).stderr
    assert not huggingface_hub.utils.are_progress_bars_disabled()


def test_bars_of_downloads_stay_off_where_they_were(folder, bars):
    with huggingface_hub.utils.disable_progress_bars():
        common.hide_loading_bars()
        assert huggingface_hub.utils.are_progress_bars_disabled()


def test_a_file_is_unpacked_without_a_bar(monkeypatch, capsys):
    def load(dtype):
        list(tqdm(range(3), desc="unpacking"))
        return tiny_chat_target(), tiny_tokenizer()

    monkeypatch.setattr(common, "load_embedded_target", load)
    assert common.load_quietly(None, torch.float32)[0].dtype is torch.float32
    assert capsys.readouterr().err == ""


def test_training_says_how_many_are_held_out(folder, tmp_path, monkeypatch):
    def train(self, **options):
        raise SystemExit(7)

    monkeypatch.setattr(DSpineTrainer, "train", train)
    rows = [{**row, "id": i // 2, "temperature": i % 2} for i, row in enumerate(random_sequences(14))]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"))
    other = write_jsonl(tmp_path / "other.jsonl", random_sequences(3))
    words = ["train", "--target", str(folder / "target"), "--data", str(tmp_path / "data"), "--use-cpu"]
    words += ["--output-dir", str(tmp_path / "out"), "--max-length", "64", "--config", "block_size=4"]
    for more, said in (
        (["--eval-size", "2"], "10 sequences to train on; 4 more, of 2 prompts, are held out, 2 of them greedy\n"),
        (["--eval-data", str(other)], "14 sequences to train on; 3 others to evaluate on\n"),
        ([], "14 sequences to train on\n"),
    ):
        result = RUNNER.invoke(app, [*words, *more])
        assert result.exit_code == 7, result.output
        assert said in result.stderr


@pytest.mark.parametrize("loop", [[], ["--fast"]], ids=["generate", "loop"])
def test_a_warning_of_kernels_is_one_line_before_the_answer(folder, loop):
    words = ["generate", "--target", folder / "target", "--drafter", folder / "drafter", "--prompt", "w1", "--fused"]
    words += [*loop, "--max-new-tokens", "4", "--device", "cpu"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "LOCAL_KERNELS": ""}
    command = [sys.executable, "-m", "dspine_hf.cli", *map(str, words)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    (place,) = [i for i, line in enumerate(lines) if "the eager operations run" in line]
    assert lines[place].startswith("warning: use_fused_kernels=True: ") and "warnings.warn" not in done.stdout
    answers = [i for i, line in enumerate(lines) if re.fullmatch(r"(w\d+ ?)+", line)]
    assert answers and min(answers) > place, done.stdout


@pytest.mark.parametrize(
    "words",
    [["--eval-steps", "6", "--save-steps=3"], ["--save-strategy", "epoch"], ["--eval_strategy", "no"]],
    ids=" ".join,
)
def test_a_checkpoint_that_nobody_would_evaluate_is_refused_by_the_options_that_were_given(words, tmp_path):
    said = " ".join(words).replace("=", " ").replace("_", "-")
    with pytest.raises(ValueError, match=f"--save-steps as a multiple of --eval-steps.* found {said}. ") as caught:
        parse_arguments([*words, "--use-cpu"], str(tmp_path), True)
    assert "requires" not in str(caught.value)
    assert parse_arguments([*words, "--use-cpu"], str(tmp_path), False).save_steps  # without an evaluation: as it is
    with pytest.raises(ValueError, match="requires"):  # who asks for it by name is told of it by name
        parse_arguments([*words, "--use-cpu", "--load-best-model-at-end", "true"], str(tmp_path), True)


def test_a_command_that_compiles_nothing_imports_no_compiler():
    code = "import sys, dspine_hf.cli, dspine_hf.eagle; print('torch._inductor.compile_fx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


NUMBERS = ["12.34", "2345.6", "23456.7", "10.01-12.99", "11.98", "10.00x", "0.66"]


@pytest.mark.parametrize("timed", [True, False])
def test_the_table_of_an_evaluation_fits_into_80_columns(timed):
    row = {
        "acceptance_length": 12.34,
        "acceptance_length_interval": [10.01, 12.99],
        "acceptance_length_without_loops": 11.98,
        "tokens_per_second_plain": 2345.6,
        "tokens_per_second_drafted": 23456.7,
        "speedup": 10.0,
    }
    names = [f"a-rather-long-name-of-a-benchmark@{length}" for length in (512, 16384)]
    figures = {
        "benchmarks": dict.fromkeys(names, row),
        "mean_acceptance_length": 12.34,
        "mean_acceptance_length_without_loops": 11.98,
        "slot_acceptance": [0.66] * 15,
        "acceptance_length_by_context": {"512": 12.34},
        **({"mean_speedup": 10.0} if timed else {}),
    }
    settings = {"drafter": "dspine-smollm2-135m-instruct", "target": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    settings |= {"dtype": "bfloat16", "device": "cuda"}
    (table,) = tables({"settings": settings, "temperatures": {"0": figures}}, [0.0])
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table)
    text = shown.get()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for number in NUMBERS if timed else ["12.34", "10.01-12.99", "11.98"]:
        assert text.count(number) >= 2, number
    first = "".join(line.split("│")[1].strip() for line in text.splitlines() if line.count("│") > 3)
    assert all(name in first for name in names)
