"""Time whole decoding: plain generate(), drafted generate(), and the fast loop with and without a drafter.

    python examples/bench_decode.py --out decode.json                                    # the embedded SmolLM2 target
    python examples/bench_decode.py --shapes qwen3-8b --device cuda --fused --out 8b.json   # random weights of a size

Ways take turns in every repeat, and each figure is a median over the repeats of one run. Then single passes behind a
context: a draft, verifications of 1..16 rows, whole rounds; beside them the floor, the bytes of the weights at the
bandwidth of a copy. Random weights accept nothing: their rounds give the speed-up at any acceptance length.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from decode_cases import SHAPES, batch_of, load, new_tokens, synchronise, timed
from rich.console import Console
from rich.table import Table

import dspine_hf
from dspine_hf import graphs
from dspine_hf.fast_call import FastCall, Options

DRAFTED = ("drafted generate()", "loop, drafted", "loop, adaptive")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="Hub name, folder or .gguf file; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", default="model_cards/dspine-smollm2-135m-instruct")
    parser.add_argument("--shapes", choices=SHAPES, help="random weights of these shapes instead")
    parser.add_argument("--prompts", help='JSONL file of {"turns": [...]} lines')
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024, help="length of random prompts, and of timed passes")
    parser.add_argument("--block-size", type=int, default=16, help="of a random drafter")
    parser.add_argument(
        "--rows", type=int, nargs="+", help="rows of the timed verifications; default: 1 to the block size"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fused", action="store_true", help="the drafter's fused kernels")
    parser.add_argument("--compile", action="store_true", help="compile both models in the fast loop")
    parser.add_argument("--out", default="decode.json")
    parser.add_argument("--tiny", action="store_true", help="random tiny weights, a few tokens: seconds on a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.shapes, args.context, args.max_new_tokens, args.block_size = "tiny", 24, 8, 4
        args.repeats, args.batches, args.dtype = 1, [1, 2], "float32"
    return args


def decode_all(args, target, drafter, tokenizer, size: int, temperature: float) -> dict:
    """Every way to decode one batch, taking turns; ratios to plain generate()."""
    inputs = batch_of(args, tokenizer, size, target.config.vocab_size)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    options = {**inputs, **sampling, "max_new_tokens": args.max_new_tokens}
    fast = {**options, "compiled": args.compile}
    ways = {
        "plain generate()": lambda: target.generate(**options),
        "loop, no drafter": lambda: dspine_hf.generate(target, None, **fast),
        "drafted generate()": lambda: target.generate(**options, assistant_model=drafter),
        "loop, drafted": lambda: dspine_hf.generate(target, drafter, **fast),
        "loop, adaptive": lambda: dspine_hf.generate(target, drafter, adaptive=True, **fast),
    }
    if size > 1:
        del ways["drafted generate()"]
    speeds, figures = {name: [] for name in ways}, {name: {} for name in ways}
    for repeat in range(-1, args.repeats):  # the first round warms up: compiles, captures
        for name, run in ways.items():
            if args.device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats()
            synchronise(args.device)
            began = time.perf_counter()
            out = run()
            synchronise(args.device)
            if repeat >= 0:
                count = new_tokens(out, inputs["input_ids"].shape[1], target)
                speeds[name].append(count / (time.perf_counter() - began))
            if args.device.startswith("cuda"):
                figures[name]["peak_bytes"] = torch.cuda.max_memory_allocated()
            if name in DRAFTED:
                figures[name]["acceptance_length"] = drafter.generation_stats.acceptance_length
    for name, found in figures.items():
        found.update(tokens_per_second=median(speeds[name]), runs=speeds[name])
        found["ratio"] = found["tokens_per_second"] / median(speeds["plain generate()"])
        if "peak_bytes" in found:
            found["peak_over_plain"] = found["peak_bytes"] - figures["plain generate()"]["peak_bytes"]
    graphs.release(target)
    return figures


def copy_bandwidth(device: str, size: int) -> float:
    """Bytes per second that a copy moves, read and written."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device, 10)


def pass_costs(args, target, drafter, size: int) -> dict:
    """Seconds of single passes of the fast loop behind `--context` columns, with graphs where it has them."""
    found: dict = {"verify": {}, "round": {}}
    slots = drafter.config.num_draft_slots

    def measure(target, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        arguments = (logits_processor, stopping_criteria, generation_config, model_kwargs)
        call = FastCall(target, drafter, input_ids, *arguments, Options(compiled=args.compile))
        call.prefill()
        used, first = args.context + 1 + 2 * slots, args.context
        if call.graphed is None:
            draft = lambda: call.rounds.draft([], used, first)  # noqa: E731
            verify = lambda n: call.rounds.verify(1 + n, [], used, first)  # noqa: E731
        else:
            draft, verify = lambda: call.graphed.draft(used), lambda n: call.graphed.verify(n, used)
        with graphs.frozen(call.rounds):
            found["draft"] = timed(draft, args.device, 4 * args.repeats)
            for drafts in [n - 1 for n in args.rows] if args.rows else range(slots + 1):
                found["verify"][1 + drafts] = timed(lambda n=drafts: verify(n), args.device, 4 * args.repeats)
                whole = lambda n=drafts: (draft(), verify(n).tolist())  # noqa: E731
                found["round"][1 + drafts] = timed(whole, args.device, 4 * args.repeats)
        return input_ids

    ids = torch.randint(target.config.vocab_size, (size, args.context + 1), device=args.device)
    target.generate(ids, custom_generate=measure, max_new_tokens=64, do_sample=False)
    found["rounds_per_plain_pass"] = {n: s / found["verify"][1] for n, s in found["round"].items()}
    return found


def main() -> None:
    args = parse()
    target, drafter, tokenizer = load(args)
    result: dict = {"arguments": vars(args), "torch": torch.__version__, "decode": {}, "passes": {}}
    if args.device.startswith("cuda"):
        result["device"] = torch.cuda.get_device_name()
    table = Table("batch", "T", "way", "tokens/s", "ratio", "acceptance", "peak over plain, MiB")

    def save() -> None:
        Path(args.out).write_text(json.dumps(result, indent=1))

    head = target.get_output_embeddings().weight
    weights = {
        name: sum(p.nbytes for p in model.parameters()) for name, model in (("target", target), ("drafter", drafter))
    }
    if target.get_input_embeddings().weight is not head:
        weights["target"] -= head.nbytes  # an input embedding is looked up, not read
    weights["drafter"] += head.nbytes
    bandwidth = copy_bandwidth(args.device, 2**30 if args.device.startswith("cuda") else 2**26)
    result["floor"] = {"copy_bandwidth": bandwidth, **{k: v / bandwidth for k, v in weights.items()}}
    save()
    for size in args.batches:
        result["passes"][size] = pass_costs(args, target, drafter, size)
        graphs.release(target)
        save()
    for size in args.batches:
        for temperature in args.temperatures:
            figures = decode_all(args, target, drafter, tokenizer, size, temperature)
            result["decode"][f"batch {size}, T={temperature}"] = figures
            save()
            for name, f in figures.items():
                numbers = [f"{f.get('acceptance_length', 1):.2f}", f"{f.get('peak_over_plain', 0) / 2**20:.0f}"]
                table.add_row(
                    str(size), str(temperature), name, f"{f['tokens_per_second']:.1f}", f"{f['ratio']:.2f}", *numbers
                )
    Console().print(table)
    for size, costs in result["passes"].items():
        rows = ", ".join(f"{n}: {1e3 * s:.2f}" for n, s in costs["verify"].items())
        print(f"batch {size}: draft {1e3 * costs['draft']:.2f} ms; verify by rows, ms: {rows}")
    print(f"weights at copy bandwidth: target {1e3 * result['floor']['target']:.2f} ms")


if __name__ == "__main__":
    main()
