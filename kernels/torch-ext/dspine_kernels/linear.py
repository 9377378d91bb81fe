"""Products of a few rows with up to three weights in one launch, for verification and draft passes: x W^T each.

Such a product is as fast as its weights are read. So every program reads whole rows of one weight, which are never
split and never added up again, and the weights that share an input share a launch. Sums are fp32. With PDL a program
of small weights asks the L2 cache for them while the launch before it, which computes x, still runs.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ._ops import custom_op, ops
from ._runtime import early_launches, early_options, next_power_of_2, refuse_unlike
from ._tiles import fetch_early, product, product_options, start_early

MAX_ROWS = 128
MAX_WEIGHTS = 3
AHEAD_BYTES = 8 * 2**20  # larger weights are not asked for early: at the shapes of an 8B target it took longer


@triton.jit
def _linears_kernel(
    x_ptr, W0, W1, W2, y0, y1, y2, N0, N1, N2, tiles0, tiles1, M, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    UPCAST: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of the product with one of the weights, for all rows."""
    tile = tl.program_id(0)
    second, third = (tile >= tiles0) & (tile < tiles0 + tiles1), tile >= tiles0 + tiles1
    W = tl.where(third, W2, tl.where(second, W1, W0))
    y = tl.where(third, y2, tl.where(second, y1, y0))
    N = tl.where(third, N2, tl.where(second, N1, N0))
    tile -= tl.where(third, tiles0 + tiles1, tl.where(second, tiles0, 0))
    m, n, k = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x_at = x_ptr + m[:, None] * K + k[None, :]
    W_at = W + n.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if AHEAD:
        fetch_early(W, tile * BLOCK_N, N, K, BLOCK_N, AHEAD)
    start_early(PDL)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = (start + k < K)[None, :]
        weight = tl.load(W_at + start, mask=(n < N)[:, None] & inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_at + start, mask=(m < M)[:, None] & inside, other=0.0)
        acc = product(x, weight, acc, UPCAST)
    y_at = y + m[:, None] * N + n[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _gated_kernel(
    x_ptr, G, U, y_ptr, N, M, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    UPCAST: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of silu(x G^T) * (x U^T), for all rows, rounded as separate operations are."""
    m, n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m[:, None] * K + k[None, :]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if AHEAD:
        fetch_early(G, tl.program_id(0) * BLOCK_N, N, K, BLOCK_N, AHEAD)
        fetch_early(U, tl.program_id(0) * BLOCK_N, N, K, BLOCK_N, AHEAD)
    start_early(PDL)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = (start + k < K)[None, :]
        mask = (n < N)[:, None] & inside
        weight_g = tl.load(G + at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        weight_u = tl.load(U + at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_at + start, mask=(m < M)[:, None] & inside, other=0.0)
        gate = product(x, weight_g, gate, UPCAST)
        up = product(x, weight_u, up, UPCAST)
    dtype = y_ptr.dtype.element_ty
    g = gate.to(dtype).to(tl.float32)
    y = (g * tl.sigmoid(g)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(dtype), mask=(m < M)[:, None] & (n < N)[None, :])


def launch_shape(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device, gated: bool) -> dict[str, Any]:
    """Tiles, stages and warps, from static shapes alone.

    Args:
        M: rows. N: columns of all weights together, or of each of the two of a gated product. K: the width of a row.
    """
    if dtype is torch.float32:  # products run on the ordinary units, in registers
        return {"BLOCK_M": max(16, next_power_of_2(M)), "BLOCK_N": 16, "BLOCK_K": 32, "STAGES": 2, "num_warps": 4}
    block_m = max(16, next_power_of_2(M))
    block_n = 64 if N >= 16384 and not gated else 32
    weights = block_n * (2 if gated else 1)
    block_k = min(128 if block_m <= 64 else 64, max(16, next_power_of_2(K)))
    # Two programs per multiprocessor: as many bytes in flight as fit beside each other.
    room = 110_000 if torch.version.hip is None else 60_000
    stages = max(2, min(8, room // (2 * block_k * (block_m + weights))))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages, "num_warps": 4}


def ahead(weights: list[torch.Tensor], shape: dict[str, Any], pdl: bool) -> int:
    """AHEAD of [`_tiles.fetch_early`]: numbers of every piece of a program's weights that it asks for; 0: none.

    Args:
        weights: [N, K] each, dense. shape: of [`launch_shape`].
    """
    K, parts = weights[0].shape[1], 128 // shape["BLOCK_N"]
    if not pdl or K % 8 or any(W.element_size() != 2 or W.data_ptr() % 16 for W in weights):
        return 0
    return K // parts // 8 * 8 if sum(W.nbytes for W in weights) <= AHEAD_BYTES else 0


@custom_op("linears", mutates_args=(), schema="(Tensor x, Tensor[] weights) -> Tensor[]")
def _linears(x, weights):
    M, K = x.shape
    outputs = [x.new_empty(M, len(W)) for W in weights]
    shape = launch_shape(M, sum(map(len, weights)), K, x.dtype, x.device, False)
    pdl = early_launches(x.device)
    options = early_options(pdl) | product_options(x.dtype)
    W, y = (list(column) + [column[0]] * (MAX_WEIGHTS - len(weights)) for column in (weights, outputs))
    N = [len(w) for w in weights] + [0] * (MAX_WEIGHTS - len(weights))
    tiles = [triton.cdiv(n, shape["BLOCK_N"]) for n in N]
    shape = {"AHEAD": ahead(weights, shape, pdl), **shape}
    if M:
        _linears_kernel[(sum(tiles),)](x, *W, *y, *N, *tiles[:2], M, K, **shape, **options)
    return outputs


@_linears.register_fake
def _(x, weights):
    return [x.new_empty(x.shape[0], W.shape[0]) for W in weights]


@custom_op("gated_linear", mutates_args=(), schema="(Tensor x, Tensor gate, Tensor up) -> Tensor")
def _gated_linear(x, gate, up):
    (M, K), N = x.shape, len(gate)
    out = x.new_empty(M, N)
    pdl, shape = early_launches(x.device), launch_shape(M, N, K, x.dtype, x.device, True)
    programs = triton.cdiv(N, shape["BLOCK_N"])
    options = early_options(pdl) | product_options(x.dtype)
    shape = {"AHEAD": ahead([gate, up], shape, pdl), **shape}
    if M:
        _gated_kernel[(programs,)](x, gate, up, out, N, M, K, **shape, **options)
    return out


@_gated_linear.register_fake
def _(x, gate, up):
    return x.new_empty(x.shape[0], gate.shape[0])


def _rows(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """x as dense rows. Raises ValueError for shapes that do not belong together."""
    refuse_unlike(x=x, **{f"weight {i}": W for i, W in enumerate(weights)})
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if len(rows) > MAX_ROWS or any(
        W.dim() != 2 or W.shape[1] != x.shape[-1] or not W.is_contiguous() for W in weights
    ):
        raise ValueError(
            f"expected at most {MAX_ROWS} rows of x and dense weights [N, {x.shape[-1]}]; found {len(rows)} rows and "
            f"{[list(W.shape) for W in weights]}. Use torch.nn.functional.linear."
        )
    return rows


def linears(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """x W^T for up to three weights.

    Args:
        x: [.., K], at most 128 rows in all.
        weights: each [N, K], dense, in x's dtype.

    Returns:
        [.., N] for every weight.

    Raises:
        ValueError: too many rows or weights, shapes that do not belong together, dtypes or devices that differ.
    """
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        raise ValueError(f"expected 1 to {MAX_WEIGHTS} weights; found {len(weights)}.")
    return [y.view(*x.shape[:-1], y.shape[-1]) for y in ops.linears(_rows(x, *weights), weights)]


def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x gate^T) * (x up^T): the first half of a SwiGLU.

    Args:
        x: [.., K], at most 128 rows in all. gate, up: [N, K], dense, in x's dtype.

    Returns:
        [.., N].

    Raises:
        ValueError: too many rows, shapes that do not belong together, dtypes or devices that differ.
    """
    if gate.shape != up.shape:
        raise ValueError(f"expected gate and up of one shape; found {list(gate.shape)} and {list(up.shape)}.")
    return ops.gated_linear(_rows(x, gate, up), gate, up).view(*x.shape[:-1], gate.shape[0])
