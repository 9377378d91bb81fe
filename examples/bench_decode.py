"""Time whole decoding: plain generate(), drafted generate(), and the fast loop with and without a drafter.

    python examples/bench_decode.py --out decode.json                                    # the embedded SmolLM2 target
    python examples/bench_decode.py --shapes qwen3-8b --device cuda --fused --out 8b.json   # random weights of a size

At batch 1 the prompts are answered one after another, else in full batches. Ways take turns; the two of transformers
run once per prompt, the loop's `--repeats` times after one time that does not count. Runs that captured a graph or
compiled something all the same are named ("unsettled") and left out of the figures. "peak_bytes" is the memory of a
call like the timed ones with nothing kept from another way, "cache_bytes" what of it are caches, "drafter_bytes" the
drafter and its table of the tokens' features. With `--seconds` it
stops in time and writes what it has; the file is written after every case.

Then single passes behind a context: a draft, verifications of 1..16 rows, whole rounds; beside them the floor, the
bytes of the weights at the bandwidth of a copy. Random weights accept nothing: their rounds give the speed-up at any
acceptance length.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from decode_cases import SHAPES, batches_of, load, new_tokens, synchronise, timed
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters

import dspine_hf
from dspine_hf import graphs
from dspine_hf.compat_dspine import find_cache
from dspine_hf.fast_call import FastCall, Options
from dspine_hf.target_dspine import table_of

PLAIN, STATIC = "plain generate()", "loop, no drafter"
HF_WAYS = (PLAIN, "drafted generate()")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="Hub name, folder or .gguf file; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", default="model_cards/dspine-smollm2-135m-instruct")
    parser.add_argument("--shapes", choices=SHAPES, help="random weights of these shapes instead")
    parser.add_argument("--prompts", nargs="+", help='JSONL files of {"turns": [...]} lines')
    parser.add_argument("--per-set", type=int, default=4, help="prompts taken of each file")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024, help="length of random prompts, and of timed passes")
    parser.add_argument("--block-size", type=int, default=16, help="of a random drafter")
    parser.add_argument(
        "--rows", type=int, nargs="+", help="rows of the timed verifications; default: 1 to the block size"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--hf-batches", type=int, help="batches that the ways of transformers answer; default: all")
    parser.add_argument("--only", choices=("passes", "decode"), help="leave out the other half")
    parser.add_argument("--trees", type=int, nargs="*", default=[], help="numbers of nodes: trees instead of chains")
    parser.add_argument("--candidates", type=int, nargs="*", default=[], help="trees of so many candidates a slot too")
    parser.add_argument("--skip", nargs="*", default=[], help="ways of decoding to leave out, by name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fused", action="store_true", help="fused kernels for the drafter and for attention")
    parser.add_argument(
        "--compile", nargs="?", const=True, default=False, help="compile both models in the fast loop, in this mode"
    )
    parser.add_argument("--out", default="decode.json")
    parser.add_argument("--tiny", action="store_true", help="random tiny weights, a few tokens: seconds on a CPU")
    args = parser.parse_args()
    if args.tiny:
        args.shapes, args.context, args.max_new_tokens, args.block_size = "tiny", 24, 8, 4
        args.repeats, args.batches, args.dtype = 1, [1, 2], "float32"
    args.end = time.monotonic() + args.seconds
    return args


def ways_of(args, target, drafter, temperature: float) -> dict:
    """Every way to decode a batch, by name: what takes the batch's inputs."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    options = {**sampling, "max_new_tokens": args.max_new_tokens}
    fast = {**options, "compiled": args.compile, "fused_attention": args.fused}
    ways = {
        PLAIN: partial(target.generate, **options),
        STATIC: partial(dspine_hf.generate, target, None, **fast),
        "drafted generate()": partial(target.generate, assistant_model=drafter, **options),
        "loop, drafted": partial(dspine_hf.generate, target, drafter, **fast),
        "loop, adaptive": partial(dspine_hf.generate, target, drafter, adaptive=True, **fast),
    }
    for n in () if temperature else args.trees:
        grown = partial(dspine_hf.generate, target, drafter, tree_nodes=n, **fast)
        ways[f"loop, tree of {n}"] = grown
        for k in args.candidates:
            ways[f"loop, tree of {n}, {k} candidates"] = partial(grown, num_candidates=k)
    return {name: way for name, way in ways.items() if name not in args.skip}


def memory_of(args, target, drafter, run, inputs: dict, calls: int) -> dict:
    """Runs a way with nothing kept from other ways, so that it is warm: the memory of the last of the calls."""
    graphs.release(target)
    for _ in range(calls):
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        out = run(**inputs, return_dict_in_generate=True)
    layers = getattr(find_cache(out), "layers", [])  # of transformers' own caches
    own = sum(rows.nbytes for layer in layers for rows in (layer.keys, layer.values))
    table = table_of(drafter)  # of the tokens' features, which the loop makes once
    found = {"cache_bytes": graphs.cache_bytes(target) + own, "table_bytes": 0 if table is None else table.nbytes}
    if args.device.startswith("cuda"):
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def decode_all(args, target, drafter, tokenizer, size: int, temperature: float) -> dict:
    """Every way to decode the prompts in batches of a size, taking turns."""
    batches = batches_of(args, tokenizer, size, target.config.vocab_size)
    ways = ways_of(args, target, drafter, temperature)
    for name in HF_WAYS if args.hf_batches == 0 else HF_WAYS[1:] if size > 1 else ():
        ways.pop(name, None)
    graphs.ENTRIES_PER_TARGET = max(graphs.ENTRIES_PER_TARGET, len(ways))  # or ways that take turns evict each other
    figures: dict = {name: {"runs": [], "batches": {}} for name in ways}
    texts: dict = {name: {} for name in ways}
    for name, run in ways.items():
        if time.monotonic() < args.end:
            calls = 1 if name in HF_WAYS else 2  # the first one captures graphs
            figures[name] |= memory_of(args, target, drafter, run, batches[0], calls)
    for repeat in range(-1, args.repeats):
        for number, inputs in enumerate(batches):
            for name, run in ways.items():
                left_out = repeat or (args.hf_batches is not None and number >= args.hf_batches)
                if (name in HF_WAYS and left_out) or time.monotonic() > args.end:
                    continue
                before = preparations()
                synchronise(args.device)
                began = time.perf_counter()
                out = run(**inputs)
                synchronise(args.device)
                seconds = time.perf_counter() - began
                if repeat < 0:
                    continue
                texts[name][number] = new_tokens(out, inputs["input_ids"].shape[1], target)
                count = sum(map(len, texts[name][number]))
                if preparations() != before:
                    figures[name].setdefault("unsettled", []).append([repeat, number, count / seconds])
                    continue
                note(figures[name], number, count, seconds)
                if name not in (PLAIN, STATIC):
                    stats = drafter.generation_stats
                    figures[name]["acceptances"] = [*figures[name].get("acceptances", []), stats.acceptance_length]
    finish(figures, texts, drafter, greedy=not temperature)
    graphs.release(target)
    for name in [name for name, found in figures.items() if not found["runs"]]:
        print(f"{name}: no figure, {len(figures[name].get('unsettled', []))} runs captured or compiled something")
    return {name: found for name, found in figures.items() if found["runs"]}


def preparations() -> tuple[int, int]:
    """How many graphs were captured and how many compiled in this process so far."""
    return graphs.Kept.captures, counters["stats"]["unique_graphs"]


def note(found: dict, number: int, count: int, seconds: float) -> None:
    """Adds one run of a batch: new tokens, and how long they took."""
    found["runs"].append(count / seconds)
    tokens, spent = found["batches"].get(number, (0, 0.0))
    found["batches"][number] = (tokens + count, spent + seconds)


def speed(found: dict, numbers) -> float:
    """New tokens per second over some of the batches."""
    return sum(found["batches"][n][0] for n in numbers) / sum(found["batches"][n][1] for n in numbers)


def finish(figures: dict, texts: dict, drafter, greedy: bool) -> None:
    """Adds what follows from all runs: medians, ratios, equal texts, and memory beside plain generate()'s."""
    own = sum(t.nbytes for t in (*drafter.parameters(), *drafter.buffers()))
    for name, found in figures.items():
        if not found["runs"]:
            continue
        found["tokens_per_second"] = median(found["runs"])
        found["tokens_over_seconds"] = speed(found, found["batches"])
        if "acceptances" in found:
            found["acceptance_length"] = sum(found["acceptances"]) / len(found["acceptances"])
        for key, other in (("ratio", PLAIN), ("ratio_static", STATIC)):
            shared = found["batches"].keys() & figures.get(other, {"batches": {}})["batches"].keys()
            if not shared:
                continue
            found[key] = speed(found, shared) / speed(figures[other], shared)
            if greedy and name != other:
                same = [a == b for n in shared for a, b in zip(texts[name][n], texts[other][n], strict=True)]
                found[f"same_text_as {other}"] = [sum(same), len(same)]
        if "peak_bytes" in found and "peak_bytes" in figures.get(PLAIN, {}):
            # The drafter is resident while plain generate() runs, but is no part of it.
            resident = {way: own + figures[way]["table_bytes"] for way in (name, PLAIN)}
            share = 0 if name in (PLAIN, STATIC) else resident[name]
            over = found["peak_bytes"] - resident[name] + share - (figures[PLAIN]["peak_bytes"] - resident[PLAIN])
            found |= {"drafter_bytes": share, "peak_over_plain": over, "bound": share + found["cache_bytes"]}


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
        options = Options(compiled=args.compile, fused_attention=args.fused)
        call = FastCall(target, drafter, input_ids, *arguments, options)
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
                if time.monotonic() > args.end:
                    break
                found["verify"][1 + drafts] = timed(lambda n=drafts: verify(n), args.device, 4 * args.repeats)
                whole = lambda n=drafts: (draft(), verify(n).tolist())  # noqa: E731
                found["round"][1 + drafts] = timed(whole, args.device, 4 * args.repeats)
        return input_ids

    ids = torch.randint(target.config.vocab_size, (size, args.context + 1), device=args.device)
    target.generate(ids, custom_generate=measure, max_new_tokens=64, do_sample=False)
    if 1 in found["verify"]:
        found["rounds_per_plain_pass"] = {n: s / found["verify"][1] for n, s in found["round"].items()}
    return found


def show(result: dict) -> None:
    table = Table("case", "way", "tokens/s", "ratio", "to the static loop", "acceptance", "over plain, MiB", "bound")
    for case, figures in result["decode"].items():
        for name, f in figures.items():
            numbers = [f["tokens_per_second"], f.get("ratio", 0), f.get("ratio_static", 0)]
            numbers.append(f.get("acceptance_length", 1))
            sizes = [f"{f.get(key, 0) / 2**20:.0f}" for key in ("peak_over_plain", "bound")]
            table.add_row(case, name, *(f"{number:.2f}" for number in numbers), *sizes)
    Console(width=140).print(table)
    for size, costs in result["passes"].items():
        rows = ", ".join(f"{n}: {1e3 * s:.2f}" for n, s in costs["verify"].items())
        whole = ", ".join(f"{n}: {1e3 * s:.2f}" for n, s in costs["round"].items())
        print(f"batch {size}, ms: draft {1e3 * costs['draft']:.2f}; verify by rows {rows}; rounds {whole}")
    print(f"weights at copy bandwidth: target {1e3 * result['floor']['target']:.2f} ms")


def main() -> None:
    args = parse()
    target, drafter, tokenizer = load(args)
    arguments = {name: value for name, value in vars(args).items() if name not in ("end", "seconds")}
    result: dict = {"arguments": arguments, "torch": torch.__version__, "decode": {}, "passes": {}}
    if args.device.startswith("cuda"):
        result["device"] = torch.cuda.get_device_name()

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
    for size in args.batches if args.only != "decode" else []:
        result["passes"][size] = pass_costs(args, target, drafter, size)
        graphs.release(target)
        save()
    for size in args.batches if args.only != "passes" else []:
        for temperature in args.temperatures:
            if time.monotonic() < args.end:
                result["decode"][f"batch {size}, T={temperature}"] = decode_all(
                    args, target, drafter, tokenizer, size, temperature
                )
                save()
    result["stopped"] = time.monotonic() > args.end
    save()
    show(result)


if __name__ == "__main__":
    main()
