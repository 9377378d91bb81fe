"""Two GPUs against one: loss and speed of training, resuming on another number of processes, a target over both.

python measure_pair.py --target folder --drafter folder --sequences train.npz --out pair.json
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from dspine_hf.lab import read_sequences

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name in ("target", "drafter", "sequences", "out"):
    parser.add_argument(f"--{name}", type=Path, required=True)
parser.add_argument("--parts", nargs="+", choices=("split", "bf16", "fp32"), default=("fp32", "split", "bf16"))
parser.add_argument("--ways", nargs="+", choices=("one", "map", "tp"), default=("one", "map", "tp"), help="of split")
parser.add_argument("--tiny", action="store_true", help="a few steps, for two processes on a CPU")
EXAMPLES = Path(__file__).resolve().parents[2]


def main() -> None:
    args = parser.parse_args()
    out = args.out.with_suffix(".work")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    data, steps, rows, length = out / "tokens.jsonl", *((4, 4, 64) if args.tiny else (60, 32, 448))
    with open(data, "w") as lines:
        for tokens, prompt in read_sequences(str(args.sequences), 200 if args.tiny else 6000):
            lines.write(json.dumps({"tokens": tokens.tolist(), "prompt_length": prompt}) + "\n")
    result: dict = {}

    def save() -> None:
        args.out.write_text(json.dumps(result, indent=1))

    def train(name: str, processes: int, precision: str, batch: int, *more: str) -> None:
        """A run of `dspine train`, by accelerate on GPUs; its losses and the median of its tokens per second."""
        launch = ["accelerate.commands.launch", "--num_processes", str(processes), "--mixed_precision", precision]
        launch += ["--config_file", str(EXAMPLES / "ddp.yaml")] if processes > 1 else ["--num_machines", "1"]
        if args.tiny:  # accelerate would start a single process
            launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
            more += ("--use-cpu", "--ddp-backend", "gloo")
        command = ["--data", str(data), "--target", str(args.target), "--config", "block_size=8", "--seed", "1"]
        command += ["--config", "injection_placement=mlp", "--config", "rewrite_layers=1", "--learning-rate", "1e-3"]
        command += [
            "--max-length",
            str(length),
            "--anchors-per-sequence",
            "2" if args.tiny else "48",
            "--report-to",
            "none",
        ]
        command += ["--logging-steps", "1", "--per-device-train-batch-size", str(batch // processes), *more]
        command += ["--output-dir", str(out / name)]
        start = [sys.executable, "-m", *launch, "-m", "dspine_hf.cli", "train"]
        subprocess.run([*start, *command], check=True, env={**os.environ, "OMP_NUM_THREADS": "4"})
        history = json.loads((out / name / "trainer_state.json").read_text())["log_history"]
        entries = [entry for entry in history if "loss" in entry]
        later = [entry["tokens_per_second"] for entry in entries if entry["step"] > steps // 2]
        result[name] = {"loss": [e["loss"] for e in entries], "tokens_per_second": statistics.median(later)}
        save()

    def fp32() -> None:
        """Both counts of processes from the beginning, and each from the other's checkpoint half way."""
        exact = ["--target-dtype", "float32", "--bf16", "false"]
        exact += ["--max-steps", str(steps), "--save-steps", str(steps // 2)]
        train("one, fp32", 1, "no", rows, *exact)
        train("two, fp32", 2, "no", rows, *exact)
        for name, processes, origin in (("two, then one", 1, "two, fp32"), ("one, then two", 2, "one, fp32")):
            shutil.copytree(out / origin / f"checkpoint-{steps // 2}", out / name / f"checkpoint-{steps // 2}")
            train(name, processes, "no", rows, *exact)

    def split() -> None:
        """Texts and speed with the target on one GPU and spread over two."""
        for way in () if args.tiny else args.ways:
            launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2"] if way == "tp" else []
            command = [str(EXAMPLES / "split_target.py"), "--target", str(args.target), "--drafter", str(args.drafter)]
            command += ["--way", way, "--new-tokens", "48", "--out", str(out / f"{way}.json")]
            command += ["--pad-heads", "12"] if way == "tp" else []
            subprocess.run([sys.executable, *launcher, *command], check=True)
            found = json.loads((out / f"{way}.json").read_text())
            result[f"split, {way}"] = {
                dtype: {key: value for key, value in found[dtype].items() if key != "rows"}
                for dtype in ("float32", "bfloat16")
            }
            save()

    def bf16() -> None:
        """Compiled training with as many sequences a GPU on one and on two."""
        fast = ("--max-steps", str(steps), "--save-strategy", "no", "--compile-drafter")
        for processes in () if args.tiny else (1, 2):
            train(f"{processes}, bf16, 64 sequences each", processes, "bf16", 64 * processes, *fast)

    for part in args.parts:
        {"fp32": fp32, "split": split, "bf16": bf16}[part]()
    shutil.rmtree(out)


if __name__ == "__main__":
    main()
