"""What one draft costs by kind of drafter, and what its tokens win: python examples/draft_times.py --out drafts.json

Every kind drafts one block greedily, batch 1, with random weights at a target's shapes, behind a context whose keys
and values are there: DFlash, DSpine, DSpark- and DFlash2-style, and EAGLE-3-style, which runs its layer and the whole
head token by token. Each runs as it would be served: the head is read once per decision, and no more of the best
tokens are kept than are needed. Times are of CUDA graphs of the eager operations, and with the fused kernels where a
kind has them; on the CPU without graphs. Beside them the floor, the weights' bytes at the bandwidth of a copy, every
pass over a weight counted; steps, the passes that wait for tokens of one another; MLPs, those of layers, in a row.

With `--plain` and `--verify`, milliseconds of the target's passes over one row and over a block (bench_decode.py has
both), acceptance lengths become the expected speed-up over plain decoding, length * plain / (verify + draft):

    python examples/draft_times.py --plain 6.1 --verify 6.4 --acceptance dflash=2.75 dspine-m4=3.36
    python examples/draft_times.py --plain 6.1 --verify 6.4 --results results/*.json

Results are those of compare_drafters.py, whose lengths at T = 0 come from K = 16 candidates (`--candidates` here).
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_decode import copy_bandwidth
from bench_kernels import show, timed
from draft_cases import KINDS, LAYERS, SHAPES, Scene, build, set_scene
from torch.utils._python_dispatch import TorchDispatchMode

from dspine_hf.journal import write_atomically
from dspine_hf.ops_dspine import EAGER


class WeightReads(TorchDispatchMode):
    """Counts the bytes of these models' weights that operations read: of an embedding's, the rows looked up."""

    def __init__(self, *models: Any):
        super().__init__()
        weights = [t for model in models for t in (*model.parameters(), *model.buffers())]
        self.sizes, self.total = {t.untyped_storage().data_ptr(): t.nbytes for t in weights}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in args if not func.is_view else ():
            if isinstance(value, torch.Tensor) and (size := self.sizes.get(value.untyped_storage().data_ptr())):
                self.total += out.nbytes if func is torch.ops.aten.embedding.default else size
        return out


def work(drafter: Any, draft: Callable[[], torch.Tensor], target: Any) -> tuple[int, int]:
    """The bytes of weights that an eager draft reads, and the MLPs that run one after another."""
    runs: list[Any] = []
    hooks = [layer.mlp.down_proj.register_forward_hook(lambda *_: runs.append(None)) for layer in drafter.layers]
    with WeightReads(drafter, target) as reads:
        draft()
    for hook in hooks:
        hook.remove()
    return reads.total, len(runs)


def measure(name: str, scene: Scene, bandwidth: float) -> list[dict[str, Any]]:
    """A row per way to run a kind's draft, in milliseconds."""
    torch.manual_seed(0)
    kind, rows, graph = KINDS[name], [], scene.device != "cpu"
    drafter = build(kind, scene)
    read, mlps = work(drafter, kind.draft(drafter, scene), scene.target)
    for way in ("eager",) if not graph else ("graph", "fused graph") if kind.fused else ("graph",):
        drafter.config.use_fused_kernels = way == "fused graph"
        if way == "fused graph" and drafter.ops is EAGER:
            continue  # they cannot run here, as the warning says
        call = kind.draft(drafter, scene)
        spent = timed([call] * 4, scene.device) * 1e3
        row = {"drafter": name, "way": way, "ms": None if math.isnan(spent) else spent, "MB": read / 1e6}
        row |= {"floor ms": read / bandwidth * 1e3, "steps": kind.steps(scene.block - 1), "MLPs": mlps}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def lengths_of(options: argparse.Namespace) -> list[tuple[str, str, float]]:
    """(source, kind, acceptance length) of the options; what is not timed here is named and left out."""
    found = []
    for entry in options.acceptance:
        name, _, length = entry.partition("=")
        if name not in KINDS or not length:
            raise SystemExit(f"expected NAME=LENGTH with one of {', '.join(KINDS)}; found {entry!r}.")
        found.append((entry, name, float(length)))
    for path in map(Path, options.results):
        record = json.loads(path.read_text())
        name, block = kind_of(record.get("variant", {})), record.get("variant", {}).get("config", {}).get("block_size")
        if name not in KINDS or block != options.block or "0" not in record["offline"]:
            print(
                f"left out {path}: {name}, blocks of {block}; timed are {', '.join(KINDS)}, blocks of {options.block}"
            )
            continue
        found.append((path.stem, name, record["offline"]["0"]["mean_acceptance_length"]))
    return found


def kind_of(variant: dict[str, Any]) -> str:
    """The kind of a `lab.Variant`'s fields."""
    config = variant.get("config", {})
    if variant.get("oracle") or config.get("num_hidden_layers", LAYERS) != LAYERS:
        return "an oracle" if variant.get("oracle") else f"of {config['num_hidden_layers']} layers"
    if variant.get("kind") != "dspine":
        return variant.get("kind", "of no kind")
    if config.get("injection") == "none":
        return "dflash"
    chain = f"-chain{config['chain_passes']}" if config.get("chain_passes") else ""
    place = "" if config.get("injection_placement") == "mlp" else "-layer"
    return f"dspine{place}-m{config.get('rewrite_layers', 0)}{chain}"


def speeds(
    lengths: list[tuple[str, str, float]], rows: list[dict[str, Any]], plain: float, verify: float
) -> list[dict]:
    """Expected speed-ups over plain decoding, by source and way, the fastest first."""
    table = []
    for source, name, length in lengths:
        for row in (row for row in rows if row["drafter"] == name and row["ms"] is not None):
            gain = length * plain / (verify + row["ms"])
            table.append({"source": source, "drafter": name, "way": row["way"], "length": length, "speed-up": gain})
    return sorted(table, key=lambda row: -row["speed-up"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--target", help="folder or .gguf file, of which embedding, head and shapes are taken")
    shapes.add_argument("--shapes", choices=SHAPES, default="smollm2-135m", help="random weights of these shapes")
    parser.add_argument("--block", type=int, default=8, help="the anchor and what is drafted")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--candidates", type=int, default=16, help="K of the kinds that choose among candidates")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--acceptance", nargs="+", default=[], metavar="NAME=LENGTH")
    parser.add_argument("--results", nargs="+", default=[], metavar="FILE", help="written by compare_drafters.py")
    parser.add_argument("--plain", type=float, metavar="MS", help="of a pass of the target over one row")
    parser.add_argument("--verify", type=float, metavar="MS", help="of a pass of the target over a block")
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for the CPU")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.target, options.shapes, options.context, options.candidates = None, "tiny", 24, 4
    given = {bool(options.acceptance or options.results), options.plain is not None, options.verify is not None}
    if len(given) > 1:
        parser.error("expected --plain and --verify together with --acceptance or --results: all, or none of them.")
    return options


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    lengths = lengths_of(options)
    scene = set_scene(options.target, options.shapes, options.context, options.block, options.candidates)
    device = torch.cuda.get_device_name() if scene.device == "cuda" else "cpu"
    bandwidth = copy_bandwidth(scene.device, 2**30 if scene.device == "cuda" else 2**26)
    result = {"device": device, "torch": torch.__version__, "bandwidth": bandwidth}
    result["options"] = {name: str(v) if isinstance(v, Path) else v for name, v in vars(options).items()}
    rows: list[dict[str, Any]] = []
    for name in options.only:
        rows += measure(name, scene, bandwidth)
        result["drafts"], result["speeds"] = rows, speeds(lengths, rows, options.plain, options.verify)
        if options.out:
            write_atomically(options.out, json.dumps(result, indent=1) + "\n")
    show(f"one draft of {options.block - 1} tokens behind {options.context}, {device}", rows)
    if result["speeds"]:
        show(f"expected over plain decoding: {options.plain} ms, verify {options.verify} ms", result["speeds"])


if __name__ == "__main__":
    main()
