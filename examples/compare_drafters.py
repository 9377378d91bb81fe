"""Train drafters side by side at equal steps and data, and measure each one's exact acceptance length.

    python examples/compare_drafters.py --target SmolLM2.gguf --train 'data/train-*.npz' \
        --continuations data/eval.jsonl --variants variants.json --out results/

`--train`: npz files with `tokens` (all sequences after one another), `length` and `prompt_length`.
`--continuations`: JSONL with `benchmark`, `prompt_ids`, and the target's own `greedy_ids` and (if T = 1 is to be
measured) `sampled_ids`. `variants.json`: a list of `dspine_hf.lab.Variant` fields. One JSON per variant is written,
and its weights with `--save NAME`; what has its JSON there is left out, so that the same command goes on.
`--measure FOLDER` measures drafters that are trained already, too, under the names of their folders.
"""

import argparse
import copy
import json
import time
from pathlib import Path

import torch

from dspine_hf.configuration_dspine import spread_layer_ids
from dspine_hf.evaluation import summarise
from dspine_hf.journal import write_atomically
from dspine_hf.lab import FeatureStore, Variant, evaluate_offline, read_continuations, read_sequences, train_variant
from dspine_hf.loading import load_drafter, load_target


def measure(drafter, model, held_out: dict, end: int) -> dict:
    """Exact acceptance at every temperature of `held_out`: summaries, and counts per prompt."""
    found = {"offline": {}, "rows": {}}
    for temperature, (texts, names) in held_out.items():
        rows = evaluate_offline(drafter, model, texts, names, temperature == "1", end)
        found["offline"][temperature] = summarise(rows)
        found["rows"][temperature] = [{k: v for k, v in row.items() if k not in ("trials", "hits")} for row in rows]
    return found


def show(path: Path) -> None:
    """Print the means of a record."""
    record = json.loads(path.read_text())
    means = {t: {k: v for k, v in o.items() if k != "benchmarks"} for t, o in record["offline"].items()}
    print(f"== {path.stem}: {json.dumps(means)} {record.get('steps_per_second')} steps/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "train", "continuations", "variants", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--measure", nargs="*", default=[], help="folders of trained drafters to measure first")
    parser.add_argument("--max-length", type=int, default=448, help="cut training sequences to this many tokens")
    parser.add_argument("--limit", type=int, help="use only this many training sequences")
    parser.add_argument("--per-set", type=int, help="use only this many prompts of each benchmark")
    parser.add_argument("--save", nargs="*", default=[], help="variants whose weights are written (bf16)")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no variant after this long")
    args = parser.parse_args()
    started, out = time.perf_counter(), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(out / f"{Path(folder).resolve().name}.json", folder) for folder in args.measure]
    lines = json.loads(Path(args.variants).read_text())
    jobs += [(out / f"{fields['name']}.json", Variant(**fields)) for fields in lines]
    if len(dict(jobs)) < len(jobs):
        raise SystemExit("expected drafters of different names in --measure and --variants; found one twice.")
    for path, _ in jobs:
        if path.exists():
            show(path)
    jobs = [(path, job) for path, job in jobs if not path.exists()]
    if not jobs:
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_target(args.target, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.to(device).requires_grad_(False)
    layers = spread_layer_ids(model.config.num_hidden_layers, 5)
    store = FeatureStore(model, layers, read_sequences(args.train, args.limit), args.max_length)
    counts = store.token_counts(model.config.vocab_size) + 0.1
    held_out = {}
    for temperature, field in (("0", "greedy_ids"), ("1", "sampled_ids")):
        texts, names = read_continuations(args.continuations, field, args.per_set)
        if texts:
            held_out[temperature] = FeatureStore(model, layers, texts, max_length=1024), names
    if not held_out:
        raise SystemExit(f"expected answers of the target in {args.continuations}; found none.")
    print(
        f"{len(store)} sequences, {len(store.tokens)} tokens, after {time.perf_counter() - started:.0f} s", flush=True
    )
    for path, job in jobs:
        if time.perf_counter() - started > args.seconds:
            print(f"skipped {path.stem}: out of time")
            continue
        new = isinstance(job, Variant)
        drafter, record = train_variant(job, model, store, counts) if new else (load_drafter(job, model), {})
        if new and path.stem in args.save:
            copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(out / path.stem, max_shard_size="15MB")
        record |= measure(drafter, model, held_out, tokenizer.eos_token_id)
        write_atomically(path, json.dumps(record))
        show(path)


if __name__ == "__main__":
    main()
