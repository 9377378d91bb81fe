"""Write many responses of a small Llama-family target with one CUDA graph per decode step (`dspine_hf.bulk`).

    python examples/bulk_generate.py --target SmolLM2.gguf --prompts 'prompts/train/*.jsonl' --own 8192 \
        --dialogues 4096 --evaluate 'prompts/eval/*.jsonl' --out data/

Prompts are `{"turns": [...]}` lines; `--own` lets the target write user turns of its own, `--dialogues` second turns
after its own answers. Half of the responses are greedy, half are sampled at T = 1. Output: `train.npz` with `tokens`,
`length`, `prompt_length` and `temperature`; with `--evaluate` also `eval.jsonl`, a greedy and a sampled answer to the
first prompts of every file: what `compare_drafters.py` reads. Several GPUs: one process each, with --rank and --world.
"""

import argparse
import glob
import json
import time
from pathlib import Path

import numpy as np
import torch

from dspine_hf.bulk import ChatWriter, StepDecoder, in_batches
from dspine_hf.lab import write_sequences
from dspine_hf.loading import load_target
from dspine_hf.sources import read_jsonl


def evaluate(writer: ChatWriter, args) -> None:
    """The target's own answers to this rank's share of the evaluation prompts."""
    rows = []
    for path in sorted(glob.glob(args.evaluate)):
        turns = [row["turns"][0] for row in read_jsonl(Path(path))[: args.per_set]]
        rows += [(Path(path).stem, writer.prompt(turn)) for turn in turns]
    rows = [row for row in rows if len(row[1]) + 32 < args.evaluate_length][args.rank :: args.world]
    prompts = [prompt for _, prompt in rows]
    greedy, sampled = (writer.run(prompts, [t] * len(rows), args.new_tokens, args.evaluate_length) for t in (0.0, 1.0))
    with open(args.out / "eval.jsonl", "w") as out:
        for (name, prompt), *texts in zip(rows, greedy, sampled, strict=True):
            answers = [text[len(prompt) :] for text in texts]
            line = {"benchmark": name, "prompt_ids": prompt, "greedy_ids": answers[0], "sampled_ids": answers[1]}
            out.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", default="")
    parser.add_argument("--evaluate", default="")
    numbers = {"own": 0, "dialogues": 0, "samples": 1, "batch": 2048, "new-tokens": 256, "length": 448, "longest": 704}
    numbers["evaluate-length"] = 1024
    for name, value in (numbers | {"per-set": 128, "rank": 0, "world": 1}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no batch of single turns after this long")
    parser.add_argument("--attention", choices=("auto", "sdpa", "fused"), default="auto", help="auto: fused on CUDA")
    args = parser.parse_args()
    started = time.perf_counter()
    for pattern in filter(None, (args.prompts, args.evaluate)):
        if not glob.glob(pattern):
            raise SystemExit(f"expected files of prompts at '{pattern}'; found none.")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.rank)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_target(args.target, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.to(device)
    writer = ChatWriter(tokenizer, lambda length: StepDecoder(model, args.batch, length, args.attention))
    if args.evaluate:
        evaluate(writer, args)
    prompts = []
    for path in sorted(glob.glob(args.prompts)):
        turns = [row["turns"][0] for row in read_jsonl(Path(path))[args.rank :: args.world]]
        prompts += [writer.prompt(turn) for turn in turns] * args.samples
    prompts += writer.own_prompts(args.own, args.batch, args.length)
    prompts = [p for p in prompts if len(p) <= args.length - 64]
    rows, sizes, heat = [], [], []

    def answer(part, temperature, length):
        rows.extend(writer.run(part, temperature, args.new_tokens, length))
        sizes.extend(len(prompt) for prompt in part)
        heat.extend(temperature)
        print(f"{len(rows)} responses, {time.perf_counter() - started:.0f} s", flush=True)

    for part, temperature in in_batches(prompts, args.batch, args.rank):
        if time.perf_counter() - started > args.seconds:
            break
        answer(part, temperature, args.length)
    ended = [row for row in rows if row[-1] == writer.stop and len(row) <= args.longest - args.new_tokens - 64]
    for part, _ in in_batches(ended[: args.dialogues], args.batch, args.rank):
        turns = sorted(writer.second_turns(part, args.longest), key=len)
        answer(turns, [float(i % 2) for i in range(len(turns))], args.longest)
    keep = [i for i, row in enumerate(rows) if len(row) > sizes[i] + 2]
    heats = np.array([heat[i] for i in keep], dtype=np.uint8)
    write_sequences(args.out / "train.npz", [(rows[i], sizes[i]) for i in keep], temperature=heats)


if __name__ == "__main__":
    main()
