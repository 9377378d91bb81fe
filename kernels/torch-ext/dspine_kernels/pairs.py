"""The transition cache's two ends: the gated write with K alternative messages per slot, and the pairs' scores.

    pair_write     h + U (sigmoid(A n(h) + B s + b) * s) for K messages s: A n(h) once per slot, split over d
    pair_scores    E[candidates] . norm(hidden): the head's rows are gathered inside, split over d

Slots are counted through all batch rows. The norm's weight is multiplied into the other operand (A, or the rows of E)
and its scale is applied to the fp32 sums; parts of a sum are added in a fixed order, so results repeat bit by bit.
"""

import torch
import triton
import triton.language as tl

from ._ops import custom_op, ops
from ._runtime import DTYPES, early_launches, early_options, next_power_of_2, refuse_unlike
from ._tiles import product, product_options, start_early

PROGRAMS = 128  # about one per multiprocessor
MAX_SPLITS = 16


# ---- pair_write ---------------------------------------------------------------------------------------------------


@triton.jit
def _project_kernel(
    h_ptr, w_ptr, A_ptr, x_ptr, squares_ptr, h_row, h_slot, A_row, slots, M, d, r, split_d,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """x [splits, M, r], squares [splits, M]: partial sums of A (w * h) and of h * h over one part of d."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    start_early(PDL)
    h_at = h_ptr + (m // slots).to(tl.int64)[:, None] * h_row + (m % slots).to(tl.int64)[:, None] * h_slot
    A_at = A_ptr + n.to(tl.int64)[:, None] * A_row
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(split * split_d, tl.minimum(split * split_d + split_d, d), BLOCK_D):
        k = start + tl.arange(0, BLOCK_D)
        h = tl.load(h_at + k[None, :], mask=(m < M)[:, None] & (k < d)[None, :], other=0.0)
        A = tl.load(A_at + k[None, :], mask=(n < r)[:, None] & (k < d)[None, :], other=0.0)
        w = tl.load(w_ptr + k, mask=k < d, other=0.0).to(tl.float32)
        acc = product(h, (A.to(tl.float32) * w[None, :]).to(h.dtype), acc, UPCAST)
        squares += tl.sum(h.to(tl.float32) * h.to(tl.float32), axis=1)
    part = split.to(tl.int64) * M
    tl.store(x_ptr + (part + m)[:, None] * r + n[None, :], acc, mask=(m < M)[:, None] & (n < r)[None, :])
    if tl.program_id(1) == 0:
        tl.store(squares_ptr + part + m, squares, mask=m < M)


@triton.jit
def _gate_kernel(
    x_ptr, squares_ptr, s_ptr, B_ptr, b_ptr, g_ptr, s_row, s_slot, s_pair, B_row, slots, pairs, M, d, r, eps,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """g [M, pairs, r] = sigmoid(A n + B s + b) * s, in the dtype of the product with U."""
    start_early(PDL)
    dtype = g_ptr.dtype.element_ty
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # slot m // pairs, alternative m % pairs
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = m // pairs
    here, inside = (m < M * pairs)[:, None], (n < r)[None, :]
    s_at = s_ptr + (slot // slots).to(tl.int64)[:, None] * s_row + (slot % slots).to(tl.int64)[:, None] * s_slot
    s_at += (m % pairs)[:, None] * s_pair
    x = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for split in tl.static_range(SPLITS):
        row = (slot + split * M).to(tl.int64)
        squares += tl.load(squares_ptr + row, mask=m < M * pairs, other=0.0)
        x += tl.load(x_ptr + row[:, None] * r + n[None, :], mask=here & inside, other=0.0)
    acc = x * tl.rsqrt(squares / d + eps)[:, None]
    acc += tl.load(b_ptr + n, mask=n < r, other=0.0).to(tl.float32)[None, :]
    for start in range(0, r, BLOCK_R):
        k = start + tl.arange(0, BLOCK_R)
        s = tl.load(s_at + k[None, :], mask=here & (k < r)[None, :], other=0.0).to(dtype)
        B = tl.load(B_ptr + n[:, None] * B_row + k[None, :], mask=(n < r)[:, None] & (k < r)[None, :], other=0.0)
        acc = product(s, B, acc, UPCAST)
    message = tl.load(s_at + n[None, :], mask=here & inside, other=0.0).to(dtype).to(tl.float32)
    gated = tl.sigmoid(acc) * message
    tl.store(g_ptr + m.to(tl.int64)[:, None] * r + n[None, :], gated.to(dtype), mask=here & inside)


@triton.jit
def _write_kernel(
    g_ptr, h_ptr, U_ptr, out_ptr, h_row, h_slot, U_row, slots, pairs, M, d, r,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out [M, pairs, d] = h + U g."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start_early(PDL)
    slot = m // pairs
    here = (m < M * pairs)[:, None]
    h_at = h_ptr + (slot // slots).to(tl.int64)[:, None] * h_row + (slot % slots).to(tl.int64)[:, None] * h_slot
    acc = tl.load(h_at + n[None, :], mask=here & (n < d)[None, :], other=0.0).to(tl.float32)
    for start in range(0, r, BLOCK_R):
        k = start + tl.arange(0, BLOCK_R)
        g = tl.load(g_ptr + m.to(tl.int64)[:, None] * r + k[None, :], mask=here & (k < r)[None, :], other=0.0)
        U_at = U_ptr + n.to(tl.int64)[:, None] * U_row + k[None, :]
        U = tl.load(U_at, mask=(n < d)[:, None] & (k < r)[None, :], other=0.0)
        acc = product(g, U, acc, UPCAST)
    out_at = out_ptr + m.to(tl.int64)[:, None] * d + n[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=here & (n < d)[None, :])


def _split(programs: int, d: int, block: int) -> tuple[int, int]:
    """Into how many parts to cut d when `programs` programs exist without cutting, and the length of a part."""
    splits = max(1, min(PROGRAMS // max(programs, 1), triton.cdiv(d, 2 * block), MAX_SPLITS))
    length = triton.cdiv(triton.cdiv(d, splits), block) * block
    return triton.cdiv(d, length), length


def _write_tile(M: int, d: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows and columns of one program of the product with U, and its warps."""
    if dtype is torch.float32:
        return (64, 64, 8) if M >= 1024 else (16, 64, 4)
    if M >= 4096:
        return 128, 128, 8
    if triton.cdiv(M, 64) * triton.cdiv(d, 128) >= PROGRAMS // 2:
        return 64, 128, 4
    return (32, 64, 4) if M > 16 else (16, 64, 4)


@custom_op("pair_write", mutates_args=())
def _pair_write(
    h: torch.Tensor,
    n_weight: torch.Tensor,
    eps: float,
    s: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    b: torch.Tensor,
    U: torch.Tensor,
) -> torch.Tensor:
    rows, slots, pairs, r = s.shape
    d, M = h.shape[-1], rows * slots
    out = h.new_empty(rows, slots, pairs, d)
    if not out.numel():
        return out
    dots = product_options(h.dtype) | early_options(early_launches(h.device))
    tiles, columns = triton.cdiv(M, 16), triton.cdiv(r, 32)
    block_d = 128 if h.dtype.itemsize == 2 else 32  # fp32 products run on the ordinary units, in registers
    splits, length = _split(tiles * columns, d, block_d)
    x = h.new_empty(splits, M, r, dtype=torch.float32)
    squares = h.new_empty(splits, M, dtype=torch.float32)
    _project_kernel[(tiles, columns, splits)](
        h, n_weight, A, x, squares, *h.stride()[:2], A.stride(0), slots, M, d, r, length,
        BLOCK_M=16, BLOCK_N=32, BLOCK_D=block_d, num_warps=4, num_stages=3, **dots,
    )  # fmt: skip
    g = h.new_empty(M, pairs, r)
    block_m = 64 if M * pairs >= 2048 else (32 if M * pairs >= 512 else 16)
    _gate_kernel[(triton.cdiv(M * pairs, block_m), triton.cdiv(r, 64))](
        x, squares, s, B, b, g, *s.stride()[:3], B.stride(0), slots, pairs, M, d, r, eps,
        SPLITS=splits, BLOCK_M=block_m, BLOCK_N=64, BLOCK_R=64, num_warps=4, num_stages=2, **dots,
    )  # fmt: skip
    block_m, block_n, warps = _write_tile(M * pairs, d, h.dtype)
    _write_kernel[(triton.cdiv(M * pairs, block_m), triton.cdiv(d, block_n))](
        g, h, U, out, *h.stride()[:2], U.stride(0), slots, pairs, M, d, r,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=64, num_warps=warps, num_stages=3, **dots,
    )  # fmt: skip
    return out


@_pair_write.register_fake
def _(h, n_weight, eps, s, A, B, b, U):
    return h.new_empty(*s.shape[:3], h.shape[-1])


def pair_write(
    h: torch.Tensor,
    n_weight: torch.Tensor,
    eps: float,
    s: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    b: torch.Tensor,
    U: torch.Tensor,
) -> torch.Tensor:
    """h + U (sigmoid(A n + B s + b) * s), n = RMSNorm(h), for K alternative messages per slot.

    Args:
        h: slots before the write [rows, slots, d].
        n_weight: the injection's norm [d], with eps.
        s: messages [rows, slots, K, r], fp32.
        A, B, b, U: [r, d], [r, r], [r] and [d, r], all of h's dtype, as n_weight is.

    Returns:
        [rows, slots, K, d] in h's dtype. Sums are fp32, so the result is nearer to exact arithmetic than eager.

    Raises:
        ValueError: shapes that do not belong together, dtypes or devices that differ.
    """
    refuse_unlike(h=h, n_weight=n_weight, A=A, B=B, b=b, U=U)
    d, r = h.shape[-1], s.shape[-1]
    found = (s.dim(), h.shape[:2], n_weight.shape, A.shape, B.shape, b.shape, U.shape)
    if h.dim() != 3 or found != (4, s.shape[:2], (d,), (r, d), (r, r), (r,), (d, r)):
        raise ValueError(
            "expected h [rows, slots, d], n_weight [d], s [rows, slots, K, r], A [r, d], B [r, r], b [r], U [d, r]; "
            f"found {[list(t.shape) for t in (h, n_weight, s, A, B, b, U)]}."
        )
    h, n_weight, s, A, B, b, U = (_dense_rows(t) for t in (h, n_weight, s.float(), A, B, b, U))
    return ops.pair_write(h, n_weight, float(eps), s, A, B, b, U)


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only where its last dimension is strided."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# ---- pair_scores --------------------------------------------------------------------------------------------------


@triton.jit
def _finish(raw, squares, bias_ptr, ids, known, d, eps, scale, softcap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """Sums [P, C] and squares [P] -> logits as the target shapes them."""
    raw = raw * tl.rsqrt(squares / d + eps)[:, None]
    if HAS_BIAS:
        raw += tl.load(bias_ptr + ids, mask=known, other=0.0).to(tl.float32)[None, :]
    raw = raw * scale
    if HAS_CAP:  # softcap * tanh(raw / softcap)
        raw = softcap * (1.0 - 2.0 / (tl.exp(raw * (2.0 / softcap)) + 1.0))
    return raw


@triton.jit
def _scores_kernel(
    hidden_ptr, w_ptr, E_ptr, ids_ptr, bias_ptr, part_ptr, squares_ptr, out_ptr,
    h_row, h_slot, h_pair, E_row, ids_row, ids_slot, slots, M, d, split_d, eps, scale, softcap,
    P: tl.constexpr, C: tl.constexpr, P_PAD: tl.constexpr, C_PAD: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: the [P, C] sums of one slot over one part of d; finished here when d is not split."""
    start_early(PDL)
    slot, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p, c = tl.arange(0, P_PAD), tl.arange(0, C_PAD)
    ids = tl.load(ids_ptr + slot // slots * ids_row + slot % slots * ids_slot + c, mask=c < C, other=0)
    h_at = hidden_ptr + slot // slots * h_row + slot % slots * h_slot + p[:, None] * h_pair
    E_at = E_ptr + ids.to(tl.int64)[:, None] * E_row
    acc = tl.zeros([P_PAD, C_PAD], tl.float32)
    squares = tl.zeros([P_PAD], tl.float32)
    for start in range(split * split_d, tl.minimum(split * split_d + split_d, d), BLOCK_D):
        k = start + tl.arange(0, BLOCK_D)
        h = tl.load(h_at + k[None, :], mask=(p < P)[:, None] & (k < d)[None, :], other=0.0)
        E = tl.load(E_at + k[None, :], mask=(c < C)[:, None] & (k < d)[None, :], other=0.0)
        w = tl.load(w_ptr + k, mask=k < d, other=0.0).to(tl.float32)
        squares += tl.sum(h.to(tl.float32) * h.to(tl.float32), axis=1)
        weighted = E.to(tl.float32) * w[None, :]
        if WIDEN:
            h = h.to(tl.float32)
        acc = product(h, weighted.to(h.dtype), acc, UPCAST)
    inside = (p < P)[:, None] & (c < C)[None, :]
    if SPLITS == 1:
        logits = _finish(acc, squares, bias_ptr, ids, c < C, d, eps, scale, softcap, HAS_BIAS, HAS_CAP)
        tl.store(out_ptr + (slot * P + p)[:, None] * C + c[None, :], logits, mask=inside)
    else:
        row = (split.to(tl.int64) * M + slot) * P + p
        tl.store(part_ptr + row[:, None] * C + c[None, :], acc, mask=inside)
        tl.store(squares_ptr + row, squares, mask=p < P)


@triton.jit
def _scores_sum_kernel(
    ids_ptr, bias_ptr, part_ptr, squares_ptr, out_ptr, ids_row, ids_slot, slots, M, d, eps, scale, softcap,
    P: tl.constexpr, C: tl.constexpr, P_PAD: tl.constexpr, C_PAD: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the logits of one slot from its parts."""
    start_early(PDL)
    slot = tl.program_id(0).to(tl.int64)
    p, c = tl.arange(0, P_PAD), tl.arange(0, C_PAD)
    ids = tl.load(ids_ptr + slot // slots * ids_row + slot % slots * ids_slot + c, mask=c < C, other=0)
    inside = (p < P)[:, None] & (c < C)[None, :]
    acc = tl.zeros([P_PAD, C_PAD], tl.float32)
    squares = tl.zeros([P_PAD], tl.float32)
    for split in tl.static_range(SPLITS):
        row = (slot + split * M) * P + p
        acc += tl.load(part_ptr + row[:, None] * C + c[None, :], mask=inside, other=0.0)
        squares += tl.load(squares_ptr + row, mask=p < P, other=0.0)
    logits = _finish(acc, squares, bias_ptr, ids, c < C, d, eps, scale, softcap, HAS_BIAS, HAS_CAP)
    tl.store(out_ptr + (slot * P + p)[:, None] * C + c[None, :], logits, mask=inside)


@custom_op("pair_scores", mutates_args=())
def _pair_scores(
    hidden: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    head_weight: torch.Tensor,
    candidates: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    rows, slots, P, d = hidden.shape
    C, M = candidates.shape[-1], rows * slots
    out = hidden.new_empty(rows, slots, P, C, dtype=torch.float32)
    if not out.numel():
        return out
    widen = hidden.dtype != head_weight.dtype
    block_d = 32 if widen or hidden.dtype is torch.float32 else 128
    splits, length = _split(M, d, block_d)
    part = squares = out
    if splits > 1:
        part = out.new_empty(splits, M, P, C)
        squares = out.new_empty(splits, M, P)
    shape = {
        "P": P, "C": C, "P_PAD": max(16, next_power_of_2(P)), "C_PAD": max(16, next_power_of_2(C)), "SPLITS": splits,
        "HAS_BIAS": bias is not None, "HAS_CAP": softcap != 0.0, "num_warps": 4,
        **early_options(early_launches(hidden.device)),
    }  # fmt: skip
    bias = out if bias is None else bias
    _scores_kernel[(M, splits)](
        hidden, norm_weight, head_weight, candidates, bias, part, squares, out,
        *hidden.stride()[:3], head_weight.stride(0), *candidates.stride()[:2],
        slots, M, d, length, eps, scale, softcap,
        BLOCK_D=block_d, WIDEN=widen, num_stages=3, **shape,
        **product_options(torch.float32 if widen else hidden.dtype),
    )  # fmt: skip
    if splits > 1:
        _scores_sum_kernel[(M,)](
            candidates, bias, part, squares, out, *candidates.stride()[:2], slots, M, d, eps, scale, softcap, **shape
        )
    return out


@_pair_scores.register_fake
def _(hidden, norm_weight, eps, head_weight, candidates, bias, scale, softcap):
    return hidden.new_empty(*hidden.shape[:3], candidates.shape[-1], dtype=torch.float32)


def pair_scores(
    hidden: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    head_weight: torch.Tensor,
    candidates: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Logits of each slot's candidates after each predecessor: E[candidates] . RMSNorm(hidden), as the target shapes
    its logits.

    Args:
        hidden: states [rows, slots, K_prev, d] before the final norm.
        norm_weight: the final norm [d], with eps.
        head_weight: E [V, d]; where its dtype is not hidden's, products are fp32.
        candidates: token ids [rows, slots, K_cur], int64; ids outside 0..V-1 are undefined behaviour.
        bias: the head's bias [V], or None.
        scale, softcap: `softcap * tanh(scale * (raw + bias) / softcap)`; softcap None: no cap.

    Returns:
        [rows, slots, K_prev, K_cur] fp32. Sums are fp32; eager rounds them to the head's dtype once.

    Raises:
        ValueError: shapes that do not belong together, unknown dtypes or devices that differ.
    """
    d = hidden.shape[-1]
    fits = hidden.dim() == 4 and candidates.dim() == 3 and hidden.shape[:2] == candidates.shape[:2]
    if not fits or norm_weight.shape != (d,) or head_weight.dim() != 2 or head_weight.shape[1] != d:
        raise ValueError(
            "expected hidden [rows, slots, K_prev, d], norm_weight [d], head_weight [V, d] and candidates "
            f"[rows, slots, K_cur]; found {[list(t.shape) for t in (hidden, norm_weight, head_weight, candidates)]}."
        )
    refuse_unlike(hidden=hidden, norm_weight=norm_weight)
    if head_weight.dtype not in DTYPES or len({t.device for t in (hidden, head_weight, candidates)}) > 1:
        raise ValueError(
            "expected head_weight in float32, bfloat16 or float16, and all tensors on one device; found "
            f"{head_weight.dtype} and {[str(t.device) for t in (hidden, head_weight, candidates)]}."
        )
    hidden, norm_weight, head_weight, candidates = (
        _dense_rows(t) for t in (hidden, norm_weight, head_weight, candidates)
    )
    bias = None if bias is None else _dense_rows(bias)
    return ops.pair_scores(
        hidden, norm_weight, float(eps), head_weight, candidates, bias, float(scale), float(softcap or 0.0)
    )
