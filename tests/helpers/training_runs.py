"""Short training runs of a tiny drafter, in this process and through the command line."""

import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from dspine_hf import DSpineDraftModel
from dspine_hf.cli import app
from dspine_hf.responses import respond
from dspine_hf.sequences import TokenSequences
from dspine_hf.training import DSpineTrainer, DSpineTrainingArguments
from helpers.tiny_files import random_sequences, tiny_chat_target

SHAPES = {"num_hidden_layers": 2, "block_size": 5, "transfer_rank": 8, "num_candidates": 4}
MAX_LENGTH = 64


def fresh_drafter(target, seed: int = 0, **overrides) -> DSpineDraftModel:
    """A small drafter whose weights depend on the seed only."""
    torch.manual_seed(seed)
    return DSpineDraftModel.for_target(target, **{**SHAPES, **overrides})


def trainer_for(folder, target=None, drafter=None, rows=None, held_out=None, **arguments) -> DSpineTrainer:
    """A trainer on the CPU that logs every step."""
    target = tiny_chat_target() if target is None else target
    values = {
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "anchors_per_sequence": 4,
        "max_length": MAX_LENGTH,
        "logging_steps": 1,
        "save_steps": 2,
        "save_total_limit": None,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    rows = random_sequences(20) if rows is None else rows
    return DSpineTrainer(
        fresh_drafter(target) if drafter is None else drafter,
        target,
        DSpineTrainingArguments(str(folder), **{**values, **arguments}),
        train_dataset=TokenSequences(rows, MAX_LENGTH),
        eval_dataset=None if held_out is None else TokenSequences(held_out, MAX_LENGTH),
    )


def losses(history: list[dict]) -> list[float]:
    """The loss of every logged step."""
    return [entry["loss"] for entry in history if "loss" in entry]


def saved_losses(folder: Path) -> list[float]:
    """The loss curve in a folder that `dspine train` wrote."""
    return losses(json.loads((folder / "trainer_state.json").read_text())["log_history"])


@functools.cache
def trained_pair():
    """(target, drafter, prompts, greedy continuations): the drafter knows half of these texts rather well."""
    target = tiny_chat_target()
    generator = torch.Generator().manual_seed(5)
    prompts = [[1, *torch.randint(5, 63, (4 + i % 4,), generator=generator).tolist(), 3, 2] for i in range(16)]
    texts = [response.tokens for response in respond(target, prompts, 40)]
    rows = [{"tokens": p + t, "prompt_length": len(p)} for p, t in zip(prompts, texts, strict=True)][:8]
    options = {"max_steps": 120, "learning_rate": 5e-3, "anchors_per_sequence": 12, "logging_steps": 40}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(folder, target, rows=rows, per_device_train_batch_size=8, save_strategy="no", **options)
        trainer.train()
    return target, trainer.drafter.eval().requires_grad_(False), prompts, texts


def command(*words: object) -> list[str]:
    """A `dspine` command line for this interpreter."""
    return [sys.executable, "-m", "dspine_hf.cli", *map(str, words)]


def environment() -> dict[str, str]:
    """One thread, no Hub, and the source tree first."""
    source = str(Path(__file__).resolve().parents[2] / "src")
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DSPINE_DEBUG": "1"}


def run_command(words: list[str], timeout: float = 200) -> str:
    """Run a command line in a process of its own to the end; stdout. A failure shows what the command said."""
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_here(words: list[str]) -> str:
    """Run a `dspine` command line in this process, which has everything imported already; stdout."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        app(args=words[3:], standalone_mode=False)
    return printed.getvalue()


def kill_when(words: list[str], ready, timeout: float = 200) -> None:
    """Start a command and kill it (SIGKILL) as soon as `ready()` is true; it must not have ended by itself."""
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + timeout
        while not ready():
            assert process.poll() is None, f"the command ended with {process.returncode} before it could be killed"
            assert time.monotonic() < end, "the command never came so far"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
