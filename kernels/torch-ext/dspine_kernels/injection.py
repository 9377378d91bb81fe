"""The gated adjacent injection in three launches: project every slot, gate its message, write it.

With n the injection's own norm, m a slot and m - 1 its predecessor in the block (DSpine, arXiv 2609.36173):

    project   x_m = [P; A] (w * h_m)    split over columns and over d; the norm's scale per slot is applied afterwards
    gate      z_m = rms(P n), s_m = z_{m-1} or phi(anchor), g_m = sigmoid(A n + B s_m + b) * s_m
    write     h_m + U g_m

Written slots are counted through all blocks, m = block * (B - 1) + slot - 1. All sums are fp32.

With PDL (programmatic dependent launch, NVIDIA from compute capability 9.0) a launch begins while the one before it
ends: it loads its weights, which nothing computes, and waits for the rest.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ._ops import custom_op, ops
from ._runtime import MAX_RANK, early_launches, early_options, next_power_of_2, refuse_unlike
from ._tiles import product, product_options, start_early

PROGRAMS = 128  # about one per multiprocessor: below that a launch does not reach the memory's bandwidth
MAX_SPLITS = 8


@triton.jit
def _project_kernel(
    h_ptr, w_ptr, P_ptr, A_ptr, x_ptr, squares_ptr, slots, M, d, r, split_d,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """x [splits, M, 2 r], squares [splits, M]: partial sums of [P; A] (w * h) and of h * h over one part of d."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tiles = tl.cdiv(r, BLOCK_N)  # of P; those of A come after them
    second = tl.program_id(1) >= tiles
    n = (tl.program_id(1) - tl.where(second, tiles, 0)) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    h_row = h_ptr + (m // slots * (slots + 1) + m % slots + 1).to(tl.int64)[:, None] * d
    rows = tl.where(second, A_ptr, P_ptr) + n[:, None] * d  # chosen as a whole, so that loads stay wide
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    if ONCE:
        k = split * split_d + tl.arange(0, BLOCK_D)
        weight = tl.load(rows + k[None, :], mask=(n < r)[:, None] & (k < d)[None, :], other=0.0)
        w = tl.load(w_ptr + k, mask=k < d, other=0.0)
        start_early(PDL)
        h = tl.load(h_row + k[None, :], mask=(m < M)[:, None] & (k < d)[None, :], other=0.0)
        weight = (weight.to(tl.float32) * w.to(tl.float32)[None, :]).to(h.dtype)
        acc = product(h, weight, acc, UPCAST)
        squares += tl.sum(h.to(tl.float32) * h.to(tl.float32), axis=1)
    else:
        start_early(PDL)
        for start in range(split * split_d, tl.minimum(split * split_d + split_d, d), BLOCK_D):
            k = start + tl.arange(0, BLOCK_D)
            h = tl.load(h_row + k[None, :], mask=(m < M)[:, None] & (k < d)[None, :], other=0.0)
            weight = tl.load(rows + k[None, :], mask=(n < r)[:, None] & (k < d)[None, :], other=0.0)
            w = tl.load(w_ptr + k, mask=k < d, other=0.0)
            weight = (weight.to(tl.float32) * w.to(tl.float32)[None, :]).to(h.dtype)
            acc = product(h, weight, acc, UPCAST)
            squares += tl.sum(h.to(tl.float32) * h.to(tl.float32), axis=1)
    part = split.to(tl.int64) * M
    x_at = x_ptr + (part + m)[:, None] * (2 * r) + tl.where(second, r, 0) + n[None, :]
    tl.store(x_at, acc, mask=(m < M)[:, None] & (n < r)[None, :])
    if tl.program_id(1) == 0:
        tl.store(squares_ptr + part + m, squares, mask=m < M)


@triton.jit
def _projected(x_ptr, squares_ptr, m, column, valid, M, d, r, eps, SPLITS: tl.constexpr):
    """Columns below r of P n for the slots m: [m, column], fp32, zero where not valid [m, 1]; of A n behind x + r."""
    x = tl.zeros([m.shape[0], column.shape[0]], tl.float32)
    squares = tl.zeros([m.shape[0], 1], tl.float32)
    row = m.to(tl.int64)[:, None]
    mask = valid & (column < r)[None, :]
    for split in tl.static_range(SPLITS):
        squares += tl.load(squares_ptr + split * M + row, mask=valid, other=0.0)
        x += tl.load(x_ptr + (split * M + row) * (2 * r) + column[None, :], mask=mask, other=0.0)
    return x * tl.rsqrt(squares / d + eps)


@triton.jit
def _gate_kernel(
    x_ptr, squares_ptr, anchor_ptr, B_ptr, b_ptr, z_ptr, g_ptr, slots, M, d, r, eps,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RANK: tl.constexpr,
    PDL: tl.constexpr, UPCAST: tl.constexpr,
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
    if BLOCK_K == RANK:
        B = tl.load(B_ptr + n[:, None] * r + k[None, :], mask=(n < r)[:, None] & (k < r)[None, :], other=0.0)
    bias = tl.load(b_ptr + n, mask=n < r, other=0.0).to(tl.float32)
    start_early(PDL)
    P_n = _projected(x_ptr, squares_ptr, m - 1, k, known, M, d, r, eps, SPLITS)
    own = _projected(x_ptr, squares_ptr, m - 1, n, known, M, d, r, eps, SPLITS)
    acc = _projected(x_ptr + r, squares_ptr, m, n, here, M, d, r, eps, SPLITS)  # A n
    anchor = tl.load(anchor_at + n[None, :], mask=here & first & (n < r)[None, :], other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(P_n * P_n, axis=1)[:, None] / r + eps)
    if tl.program_id(1) == 0:
        z_at = z_ptr + (m - 1).to(tl.int64)[:, None] * r + k[None, :]
        tl.store(z_at, P_n * scale, mask=known & (k < r)[None, :])
    acc += bias[None, :]
    for start in tl.static_range(0, RANK, BLOCK_K):
        c = start + tl.arange(0, BLOCK_K)
        if BLOCK_K == RANK:
            z = P_n * scale
        else:
            z = _projected(x_ptr, squares_ptr, m - 1, c, known, M, d, r, eps, SPLITS) * scale
            B = tl.load(B_ptr + n[:, None] * r + c[None, :], mask=(n < r)[:, None] & (c < r)[None, :], other=0.0)
        phi = tl.load(anchor_at + c[None, :], mask=here & first & (c < r)[None, :], other=0.0)
        acc = product(tl.where(first, phi.to(tl.float32), z).to(dtype), B, acc, UPCAST)
    g = tl.where(first, anchor, own * scale).to(dtype).to(tl.float32) * tl.sigmoid(acc)
    tl.store(g_ptr + m.to(tl.int64)[:, None] * r + n[None, :], g.to(dtype), mask=here & (n < r)[None, :])


@triton.jit
def _write_kernel(
    h_ptr, g_ptr, U_ptr, out_ptr, slots, rows, d, r,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RANK: tl.constexpr, PDL: tl.constexpr,
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
    if BLOCK_K == RANK:
        k = tl.arange(0, BLOCK_K)
        U = tl.load(U_ptr + n[:, None] * r + k[None, :], mask=(n < d)[:, None] & (k < r)[None, :], other=0.0)
    start_early(PDL)
    h = tl.load(h_ptr + at, mask=mask, other=0.0)
    acc = h.to(tl.float32)
    for start in range(0, r, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        g = tl.load(g_at + k[None, :], mask=written & (k < r)[None, :], other=0.0)
        if BLOCK_K != RANK:
            U = tl.load(U_ptr + n[:, None] * r + k[None, :], mask=(n < d)[:, None] & (k < r)[None, :], other=0.0)
        acc = product(g, U, acc, UPCAST)
    tl.store(out_ptr + at, acc.to(h.dtype), mask=mask)


def _tile(n: int, most: int) -> int:
    """A tile length for n rows: a power of two from 16, which matrix units need, to `most`."""
    return max(16, min(most, next_power_of_2(n)))


def launch_shape(M: int, d: int, r: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Tile sizes, warps and splits of the three launches, from static shapes alone.

    Args:
        M: written slots in all. d, r: as in [`gated_injection`].
    """
    wide, rank = dtype is torch.float32, max(16, next_power_of_2(r))
    project = {"BLOCK_M": _tile(M, 64), "BLOCK_N": 16, "num_warps": 4}
    if project["BLOCK_M"] > 16:
        project |= {"BLOCK_N": 32, "BLOCK_D": _tile(d, 32 if wide else 128)}
    elif wide:
        project |= {"BLOCK_D": _tile(d, 64)}
    else:  # few rows: all of a program's weights in flight at once, and no warp computes what another one does
        project |= {"BLOCK_N": 32, "BLOCK_D": _tile(triton.cdiv(d, MAX_SPLITS), 512)}
    programs = triton.cdiv(M, project["BLOCK_M"]) * 2 * triton.cdiv(r, project["BLOCK_N"])
    splits = min(max(1, PROGRAMS // programs), MAX_SPLITS)
    gate = {"BLOCK_M": _tile(M + 1, 32), "BLOCK_N": 16, "BLOCK_K": min(rank, 32) if wide else rank, "num_warps": 4}
    write = {"BLOCK_M": _tile(M, 64), "BLOCK_N": 32, "BLOCK_K": min(rank, 32 if wide else 256), "num_warps": 4}
    return {"splits": splits, "project": project, "gate": gate, "write": write, "pdl": early_launches(device)}


@custom_op("gated_injection", mutates_args=())
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
    shape, RANK = launch_shape(M, d, r, h.dtype, h.device), max(16, next_power_of_2(r))
    project, gate, write = shape["project"], shape["gate"], shape["write"]
    common = product_options(h.dtype) | early_options(shape["pdl"])
    split_d = triton.cdiv(triton.cdiv(d, shape["splits"]), project["BLOCK_D"]) * project["BLOCK_D"]
    splits = triton.cdiv(d, split_d)
    x, squares = torch.empty(splits, M, 2 * r, **fp32), torch.empty(splits, M, **fp32)
    _project_kernel[(triton.cdiv(M, project["BLOCK_M"]), 2 * triton.cdiv(r, project["BLOCK_N"]), splits)](
        h, w, P, A, x, squares, slots - 1, M, d, r, split_d, ONCE=split_d == project["BLOCK_D"], **project, **common
    )
    _gate_kernel[(triton.cdiv(M + 1, gate["BLOCK_M"]), triton.cdiv(r, gate["BLOCK_N"]))](
        x, squares, anchor, B, b, z, g, slots - 1, M, d, r, eps, SPLITS=splits, RANK=RANK, **gate, **common
    )
    _write_kernel[(triton.cdiv(blocks * slots, write["BLOCK_M"]), triton.cdiv(d, write["BLOCK_N"]))](
        h, g, U, out, slots - 1, blocks * slots, d, r, RANK=RANK, **write, **common
    )
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
