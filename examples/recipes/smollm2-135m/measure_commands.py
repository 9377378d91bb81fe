"""regenerate, train and eval, each to its end and once more killed with SIGKILL and given again: do both end alike?

python measure_commands.py --target folder --drafter folder --prompts prompts/ --out commands.json
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

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("target", "drafter", "prompts", "out"):
    parser.add_argument(f"--{name}", type=Path, required=True)
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


def main() -> None:
    args = parser.parse_args()
    out = args.out.with_suffix(".work")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    tokens, limit, steps = (4, 2, 4) if args.tiny else (128, 100, 120)
    files = sorted(map(str, (args.prompts / "train").glob("*.jsonl")))
    result: dict = {}

    def save() -> None:
        args.out.write_text(json.dumps(result, indent=1))

    def twice(name: str, command: list[str], sign: Callable[[Path], bool]) -> None:
        result[name] = {
            way: run([*command, "--output-dir", str(out / way / name)], until)
            for way, until in (("whole", None), ("killed", lambda: sign(out / "killed" / name)))
        }

    command = ["regenerate", "--target", str(args.target), "--max-new-tokens", str(tokens), "--limit", str(limit)]
    command += [part for file in files for part in ("--prompts", file)]
    twice(
        "regenerate",
        [*command, "--temperature", "0", "--temperature", "1"],
        lambda folder: lines(folder / "responses.jsonl") > limit // 2,
    )
    whole, killed = (load_from_disk(str(out / way / "regenerate")) for way in ("whole", "killed"))
    result["regenerate"] |= {
        "responses": len(whole),
        "equal": sum(a == b for a, b in zip(whole["tokens"], killed["tokens"], strict=True)),
    }
    save()
    command = [
        "train",
        "--target",
        str(args.target),
        "--data",
        str(out / "whole" / "regenerate"),
        "--logging-steps",
        "1",
    ]
    command += [
        "--max-steps",
        str(steps),
        "--save-steps",
        str(steps // 4),
        "--report-to",
        "none",
        "--config",
        "block_size=8",
    ]
    command += ["--max-length", "256", "--per-device-train-batch-size", "2" if args.tiny else "16"]
    twice("train", command, lambda folder: (folder / f"checkpoint-{steps // 4}").is_dir())
    whole, killed = (losses(out / way / "train") for way in ("whole", "killed"))
    result["train"]["largest_relative_difference"] = max(abs(a - b) / a for a, b in zip(whole, killed, strict=True))
    save()
    command = ["eval", "--target", str(args.target), "--drafter", str(args.drafter)]
    command += ["--max-new-tokens", str(min(tokens, 48)), "--limit", "1"]
    command += [part for file in sorted((args.prompts / "eval").glob("*.jsonl")) for part in ("--prompts", str(file))]
    twice("eval", command, lambda folder: lines(folder / "prompts.jsonl") > 1)
    for way in ("whole", "killed"):
        found = json.loads((out / way / "eval" / "results.json").read_text())["temperatures"]
        result["eval"][way] |= {t: found[t]["mean_acceptance_length"] for t in found}
    save()
    shutil.rmtree(out)


if __name__ == "__main__":
    main()
