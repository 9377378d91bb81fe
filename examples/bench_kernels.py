"""Time DSpine's fused operations and whole draft passes: python examples/bench_kernels.py --out kernels.json

Every operation at the draft shapes of Qwen3-8B: eager, torch.compile of eager, fused, and the floor: the bytes that
must move, at the bandwidth of a device copy. Then a draft pass behind 1024 rows of context, walk included, of DSpine
and of DFlash on the same backbone. Times are medians over replays of a CUDA graph that takes turns among input sets,
so that weights come from memory and not from a cache. After that, fused results are compared with fp64 ones on
buffers filled with NaN, at the corners of the shape grid: all low, all high, each parameter alone high.
`--tiny` goes through the same steps in small, on the CPU with TRITON_INTERPRET=1.
"""

import argparse
import itertools
import json
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernel_cases import CORNERS, TINY, TINY_CORNERS, USES, Borrowed, Shape, arguments, corners, draft_call, work
from rich.console import Console
from rich.table import Table

from dspine_hf.ops_dspine import EAGER, Ops, fused_ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CACHE_BYTES = 200e6  # the input sets together are larger than the GPU's cache


def flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """||found - exact|| / ||exact||, NaN where an element was not written; of integers the share that differs."""
    if not found.is_floating_point():
        return float((found != exact).float().mean())
    both_out = found.isneginf() & exact.isneginf()
    found, exact = found.double().masked_fill(both_out, 0.0), exact.double().masked_fill(both_out, 0.0)
    return float((found - exact).norm() / exact.norm().clamp_min(1.0))


def check(op: str, fused: Any, p: Shape, dtype: torch.dtype, device: str) -> float:
    """The largest distance of a fused output, written over NaN, from the eager result on fp64 copies."""
    args = arguments(op, p, dtype, None, device)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated with NaN
    outputs = flat(getattr(fused, op)(*args))
    torch.use_deterministic_algorithms(False)
    if op in ("topk", "walk_chain"):  # values: indices among equal scores are free, scores are not rounded
        exact = flat(getattr(EAGER, op)(*args))
        return max(map(distance, outputs, exact)) if op == "walk_chain" else distance(outputs[0], exact[0])
    exact = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    return max(map(distance, outputs, flat(getattr(EAGER, op)(*exact))))


def timed(calls: list[Any], device: str) -> float:
    """Median seconds per call: one CUDA graph of all calls, 50 replays after 5; on the CPU a clock around them."""
    for call in (*calls[:2], *calls[:1]):
        call()
    if device == "cpu":
        begin = time.perf_counter()
        calls[0]()
        return time.perf_counter() - begin
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]  # outputs must not share memory
    except RuntimeError as error:  # something in there waits for the GPU
        print(f"cannot be captured in a CUDA graph: {error}")
        return float("nan")
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(55)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    del kept
    return median(begin.elapsed_time(end) for begin, end in marks[5:]) / 1e3 / len(calls)


def copy_bandwidth(device: str) -> float:
    """Bytes per second of a device copy, read and written."""
    source = torch.randn(2**28 if device != "cpu" else 2**16, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / timed([lambda: target.copy_(source)], device)


def time_operation(op: str, fused: Any, p: Shape, head: torch.Tensor, bandwidth: float, options: argparse.Namespace):
    """One row of the table, in microseconds."""
    device, eager = options.device, getattr(EAGER, op)
    args = arguments(op, p, options.dtype, head, device)
    moved, flops = work(op, p, args, flat(eager(*args)))
    copies = 2 if device == "cpu" else min(64, max(4, int(CACHE_BYTES // moved) + 1))
    sets = [args, *(arguments(op, p, options.dtype, head, device) for _ in range(copies - 1))]
    row = {"operation": op, "bytes": moved, "flops": flops, "floor": moved / bandwidth * 1e6}
    versions = {"eager": eager, "compiled": None, "fused": getattr(fused, op)}
    if not options.no_compile:
        torch._dynamo.reset()
        versions["compiled"] = torch.compile(eager, dynamic=False, backend=options.backend)
    for name, version in versions.items():
        calls = [lambda a=a, f=version: f(*a) for a in sets]
        row[name] = timed(calls, device) * 1e6 if version is not None else None
    return row | {"speedup": row["eager"] / row["fused"], "over floor": row["fused"] / row["floor"]}


def check_corners(
    fused: Ops, names: list[str], base: Shape, grid: dict[str, tuple], options: argparse.Namespace
) -> list[dict]:
    """The named operations at the corners of the grid, in every dtype."""
    found = []
    for op in names:
        for corner in corners(op, grid):
            for dtype, most in TOLERANCE.items():
                error = check(op, fused, replace(base, **corner), dtype, options.device)
                found.append({"operation": op, "dtype": str(dtype), **corner, "error": error, "passed": error <= most})
    return found


def draft_passes(p: Shape, options: argparse.Namespace) -> list[dict]:
    """DFlash, and DSpine by placement and rewritten layers; each eager and fused."""
    with torch.device(options.device):
        target = Borrowed(p, options.dtype).requires_grad_(False)
    kinds: list[dict] = [{"injection": "none", "selection": "independent"}]
    kinds += [{"injection_placement": place, "rewrite_layers": m} for place in ("layer", "mlp") for m in (0, 1, 4)]
    rows = []
    for kind, fused in itertools.product(kinds, (False, True)):
        config, call = draft_call(target, p, options.dtype, {**kind, "use_fused_kernels": fused})
        name = "DFlash" if config.injection == "none" else f"DSpine {config.injection_placement}"
        row = {"drafter": name, "m": config.rewrite_layers, "fused": fused}
        rows.append({**row, "time": timed([call], options.device) * 1e6})
    return rows


def show(title: str, rows: list[dict]) -> None:
    """A table of the rows, whose columns are the keys of the first."""
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    parser.add_argument("--tiny", action="store_true", help="small shapes, for the CPU")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--skip-checks", action="store_true", help="time only")
    parser.add_argument("--checks-only", action="store_true", help="compare only")
    parser.add_argument("--only", default="", help="comma-separated operations, or 'passes'; empty: all")
    options = parser.parse_args()
    torch.manual_seed(0)
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    options.backend = "aot_eager" if options.device == "cpu" else "inductor"
    p, grid = (TINY, TINY_CORNERS) if options.tiny else (Shape(), CORNERS)
    fused = fused_ops(options.device, options.dtype, p.r, p.K)
    if fused is EAGER:
        raise SystemExit("the fused kernels cannot run here, as the warning says: there is nothing to compare.")
    chosen = options.only.split(",") if options.only else [*USES, "passes"]
    result: dict[str, Any] = {"device": options.device, "torch": torch.__version__, "shape": asdict(p)}
    if options.device == "cuda":
        result["device"] = torch.cuda.get_device_name()
    names = [op.name for op in fields(Ops) if op.name in chosen]
    with torch.no_grad():
        result["bandwidth"] = copy_bandwidth(options.device)
        if not options.checks_only:
            head = torch.randn(p.V, p.d, device=options.device, dtype=options.dtype)
            result["operations"] = [time_operation(n, fused, p, head, result["bandwidth"], options) for n in names]
            del head
            if "passes" in chosen:
                result["passes"] = draft_passes(p, options)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
        if not options.skip_checks:
            result["checks"] = check_corners(fused, names, p, grid, options)
            failed = [corner for corner in result["checks"] if not corner["passed"]]
            print(f"{len(result['checks'])} corners, {len(failed)} failed; copy {result['bandwidth'] / 1e12:.3f} TB/s")
            if failed:
                show("not as exact as they must be", [{k: str(v) for k, v in f.items()} for f in failed[:40]])
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in ("operations", "passes"):
        if result.get(name):
            show(f"{name}, microseconds", result[name])


if __name__ == "__main__":
    main()
