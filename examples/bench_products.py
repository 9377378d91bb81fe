"""Time a pass's products of few rows against torch's: python examples/bench_products.py --rows 1 16 --out found.json

Each at the shapes of Qwen3-8B, and at SmolLM2-135M's (narrow), as the fast loop with compiled="fused" calls it:
torch's separate products, the kernel, and the kernel with other tiles. Beside the microseconds stands the share of a
copy's bandwidth at which weights come.
`--tiny` goes through the same steps in small, on the CPU with TRITON_INTERPRET=1.
"""

import argparse
import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_kernels import CACHE_BYTES, copy_bandwidth, distance, show, timed

from dspine_hf.ops_dspine import find_kernels

# The width of a row, and the columns of the weights that share it.
PRODUCTS = {
    "q, k, v": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate, up": (4096, (12288, 12288)),
    "down": (12288, (4096,)),
    "head": (4096, (151936,)),
    "narrow q, k, v": (576, (576, 192, 192)),
    "narrow gate, up": (576, (1536, 1536)),
    "narrow down": (1536, (576,)),
}
TINY = {"q, k, v": (48, (40, 24, 24)), "gate, up": (40, (50, 50))}
TILES: dict[str, dict[str, int]] = {
    "as shipped": {},
    "narrow": {"BLOCK_N": 16},
    "wide": {"BLOCK_N": 64, "BLOCK_K": 128, "STAGES": 4},
    "shallow": {"BLOCK_K": 256, "STAGES": 4},
    "long": {"BLOCK_K": 512, "STAGES": 3},
    "8 warps": {"num_warps": 8},
    "2 warps": {"num_warps": 2},
    "nothing ahead": {"AHEAD": 0},
}


def eager(x: torch.Tensor, weights: list[torch.Tensor], gated: bool) -> list[torch.Tensor]:
    """What a model does: separate products."""
    products = [F.linear(x, W) for W in weights]
    return [F.silu(products[0]) * products[1]] if gated else products


def rows_of(kernels: Any, rows: int, products: dict, options: argparse.Namespace, bandwidth: float) -> list[dict]:
    """Every product by every tile, in microseconds."""
    module, found = import_module(kernels.linears.__module__), []
    genuine = module.launch_shape

    def fused(x: torch.Tensor, weights: list[torch.Tensor], gated: bool) -> list[torch.Tensor]:
        return [kernels.gated_linear(x, *weights)] if gated else kernels.linears(x, weights)

    for name, (width, sizes) in products.items():
        gated, moved = name.endswith("gate, up"), 2 * width * sum(sizes)
        drawn = {"dtype": torch.bfloat16, "device": options.device}
        copies = 2 if options.tiny else max(2, int(CACHE_BYTES // moved) + 1)
        cases = [[torch.randn(n, width, **drawn) * width**-0.5 for n in sizes] for _ in range(copies)]
        x = torch.randn(rows, width, **drawn)
        exact = eager(x.double(), [W.double() for W in cases[0]], gated)
        versions = {"torch": (eager, {})} | {tile: (fused, changes) for tile, changes in TILES.items()}
        for version, (run, changes) in versions.items():
            module.launch_shape = lambda *args, more=changes: genuine(*args) | more
            row = {"product": name, "rows": rows, "version": version}
            try:
                error = max(map(distance, run(x, cases[0], gated), exact))
                spent = timed([partial(run, x, weights, gated) for weights in cases], options.device)
            except Exception as failure:  # a tile that does not fit into shared memory
                print(f"{row}: {type(failure).__name__}", file=sys.stderr)
                continue
            finally:
                module.launch_shape = genuine
            found.append({**row, "time": spent * 1e6, "of bandwidth": moved / spent / bandwidth, "error": error})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16])
    parser.add_argument("--only", nargs="*", help="names of products; default: all")
    parser.add_argument("--out", type=Path, default=Path("products.json"))
    parser.add_argument("--tiny", action="store_true", help="small shapes, for the CPU")
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels, reason = find_kernels()
    if kernels is None or not kernels.available(options.device):
        raise SystemExit(f"the fused kernels cannot run here: {reason or kernels.why_not(options.device)}.")
    products = {
        n: p for n, p in (TINY if options.tiny else PRODUCTS).items() if options.only is None or n in options.only
    }
    result: dict[str, Any] = {"device": options.device, "torch": torch.__version__, "products": []}
    if options.device == "cuda":
        result["device"] = torch.cuda.get_device_name()
    with torch.no_grad():
        result["bandwidth"] = copy_bandwidth(options.device)
        for rows in options.rows:
            result["products"] += rows_of(kernels, rows, products, options, result["bandwidth"])
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    show("products of few rows, microseconds", result["products"])


if __name__ == "__main__":
    main()
