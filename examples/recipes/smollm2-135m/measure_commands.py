"""regenerate, train and eval, each to its end and once more killed with SIGKILL and given again: do both end alike?

python measure_commands.py --target folder --drafter folder --prompts prompts/ --out commands.json [--parts train eval]

Training runs a third time, "again", unkilled: what differs there is the machine's doing, not the kill's. Given again
with the same --out, this script makes the runs that are missing.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from datasets import load_from_disk

PARTS = ("regenerate", "train", "eval")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("target", "drafter", "prompts", "out"):
    parser.add_argument(f"--{name}", type=Path, required=True)
parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
parser.add_argument("--tiny", action="store_true", help="a few tokens, for the CPU")


def lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.is_file() else 0


def run(command: list[str], until: Callable[[], bool] | None = None) -> dict:
    """Runs `dspine command`; until: kill it once this holds, and run it again."""
    began, killed = time.perf_counter(), False
    process = subprocess.Popen([sys.executable, "-m", "dspine_hf.cli", *command])
    while until is not None and process.poll() is None and not killed:
        if until():
            process.send_signal(signal.SIGKILL)
            killed = True
        time.sleep(0.02)
    code = process.wait()
    if killed:
        code = subprocess.run([sys.executable, "-m", "dspine_hf.cli", *command]).returncode
    if code:
        raise SystemExit(f"dspine {command[0]} ended with {code}.")
    return {"seconds": time.perf_counter() - began, "killed": killed}


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def difference(first: list[float], other: list[float]) -> dict:
    """The largest relative difference of two loss curves, and how many leading steps have equal losses."""
    pairs = list(zip(first, other, strict=True))
    same = next((step for step, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return {"largest_relative_difference": max(abs(a - b) / a for a, b in pairs), "same_steps": same}


class Runs:
    """The runs of the commands in a folder, and what was found of them in a JSON file, which is written after each."""

    def __init__(self, out: Path):
        self.out, self.folder = out, out.with_suffix(".work")
        self.found: dict = json.loads(out.read_text()) if out.is_file() else {}
        if not self.found:
            shutil.rmtree(self.folder, ignore_errors=True)

    def measure(self, name: str, command: list[str], sign: Callable[[Path], bool], more: tuple[str, ...] = ()) -> dict:
        """`command` whole, killed at its `sign`, and whole again for each of `more`; runs that are there stay."""
        found = self.found.setdefault(name, {})
        for way in ("whole", "killed", *more):
            folder = self.folder / way / name
            if way in found and folder.is_dir():
                continue
            shutil.rmtree(folder, ignore_errors=True)
            until = (lambda folder=folder: sign(folder)) if way == "killed" else None
            self.keep(name, {way: run([*command, "--output-dir", str(folder)], until)})
        return found

    def keep(self, name: str, figures: dict) -> None:
        """Add figures to a part, and write all there are."""
        self.found.setdefault(name, {}).update(figures)
        scratch = self.out.with_suffix(".new")
        scratch.write_text(json.dumps(self.found, indent=1))
        scratch.replace(self.out)

    def complete(self, name: str) -> bool:
        """Whether a part was compared, which comes last."""
        return "same" in self.found.get(name, {})


def main() -> None:
    args = parser.parse_args()
    runs = Runs(args.out)
    tokens, limit, steps = (4, 2, 4) if args.tiny else (128, 100, 120)
    target = ["--target", str(args.target)]
    train, sets = (sorted(map(str, (args.prompts / split).glob("*.jsonl"))) for split in ("train", "eval"))
    answer = ["regenerate", *target, "--max-new-tokens", str(tokens)]
    answer += [part for file in train for part in ("--prompts", file)]

    def regenerate() -> None:
        command = [*answer, "--limit", str(limit), "--temperature", "0", "--temperature", "1"]
        runs.measure("regenerate", command, lambda folder: lines(folder / "responses.jsonl") > limit // 2)
        whole, killed = (
            load_from_disk(str(runs.folder / way / "regenerate"))["tokens"] for way in ("whole", "killed")
        )
        equal = sum(a == b for a, b in zip(whole, killed, strict=True))
        runs.keep("regenerate", {"responses": len(whole), "equal": equal, "same": equal == len(whole)})

    def training() -> None:
        data, own = runs.folder / "whole" / "regenerate", runs.folder / "data"
        if own.is_dir() or not (runs.complete("regenerate") and data.is_dir()):
            data = own
            if not (own / "regenerate.json").is_file():  # written last
                run([*answer, "--limit", str(max(2, limit // 2)), "--output-dir", str(own)])
        command = ["train", *target, "--data", str(data), "--config", "block_size=8", "--full-determinism"]
        command += ["--max-steps", str(steps), "--save-steps", str(steps // 4), "--logging-steps", "1"]
        command += ["--max-length", "256", "--per-device-train-batch-size", "2" if args.tiny else "16"]
        runs.measure("train", command, lambda folder: (folder / f"checkpoint-{steps // 4}").is_dir(), ("again",))
        whole, killed, again = (losses(runs.folder / way / "train") for way in ("whole", "killed", "again"))
        runs.found["train"]["again"] |= difference(whole, again)
        killed = difference(whole, killed)
        runs.keep("train", {**killed, "steps": len(whole), "same": killed["same_steps"] == len(whole)})

    def evaluation() -> None:
        # Plain and drafted, at two temperatures: with 7 sets 1,344 tokens; generate() writes some 30 a second.
        command = ["eval", *target, "--drafter", str(args.drafter), "--limit", "1"]
        command += ["--max-new-tokens", str(min(tokens, 48))]
        command += [part for file in sets for part in ("--prompts", file)]
        found = runs.measure("eval", command, lambda folder: lines(folder / "prompts.jsonl") > 1)
        lengths = []
        for way in ("whole", "killed"):
            results = json.loads((runs.folder / way / "eval" / "results.json").read_text())["temperatures"]
            lengths.append({t: results[t]["mean_acceptance_length"] for t in results})
            found[way] |= lengths[-1]
        runs.keep("eval", {"same": lengths[0] == lengths[1]})

    for name, part in zip(PARTS, (regenerate, training, evaluation), strict=True):
        if name in args.parts and not runs.complete(name):
            part()
    shutil.rmtree(runs.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
