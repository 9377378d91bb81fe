"""Time DSpine's fused operations and whole draft passes: python examples/bench_kernels.py --out kernels.json

Every operation at the draft shapes of Qwen3-8B: eager, torch.compile of eager, fused, and the floor: the bytes that
must move, at the bandwidth of a device copy; attention over trees of drafts too, beside chains as long. Then a draft
pass behind 1024 rows of context, walk included, of DSpine and of DFlash on the same backbone. Times are medians over
replays of a CUDA graph that takes turns among input sets, so that weights come from memory and not from a cache. After
that, fused results are compared with fp64 ones on
buffers filled with NaN, at the corners of the shape grid: all low, all high, each parameter alone high.
`--guard` puts every input between margins of NaN, which must stay, and must not be read.
`--tiny` goes through the same steps in small, on the CPU with TRITON_INTERPRET=1.
"""

import argparse
import contextlib
import importlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernel_cases import (
    CORNERS,
    EAGER_TREES,
    TINY,
    TINY_CORNERS,
    USES,
    Borrowed,
    Shape,
    arguments,
    corners,
    draft_call,
    operation,
    path_scores,
    work,
)
from rich.console import Console
from rich.table import Table

from dspine_hf.fast_linear import few_rows
from dspine_hf.ops_dspine import EAGER, Ops, fused_ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CACHE_BYTES = 200e6  # the input sets together are larger than the GPU's cache
MARGIN = 4096  # elements on both sides of a guarded input
TREES = (15, 31, 63)  # drafts
# Other tiles and splits of the injection, to compare: what they change in `injection.launch_shape`.
VARIANTS: dict[str, dict[str, Any]] = {
    "no overlap": {"pdl": False},
    "4 splits": {"splits": 4, "project": {"BLOCK_N": 16, "BLOCK_D": 1024, "num_warps": 2}},
    "16 splits": {"splits": 16, "project": {"BLOCK_D": 256}},
    "narrow": {"project": {"BLOCK_N": 16, "BLOCK_D": 512, "num_warps": 2}, "write": {"BLOCK_N": 16, "num_warps": 2}},
    "wide gate": {"gate": {"BLOCK_N": 32, "num_warps": 8}},
}


def flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """||found - exact|| / ||exact||, NaN where an element was not written; of integers the share that differs."""
    if not found.is_floating_point():
        return float((found != exact).float().mean())
    both_out = found.isneginf() & exact.isneginf()
    found, exact = found.double().masked_fill(both_out, 0.0), exact.double().masked_fill(both_out, 0.0)
    return float((found - exact).norm() / exact.norm().clamp_min(1.0))


def guarded(value: Any) -> tuple[Any, torch.Tensor | None]:
    """A copy of a tensor between margins of NaN (of integers: of a large negative number), and the whole buffer."""
    if not isinstance(value, torch.Tensor):
        return value, None
    fill = float("nan") if value.is_floating_point() else -(2**20)
    whole = value.new_full((value.numel() + 2 * MARGIN,), fill)
    inner = whole[MARGIN:-MARGIN].view(value.shape)
    return inner.copy_(value), whole


def untouched(whole: torch.Tensor | None) -> bool:
    """Whether the margins are as they were."""
    if whole is None:
        return True
    margins = torch.cat([whole[:MARGIN], whole[-MARGIN:]])
    return bool((margins.isnan() if whole.is_floating_point() else margins == -(2**20)).all())


def check(op: str, fused: Any, p: Shape, dtype: torch.dtype, device: str, guard: bool = False) -> float:
    """The largest distance of a fused output, written over NaN, from the eager result on fp64 copies."""
    args, buffers = arguments(op, p, dtype, None, device), []
    if guard:
        args, buffers = (list(column) for column in zip(*map(guarded, args), strict=True))
    eager, given = operation(EAGER, op), args
    if op == "move_columns":  # in place
        given = [a.clone() for a in args]
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated with NaN
    outputs = flat(operation(fused, op)(*args))
    torch.use_deterministic_algorithms(False)
    if not all(map(untouched, buffers)):
        return float("inf")
    if op in ("topk", "walk_chain"):  # values: indices among equal scores are free, scores are not rounded
        exact = flat(eager(*args))
        return max(map(distance, outputs, exact)) if op == "walk_chain" else distance(outputs[0], exact[0])
    if op == "grow_tree":
        return distance(path_scores(*args, *outputs), path_scores(*args, *eager(*args)))
    exact = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in given]
    return max(map(distance, outputs, flat(eager(*exact))))


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
    device, eager = options.device, operation(EAGER, op)
    args = arguments(op, p, options.dtype, head, device)
    moved, flops = work(op, p, args, flat(eager(*args)))
    copies = 2 if device == "cpu" else min(64, max(4, int(CACHE_BYTES // moved) + 1))
    sets = [args, *(arguments(op, p, options.dtype, head, device) for _ in range(copies - 1))]
    row = {"operation": op, "bytes": moved, "flops": flops, "floor": moved / bandwidth * 1e6}
    versions = {"eager": eager, "compiled": None, "fused": operation(fused, op)}
    if not options.no_compile and op not in EAGER_TREES:
        torch._dynamo.reset()
        versions["compiled"] = torch.compile(eager, dynamic=False, backend=options.backend)
    for name, version in versions.items():
        calls = [lambda a=a, f=version: f(*a) for a in sets]
        row[name] = timed(calls, device) * 1e6 if version is not None else None
    return row | {"speedup": row["eager"] / row["fused"], "over floor": row["fused"] / row["floor"]}


@contextlib.contextmanager
def varied(fused: Ops, changes: dict[str, Any]) -> Iterator[None]:
    """The injection with other tiles while it lasts; entries of a launch are changed one by one."""
    module = importlib.import_module(fused.gated_injection.__module__)
    genuine = module.launch_shape

    def changed(*args: Any) -> dict[str, Any]:
        shape = genuine(*args)
        for name, value in changes.items():
            shape[name] = {**shape[name], **value} if isinstance(value, dict) else value
        return shape

    module.launch_shape = changed
    try:
        yield
    finally:
        module.launch_shape = genuine


def time_variants(fused: Ops, p: Shape, bandwidth: float, options: argparse.Namespace) -> list[dict]:
    """The injection by tiles and by batch, in microseconds, and how exact it is."""
    rows = []
    for batch in (1,) if options.tiny else (1, 8, 32):
        shape = replace(p, batch=batch)
        for name, changes in {"as shipped": {}, **VARIANTS}.items():
            if batch > 1 and "pdl" not in changes and changes:
                continue  # tiles for few rows
            with varied(fused, changes):
                quiet = argparse.Namespace(**{**vars(options), "no_compile": True})
                row = time_operation("gated_injection", fused, shape, None, bandwidth, quiet)
                error = check("gated_injection", fused, shape, options.dtype, options.device)
            rows.append({"variant": name, "batch": batch, **row, "error": error})
    return rows


def check_corners(
    fused: Ops, names: list[str], base: Shape, grid: dict[str, tuple], options: argparse.Namespace
) -> list[dict]:
    """The named operations at the corners of the grid, in every dtype."""
    found = []
    for op in names:
        for corner in corners(op, grid)[: 2 if options.few else None]:
            for dtype, most in TOLERANCE.items():
                if options.few and dtype is not options.dtype:
                    continue
                if options.device == "cpu" and dtype is torch.bfloat16:
                    most *= 2  # the interpreter cuts off where a GPU rounds
                error = check(op, fused, replace(base, **corner), dtype, options.device, options.guard)
                found.append({"operation": op, "dtype": str(dtype), **corner, "error": error, "passed": error <= most})
    return found


def time_trees(fused: Ops, p: Shape, head: torch.Tensor, bandwidth: float, options: argparse.Namespace) -> list[dict]:
    """Attention over trees of drafts, in microseconds, and over chains of as many."""
    rows = []
    for nodes in (TREES[0],) if options.tiny else TREES:
        for name, shape in (("chain", replace(p, B=1 + nodes)), ("tree", replace(p, nodes=nodes))):
            shape = replace(shape, keys=p.keys + nodes)
            row = time_operation("verify_attention", fused, shape, head, bandwidth, options)
            rows.append({"drafts": nodes, "kind": name, **row})
    return rows


def draft_passes(p: Shape, options: argparse.Namespace) -> list[dict]:
    """DFlash, and DSpine by placement and rewritten layers: eager, fused, and as the fast loop's compiled="fused"."""
    with torch.device(options.device):
        target = Borrowed(p, options.dtype).requires_grad_(False)
    kinds: list[dict] = [{"injection": "none", "selection": "independent"}]
    kinds += [{"injection_placement": place, "rewrite_layers": m} for place in ("layer", "mlp") for m in (0, 1, 4)]
    ways = [("eager", False, False), ("fused", True, False), ("fused, compiled", True, True)]
    rows, least = [], {}
    for way, fused, compiled in ways if not options.no_compile else ways[:2]:
        for kind in kinds:
            torch._dynamo.reset()
            backend = (few_rows if options.device == "cuda" else options.backend) if compiled else None
            config, call = draft_call(target, p, options.dtype, {**kind, "use_fused_kernels": fused}, backend)
            name = "DFlash" if config.injection == "none" else f"DSpine {config.injection_placement}"
            spent = timed([call], options.device) * 1e6
            spent_by_dflash = least.setdefault(way, spent)  # DFlash comes first
            row = {"drafter": name, "m": config.rewrite_layers, "way": way, "time": spent}
            rows.append({**row, "over DFlash": spent / spent_by_dflash})
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
    parser.add_argument(
        "--only", default="", help="comma-separated operations, 'trees', 'variants', 'passes'; empty: all"
    )
    parser.add_argument("--few", action="store_true", help="check the lowest and the highest corner in one dtype")
    parser.add_argument("--guard", action="store_true", help="check with margins of NaN around every input")
    options = parser.parse_args()
    torch.manual_seed(0)
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    options.backend = "aot_eager" if options.device == "cpu" else "inductor"
    p, grid = (TINY, TINY_CORNERS) if options.tiny else (Shape(), CORNERS)
    fused = fused_ops(options.device, options.dtype, p.r, p.K)
    if fused is EAGER:
        raise SystemExit("the fused kernels cannot run here, as the warning says: there is nothing to compare.")
    chosen = options.only.split(",") if options.only else [*USES, "trees", "variants", "passes"]
    result: dict[str, Any] = {"device": options.device, "torch": torch.__version__, "shape": asdict(p)}
    if options.device == "cuda":
        result["device"] = torch.cuda.get_device_name()
    names = [op for op in USES if op in chosen]
    with torch.no_grad():
        result["bandwidth"] = copy_bandwidth(options.device)
        if not options.checks_only:
            head = torch.randn(p.V, p.d, device=options.device, dtype=options.dtype)
            timed_ones = [name for name in names if name != "move_columns"]  # its addresses cannot be captured
            result["operations"] = [
                time_operation(name, fused, p, head, result["bandwidth"], options) for name in timed_ones
            ]
            if "trees" in chosen:
                result["trees"] = time_trees(fused, p, head, result["bandwidth"], options)
            del head
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            if "variants" in chosen:
                result["variants"] = time_variants(fused, p, result["bandwidth"], options)
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
    for name in ("operations", "trees", "variants", "passes"):
        if result.get(name):
            show(f"{name}, microseconds", result[name])


if __name__ == "__main__":
    main()
