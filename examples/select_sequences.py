"""Gather sequences into one training file of a given number of tokens, those with long prompts first.

    python examples/select_sequences.py --sources 'gen*/train.npz' 'older/*.npz' --tokens 14e6 --out data/train.npz

`--sources`: npz files with `tokens` (all sequences after one another), `length` and `prompt_length`, in order of
preference. Sequences are cut to `--max-length`; of each source those with prompts of more than `--long-prompt` tokens
go first, the rest in random order. Those chosen are written in random order.
"""

import argparse
from pathlib import Path

import numpy as np

from dspine_hf.lab import read_sequences, write_sequences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", nargs="+", required=True)
    parser.add_argument("--tokens", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-length", type=int, default=640)
    parser.add_argument("--long-prompt", type=int, default=224)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    generator = np.random.default_rng(args.seed)
    kept, total = [], 0
    for source in args.sources:
        rows = [(t[: args.max_length], p) for t, p in read_sequences(source) if p + 8 < min(len(t), args.max_length)]
        if not rows:
            raise SystemExit(f"expected npz files with usable sequences at '{source}'; found none.")
        order = sorted(generator.permutation(len(rows)), key=lambda i: rows[i][1] <= args.long_prompt)
        for i in order:
            if total + len(rows[i][0]) > args.tokens:
                break
            kept.append(rows[i])
            total += len(rows[i][0])
    if not kept:
        raise SystemExit(f"expected --tokens of at least one sequence; found {args.tokens:g}.")
    kept = [kept[i] for i in generator.permutation(len(kept))]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_sequences(args.out, kept)
    long = sum(prompt > args.long_prompt for _, prompt in kept)
    print(f"{len(kept)} sequences, {total / 1e6:.2f} M tokens, {long} prompts of more than {args.long_prompt} tokens")


if __name__ == "__main__":
    main()
