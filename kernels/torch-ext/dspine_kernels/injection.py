"""The gated adjacent injection in three launches: project every slot, gate its message, write it.

With n the injection's own norm, m a slot and m - 1 its predecessor in the block (DESIGN.md section 1):

    project   x_m = [P; A] (w * h_m)    split over columns and over d; the norm's scale per slot is applied afterwards
    gate      z_m = rms(P n), s_m = z_{m-1} or phi(anchor), g_m = sigmoid(A n + B s_m + b) * s_m
    write     h_m + U g_m

Written slots are counted through all blocks, m = block * (B - 1) + slot - 1. All sums are fp32.
"""

import torch
import triton
import triton.language as tl

from ._ops import add_op_namespace_prefix, ops
from ._runtime import MAX_RANK, next_power_of_2, refuse_unlike
from ._tiles import product, product_options

PROGRAMS = 128  # about one per multiprocessor: below that a launch does not reach the memory's bandwidth
MAX_SPLITS = 4


@triton.jit
def _project_kernel(
    h_ptr, w_ptr, P_ptr, A_ptr, x_ptr, squares_ptr, slots, M, d, r, split_d,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """x [splits, M, 2 r], squares [splits, M]: partial sums of [P; A] (w * h) and of h * h over one part of d."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    h_row = h_ptr + (m // slots * (slots + 1) + m % slots + 1).to(tl.int64)[:, None] * d
    rows = tl.where((n < r)[:, None], P_ptr + n[:, None] * d, A_ptr + (n - r)[:, None] * d)  # [BLOCK_N, 1]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(split * split_d, tl.minimum(split * split_d + split_d, d), BLOCK_D):
        k = start + tl.arange(0, BLOCK_D)
        h = tl.load(h_row + k[None, :], mask=(m < M)[:, None] & (k < d)[None, :], other=0.0)
        weight = tl.load(rows + k[None, :], mask=(n < 2 * r)[:, None] & (k < d)[None, :], other=0.0)
        w = tl.load(w_ptr + k, mask=k < d, other=0.0)
        weight = (weight.to(tl.float32) * w.to(tl.float32)[None, :]).to(h.dtype)
        acc = product(h, weight, acc, UPCAST)
        squares += tl.sum(h.to(tl.float32) * h.to(tl.float32), axis=1)
    part = split.to(tl.int64) * M
    tl.store(x_ptr + (part + m)[:, None] * (2 * r) + n[None, :], acc, mask=(m < M)[:, None] & (n < 2 * r)[None, :])
    if tl.program_id(1) == 0:
        tl.store(squares_ptr + part + m, squares, mask=m < M)


@triton.jit
def _projected(x_ptr, squares_ptr, m, column, valid, M, d, r, eps, SPLITS: tl.constexpr):
    """Columns of [P; A] n for the slots m: [m, column], fp32, zero where not valid [m, 1]."""
    x = tl.zeros([m.shape[0], column.shape[0]], tl.float32)
    squares = tl.zeros([m.shape[0], 1], tl.float32)
    row = m.to(tl.int64)[:, None]
    mask = valid & (column < 2 * r)[None, :]
    for split in tl.static_range(SPLITS):
        squares += tl.load(squares_ptr + split * M + row, mask=valid, other=0.0)
        x += tl.load(x_ptr + (split * M + row) * (2 * r) + column[None, :], mask=mask, other=0.0)
    return x * tl.rsqrt(squares / d + eps)


@triton.jit
def _gate_kernel(
    x_ptr, squares_ptr, anchor_ptr, B_ptr, b_ptr, z_ptr, g_ptr, slots, M, d, r, eps,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RANK: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """z [M, r] fp32 and g [M, r]. Slot m needs z of m - 1, so the last program along m also sees m = M."""
    dtype = g_ptr.dtype.element_ty
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = (m % slots == 0)[:, None]  # slot 1, whose message is phi(anchor)
    anchor_at = anchor_ptr + (m // slots).to(tl.int64)[:, None] * r
    known = ((m > 0) & (m <= M))[:, None]  # m - 1 is a slot
    here = (m < M)[:, None]

    k = tl.arange(0, RANK)
    P_n = _projected(x_ptr, squares_ptr, m - 1, tl.where(k < r, k, 2 * r), known, M, d, r, eps, SPLITS)
    scale = tl.rsqrt(tl.sum(P_n * P_n, axis=1)[:, None] / r + eps)
    if tl.program_id(1) == 0:
        z_at = z_ptr + (m - 1).to(tl.int64)[:, None] * r + k[None, :]
        tl.store(z_at, P_n * scale, mask=known & (k < r)[None, :])

    acc = _projected(x_ptr, squares_ptr, m, tl.where(n < r, r + n, 2 * r), here, M, d, r, eps, SPLITS)  # A n
    acc += tl.load(b_ptr + n, mask=n < r, other=0.0).to(tl.float32)[None, :]
    for start in tl.static_range(0, RANK, BLOCK_K):
        c = start + tl.arange(0, BLOCK_K)
        if BLOCK_K == RANK:
            z = P_n * scale
        else:
            z = _projected(x_ptr, squares_ptr, m - 1, tl.where(c < r, c, 2 * r), known, M, d, r, eps, SPLITS) * scale
        anchor = tl.load(anchor_at + c[None, :], mask=here & first & (c < r)[None, :], other=0.0)
        s = tl.where(first, anchor.to(tl.float32), z).to(dtype)
        B = tl.load(B_ptr + n[:, None] * r + c[None, :], mask=(n < r)[:, None] & (c < r)[None, :], other=0.0)
        acc = product(s, B, acc, UPCAST)
    z = _projected(x_ptr, squares_ptr, m - 1, tl.where(n < r, n, 2 * r), known, M, d, r, eps, SPLITS) * scale
    anchor = tl.load(anchor_at + n[None, :], mask=here & first & (n < r)[None, :], other=0.0)
    g = tl.where(first, anchor.to(tl.float32), z).to(dtype).to(tl.float32) * tl.sigmoid(acc)
    tl.store(g_ptr + m.to(tl.int64)[:, None] * r + n[None, :], g.to(dtype), mask=here & (n < r)[None, :])


@triton.jit
def _write_kernel(
    h_ptr, g_ptr, U_ptr, out_ptr, slots, rows, d, r,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """out = h + U g for every slot of every block; slot 0 gets no message."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # block * B + slot
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = row % (slots + 1)
    written = ((row < rows) & (slot > 0))[:, None]
    g_at = g_ptr + (row // (slots + 1) * slots + slot - 1).to(tl.int64)[:, None] * r
    at = row.to(tl.int64)[:, None] * d + n[None, :]
    mask = (row < rows)[:, None] & (n < d)[None, :]
    h = tl.load(h_ptr + at, mask=mask, other=0.0)
    acc = h.to(tl.float32)
    for start in range(0, r, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        g = tl.load(g_at + k[None, :], mask=written & (k < r)[None, :], other=0.0)
        U = tl.load(U_ptr + n[:, None] * r + k[None, :], mask=(n < d)[:, None] & (k < r)[None, :], other=0.0)
        acc = product(g, U, acc, UPCAST)
    tl.store(out_ptr + at, acc.to(h.dtype), mask=mask)


def _tile(n: int, most: int) -> int:
    """A tile length for n rows: a power of two from 16, which matrix units need, to `most`."""
    return max(16, min(most, next_power_of_2(n)))


def _split(programs: int, d: int, block: int) -> tuple[int, int]:
    """Into how many parts to cut d so that about PROGRAMS programs run, and the length of a part."""
    splits = min(max(1, PROGRAMS // programs), triton.cdiv(d, block), MAX_SPLITS)
    length = triton.cdiv(triton.cdiv(d, splits), block) * block
    return triton.cdiv(d, length), length


@torch.library.custom_op(add_op_namespace_prefix("gated_injection"), mutates_args=())
def _gated_injection(
    h: torch.Tensor, anchor: torch.Tensor, w: torch.Tensor, P: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    b: torch.Tensor, U: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    blocks, slots, d = h.shape
    r, M = P.shape[0], blocks * (slots - 1)
    fp32 = {"dtype": torch.float32, "device": h.device}
    out, z, g = torch.empty_like(h), torch.empty(blocks, slots - 1, r, **fp32), h.new_empty(M, r)
    if not M:
        return out.copy_(h), z
    RANK, dots = max(16, next_power_of_2(r)), product_options(h.dtype)
    wide, BLOCK_M = h.dtype is torch.float32, _tile(M, 64)
    shape = {"num_warps": 4}
    if BLOCK_M > 16:
        BLOCK_N, BLOCK_D = 32, _tile(d, 32 if wide else 128)
    elif wide:
        BLOCK_N, BLOCK_D = 16, _tile(d, 64)
    else:  # few rows: most of a program's weights in flight at once
        BLOCK_N, BLOCK_D, shape = 16, _tile(triton.cdiv(d, 2 * MAX_SPLITS), 512), {"num_warps": 8, "num_stages": 2}
    tiles = triton.cdiv(M, BLOCK_M), triton.cdiv(2 * r, BLOCK_N)
    splits, split_d = _split(tiles[0] * tiles[1], d, BLOCK_D)
    x, squares = torch.empty(splits, M, 2 * r, **fp32), torch.empty(splits, M, **fp32)
    _project_kernel[(*tiles, splits)](
        h, w, P, A, x, squares, slots - 1, M, d, r, split_d,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, **shape, **dots,
    )  # fmt: skip
    BLOCK_M, BLOCK_N, BLOCK_K = _tile(M + 1, 32), 16, min(RANK, 32) if wide else RANK
    _gate_kernel[(triton.cdiv(M + 1, BLOCK_M), triton.cdiv(r, BLOCK_N))](
        x, squares, anchor, B, b, z, g, slots - 1, M, d, r, eps,
        SPLITS=splits, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, RANK=RANK, num_warps=8, **dots,
    )  # fmt: skip
    BLOCK_M, BLOCK_N, BLOCK_K = _tile(blocks * slots, 64), 32, min(RANK, 32 if wide else 128)
    _write_kernel[(triton.cdiv(blocks * slots, BLOCK_M), triton.cdiv(d, BLOCK_N))](
        h, g, U, out, slots - 1, blocks * slots, d, r,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, **dots,
    )  # fmt: skip
    return out, z


@_gated_injection.register_fake
def _(h, anchor, w, P, A, B, b, U, eps):
    z = h.new_empty(h.shape[0], h.shape[1] - 1, P.shape[0], dtype=torch.float32)
    return torch.empty_like(h), z


def gated_injection(
    h: torch.Tensor, anchor: torch.Tensor, w: torch.Tensor, P: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    b: torch.Tensor, U: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Write each slot's predicted feature into its successor, the anchor's feature into slot 1.

    Args:
        h: [.., B, d], B >= 2 slots.
        anchor: phi(anchor) [.., r], any float dtype.
        w: weight of the injection's RMSNorm [d]. P, A: [r, d]. B: [r, r]. b: [r]. U: [d, r]; all of h's dtype.
        eps: of the RMSNorm and of the features' `rms`.

    Returns:
        The new h [.., B, d], and the features z [.., B - 1, r] fp32 of slots 1..B-1.

    Raises:
        ValueError: dtypes or devices differ, or r is above 512.
    """
    refuse_unlike(h=h, w=w, P=P, A=A, B=B, b=b, U=U)
    if P.shape[0] > MAX_RANK:
        raise ValueError(
            f"expected a transfer rank of at most {MAX_RANK}; found {P.shape[0]}. Use the eager operation."
        )
    flat = h.reshape(-1, *h.shape[-2:]).contiguous()
    anchor = anchor.reshape(-1, anchor.shape[-1]).contiguous()
    weights = (t.contiguous() for t in (w, P, A, B, b, U))
    out, z = ops.gated_injection(flat, anchor, *weights, eps)
    return out.view(h.shape), z.view(*h.shape[:-2], *z.shape[-2:])
