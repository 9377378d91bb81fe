"""What does each layer of a drafter know, what is a right message worth to it, and does choosing or covering limit it?

    python examples/analyse_injection.py --drafter model_cards/dspine-smollm2-135m-instruct \
        --greedy data/eval-greedy.jsonl --per-set 20 --out analysis/

`--greedy`: JSONL with `benchmark`, `prompt_ids` and `greedy_ids`, the target's own greedy continuations; `--prompts`:
files of {"turns": [...]} lines instead, which the target answers first. A text counts up to where it begins to repeat
itself. Writes analysis.json and pictures:

- nearest.png: how often the true token is the nearest neighbour of z_t in the transfer space (or among 16).
- messages.png: what the successor's accuracy gains when it is told the true x_{t-1} at one layer, or from it on, or
  when all slots up to it are told theirs. "whole_block" in the JSON tells every slot of the block: a slot then sees
  its own token in what its successor was told, so that figure is no bound of anything that can be drafted.
- coverage.png: recall of the unary stream, and accuracy given the true predecessor, from every token of the text.
- survivors.png: of the slots whose predecessors were all accepted, how many are covered, and how many accepted.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from rich.console import Console

from dspine_hf.analysis import DrafterAnalysis
from dspine_hf.analysis_tables import analysis_tables
from dspine_hf.benchmarks import load_benchmarks
from dspine_hf.embedded import load_embedded_target
from dspine_hf.journal import write_atomically
from dspine_hf.loading import load_drafter, load_target
from dspine_hf.offline import loop_tail_start
from dspine_hf.plots import plot_analysis
from dspine_hf.responses import respond

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", help="Hub name, folder or .gguf file; default: the embedded SmolLM2-135M-Instruct")
parser.add_argument("--drafter", required=True, help="folder or Hub name")
parser.add_argument("--greedy", nargs="*", default=[], help="JSONL files with known greedy continuations")
parser.add_argument("--prompts", nargs="*", default=[], help="prompt files whose continuations are written first")
parser.add_argument("--out", type=Path, default=Path("analysis"))
parser.add_argument("--per-set", type=int, help="use only this many prompts of each benchmark")
parser.add_argument("--max-new-tokens", type=int, default=256)
parser.add_argument("--anchors", type=int, help="blocks per text for nearest and messages; default: every token")
parser.add_argument("--chunk", type=int, default=64, help="blocks in one pass")


def continuations(benchmark, model, limit: int, batch: int = 32) -> list[list[int]]:
    """The greedy continuation of every prompt, cut to `limit` tokens: the known ones, or written now."""
    if benchmark.continuations is not None:
        return [tokens[:limit] for tokens in benchmark.continuations]
    starts = range(0, len(benchmark.prompts), batch)
    return [r.tokens for i in starts for r in respond(model, benchmark.prompts[i : i + batch], limit)]


def main() -> None:
    args = parser.parse_args()
    if not args.greedy and not args.prompts:
        parser.error("give --greedy or --prompts")
    started, device = time.perf_counter(), "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, tokenizer = load_target(args.target, dtype) if args.target else load_embedded_target(dtype)
    model = model.to(device)
    analysis = DrafterAnalysis(load_drafter(args.drafter, model), model, args.anchors, args.chunk)
    for benchmark in load_benchmarks([*args.greedy, *args.prompts], tokenizer, args.per_set):
        texts = continuations(benchmark, model, args.max_new_tokens)
        for prompt, text in zip(benchmark.prompts, texts, strict=True):
            analysis.add(prompt, text[: loop_tail_start(text)])
        print(f"{benchmark.name}: {len(texts)} texts, {time.perf_counter() - started:.0f} s", flush=True)
    settings = {**vars(args), "target": args.target or model.name_or_path, "device": device, "out": str(args.out)}
    result = {"settings": {**settings, "dtype": str(dtype).removeprefix("torch.")}, **analysis.result()}
    args.out.mkdir(parents=True, exist_ok=True)
    write_atomically(args.out / "analysis.json", json.dumps(result, indent=1) + "\n")
    plot_analysis(result, args.out)
    console = Console()
    for table in analysis_tables(result):
        console.print(table)
    print(f"acceptance length {result['acceptance_length']} over {result['sequences']} texts, written to {args.out}")


if __name__ == "__main__":
    main()
