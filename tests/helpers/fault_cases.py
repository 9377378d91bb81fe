"""What is interrupted: regenerate, train, push and save on tiny models; what must hold after a kill and at the end."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
import torch
from huggingface_hub import constants
from safetensors.torch import load_file

from dspine_hf import DSpineDraftModel, hub
from dspine_hf.cli import main
from dspine_hf.training import last_complete_checkpoint
from helpers.forked import finished, forked
from helpers.hub_server import HubServer
from helpers.published import tiny_published
from helpers.tiny_files import random_sequences, save_tiny_target, tiny_chat_target, write_jsonl
from helpers.training_runs import SHAPES, fresh_drafter, saved_losses

CURVE = 1e-3
NAME = "someone/tiny-drafter"


def quiet(words: list[Any]) -> None:
    """A `dspine` command line, with its messages and exit codes."""
    os.environ.pop("DSPINE_DEBUG", None)
    main([str(word) for word in words])


def no_leftovers(folder: Path) -> None:
    left = [path.name for path in folder.rglob("*") if path.name.startswith((".saving-", ".scratch"))]
    assert not left, f"left behind: {left}"


class Case:
    """One command. `home` holds what all runs share; a run has a folder of its own."""

    name = ""

    def __init__(self, home: Path):
        self.home = home / self.name
        self.home.mkdir(parents=True)

    def begin(self, folder: Path, variant: int) -> None:
        """Prepare a run, of which there may be several variants; called in this process."""

    def work(self, folder: Path) -> None:
        """The command, run in a child."""
        raise NotImplementedError

    def after_kill(self, folder: Path) -> None:
        """What must hold after each kill; run in a child."""

    def after_end(self, folder: Path) -> None:
        """What must hold once the command came to its end; run in a child."""


class Regenerate(Case):
    """Rows are those of an undisturbed run, none lost, none doubled; a data set that loads is whole."""

    name = "regenerate"

    def __init__(self, home: Path):
        super().__init__(home)
        self.target = finished(lambda: str(save_tiny_target(self.home / "target"))).value
        turns = [
            [" ".join(f"w{(i * 5 + j * 11) % 58}" for j in range(2 + i % 5)), "w3 w4"][: 1 + i % 2] for i in range(14)
        ]
        self.prompts = write_jsonl(self.home / "prompts.jsonl", [{"turns": turn} for turn in turns])
        whole = self.home / "whole"
        finished(lambda: self.work(whole))
        self.rows = finished(lambda: self.read(whole)).value

    def read(self, folder: Path) -> list[dict]:
        return datasets.load_from_disk(str(folder)).to_list()

    def work(self, folder: Path) -> None:
        words = ["regenerate", "--target", self.target, "--dtype", "float32", "--prompts", self.prompts]
        words += ["--max-new-tokens", 16, "--self-prompts", 6, "--temperature", 0, "--temperature", 1]
        quiet([*words, "--batch-size", 4, "--output-dir", folder])

    def after_kill(self, folder: Path) -> None:
        if (folder / "state.json").exists():
            assert self.read(folder) == self.rows, "a data set of other rows"
        if (folder / "responses.jsonl").exists():
            _, *lines = (folder / "responses.jsonl").read_bytes().splitlines(keepends=True) or [b""]
            assert all(json.loads(line) for line in lines if line.endswith(b"\n"))

    def after_end(self, folder: Path) -> None:
        rows = self.read(folder)
        keys = [(row["id"], row["temperature"], row["turn"]) for row in rows]
        assert len(set(keys)) == len(keys), "doubled rows"
        assert rows == self.rows, "other rows than an undisturbed run"
        entries = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()[1:]]
        assert (
            len(entries) == len({(entry["id"], entry["variant"]) for entry in entries}) == len({k[:2] for k in keys})
        )
        assert json.loads((folder / "regenerate.json").read_text())["rows"] == len(rows)
        no_leftovers(folder)


class Train(Case):
    """Loss curve and weights are those of an undisturbed run; a finished drafter and a complete checkpoint load."""

    name = "train"
    STEPS = 10

    def __init__(self, home: Path):
        super().__init__(home)
        self.target = finished(lambda: str(save_tiny_target(self.home / "target"))).value
        self.rows = write_jsonl(self.home / "rows.jsonl", random_sequences(14))
        self.whole = self.home / "whole"
        finished(lambda: self.work(self.whole))
        self.losses = saved_losses(self.whole)
        assert len(self.losses) == self.STEPS

    def work(self, folder: Path) -> None:
        words = ["train", "--target", self.target, "--target-dtype", "float32", "--data", self.rows, "--use-cpu"]
        words += [word for name, value in SHAPES.items() for word in ("--config", f"{name}={value}")]
        words += ["--max-steps", self.STEPS, "--save-steps", 3, "--logging-steps", 1, "--anchors-per-sequence", 4]
        words += ["--eval-size", 2, "--forcing", 0.5, "--disable-tqdm", "true", "--save-total-limit", 2]
        quiet([*words, "--per-device-train-batch-size", 4, "--output-dir", folder])

    def after_kill(self, folder: Path) -> None:
        if (folder / "config.json").exists():
            self.same_weights(folder)
        if (newest := last_complete_checkpoint(folder)) is not None:
            DSpineDraftModel.from_pretrained(newest)
            torch.load(Path(newest) / "optimizer.pt")

    def after_end(self, folder: Path) -> None:
        found = saved_losses(folder)
        assert len(found) == len(self.losses), f"{len(found)} logged steps of {len(self.losses)}"
        assert max(abs(a - b) for a, b in zip(found, self.losses, strict=True)) < CURVE, "another loss curve"
        self.same_weights(folder)
        no_leftovers(folder)

    def same_weights(self, folder: Path) -> None:
        DSpineDraftModel.from_pretrained(folder)
        expected = load_file(self.whole / "model.safetensors")
        found = load_file(folder / "model.safetensors")
        assert expected.keys() == found.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, msg=name)


class Push(Case):
    """The repository holds its old or its new state; the next push completes the new one."""

    name = "push"

    def __init__(self, home: Path):
        super().__init__(home)
        self.server = HubServer()
        for seed in (1, 2):
            finished(lambda seed=seed: self.make(seed))
            finished(lambda seed=seed: self.send(self.home / f"state-{seed}"))
        self.repository = self.server.repositories[NAME]
        _, self.first, self.second = self.repository.commits
        self.old, self.new = self.repository.commits[self.first], self.repository.commits[self.second]
        assert self.old != self.new
        self.large = {key: value for key, value in self.server.large.items() if value in self.old.values()}

    def make(self, seed: int) -> None:
        tiny_published(self.home / f"state-{seed}", seed=seed, block_size=3 + seed)
        hub.write_card(self.home / f"state-{seed}", NAME)

    def send(self, folder: Path) -> None:
        os.environ.update(self.server.environment(self.home))
        constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = self.server.url, False, True
        hub.push(folder, NAME, wait=0)

    def begin(self, folder: Path, variant: int) -> None:
        self.repository.branches["main"] = self.first
        self.server.large = dict(self.large)

    def work(self, folder: Path) -> None:
        self.send(self.home / "state-2")

    def after_kill(self, folder: Path) -> None:
        assert self.repository.files in (self.old, self.new), "a state in between"

    def after_end(self, folder: Path) -> None:
        assert self.repository.files == self.new, "not the new state"


class Save(Case):
    """A folder holds the old or the new drafter, or does not load for want of its config.json; never a mixture."""

    name = "save"
    OTHER = {"block_size": 4, "num_candidates": 3}
    VARIANTS = [
        (None, ({}, "5GB")),
        (({}, "5GB"), ({}, "5GB")),
        (({}, "5GB"), (OTHER, "5GB")),
        (({}, "6KB"), ({}, "6KB")),
        (({}, "6KB"), (OTHER, "5GB")),
        (({}, "5GB"), (OTHER, "6KB")),
        (({}, "20KB"), ({}, "6KB")),
    ]

    def begin(self, folder: Path, variant: int) -> None:
        self.old, self.new = self.VARIANTS[variant % len(self.VARIANTS)]
        folder.mkdir(parents=True)
        (folder / "results.json").write_text("{}")
        if self.old is not None:
            finished(lambda: self.write(folder, self.old, 1))

    def drafter(self, state: tuple, seed: int) -> DSpineDraftModel:
        drafter = fresh_drafter(tiny_chat_target(), **state[0])
        torch.manual_seed(seed)
        for weight in drafter.parameters():
            weight.data.normal_()
        return drafter

    def write(self, folder: Path, state: tuple, seed: int) -> None:
        self.drafter(state, seed).save_pretrained(folder, max_shard_size=state[1])

    def work(self, folder: Path) -> None:
        self.write(folder, self.new, 2)

    def holds(self, folder: Path) -> str:
        """Which state a folder holds: "old", "new" or "none" (it does not load)."""
        try:
            found = DSpineDraftModel.from_pretrained(folder)
        except OSError as error:
            assert "config.json" in str(error), f"no clear error: {error}"
            return "none"
        for name, state, seed in (("old", self.old, 1), ("new", self.new, 2)):
            if state is not None and self.same(found, self.drafter(state, seed)):
                return name
        raise AssertionError("a mixture of two states that loads")

    def same(self, found: DSpineDraftModel, wanted: DSpineDraftModel) -> bool:
        weights, expected = found.state_dict(), wanted.state_dict()
        fields = all(getattr(found.config, name) == getattr(wanted.config, name) for name in self.OTHER)
        return (
            fields and weights.keys() == expected.keys() and all(map(torch.equal, weights.values(), expected.values()))
        )

    def after_kill(self, folder: Path) -> None:
        self.holds(folder)
        assert (folder / "results.json").read_text() == "{}", "a file of the user's was touched"

    def after_end(self, folder: Path) -> None:
        assert self.holds(folder) == "new"
        single, index = (folder / name for name in ("model.safetensors", "model.safetensors.index.json"))
        assert single.exists() != index.exists(), "weights of two states"
        if index.exists():
            named = set(json.loads(index.read_text())["weight_map"].values())
            assert named == {path.name for path in folder.glob("*.safetensors")}
        no_leftovers(folder)


CASES = {case.name: case for case in (Regenerate, Train, Push, Save)}


def attempt(case: Case, folder: Path, **options: Any):
    """One run of the command in a child."""
    return forked(lambda: case.work(folder), **options)
