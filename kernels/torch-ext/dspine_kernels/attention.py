"""Attention of a few query rows against a long static K/V cache, as verification and the last writes need it.

Flash decoding: the heads that share a K/V head are packed with the rows into one tile, the visible keys are split over
programs, and a second launch combines the parts. Visibility is arithmetic on positions, so no mask is materialised;
of a tree of rows, every row brings one number whose bits say which of them it sees.
"""

import torch
import triton
import triton.language as tl

from ._ops import custom_op, ops
from ._runtime import early_launches, early_options, next_power_of_2, refuse_unlike
from ._tiles import product, product_options, start_early

MAX_SPLITS = 32
MAX_TREE_ROWS = 64  # bits of a number
INTERPRETED_PROGRAMS = 132  # the programs to spread over where there are no multiprocessors to count
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    q, k, v, start, limit, tree, out, part, lse,
    q_batch, q_head, q_row, q_dim, k_batch, k_head, k_row, k_dim, v_batch, v_head, v_row, v_dim,
    o_batch, o_head, o_row, start_batch, limit_batch, limit_row, tree_batch, tree_row,
    scale, softcap, window, kv_heads, rows, capacity,
    GROUPS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_TREE: tl.constexpr,
    SPLITS: tl.constexpr, HD: tl.constexpr, HD_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    start_early(PDL)
    pair, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, kv_head = (pair // kv_heads).to(tl.int64), pair % kv_heads
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # packed rows: row m // GROUPS of head m % GROUPS
    d = tl.arange(0, HD_P)
    live, wide = m < rows * GROUPS, d < HD
    row, head = m // GROUPS, kv_head * GROUPS + m % GROUPS

    last = tl.load(limit + batch * limit_batch + row * limit_row, mask=live, other=-1).to(tl.int32)
    first = tl.maximum(tl.load(start + batch * start_batch).to(tl.int32), 0)
    lo, hi = first, tl.minimum(tl.max(last, 0) + 1, capacity)
    if HAS_TREE:  # row i's key lies in column root + i
        root = tl.load(limit + batch * limit_batch).to(tl.int32)
        hi = tl.where(hi > 0, tl.minimum(root + rows, capacity), 0)
        bits = tl.load(tree + batch * tree_batch + row * tree_row, mask=live, other=0)
    if HAS_WINDOW:
        nearest = tl.min(tl.where(live, last, capacity), 0) - window + 1
        if HAS_TREE:
            nearest = tl.minimum(nearest, root)
        lo = tl.maximum(lo, nearest)
    chunk = tl.cdiv(tl.cdiv(tl.maximum(hi - lo, 0), SPLITS), BLOCK_N) * BLOCK_N
    begin = lo + split * chunk
    end = tl.minimum(begin + chunk, hi)

    q_at = q + batch * q_batch + head[:, None] * q_head + row[:, None].to(tl.int64) * q_row + d[None, :] * q_dim
    queries = tl.load(q_at, mask=live[:, None] & wide[None, :], other=0.0)
    k += batch * k_batch + kv_head.to(tl.int64) * k_head
    v += batch * v_batch + kv_head.to(tl.int64) * v_head
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HD_P), tl.float32)
    for base in range(begin, end, BLOCK_N):
        j = base + tl.arange(0, BLOCK_N)
        inside, at = j < end, j.to(tl.int64)
        held = inside[:, None] & wide[None, :]
        keys = tl.load(k + at[:, None] * k_row + d[None, :] * k_dim, mask=held, other=0.0)
        scores = product(queries, keys, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), UPCAST) * scale
        if HAS_CAP:  # softcap * tanh(scores / softcap)
            scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
        place = j  # of a key in the text
        if HAS_TREE:
            i = j - root
            own = i >= 0
            seen = (bits[:, None] >> tl.minimum(tl.maximum(i, 0), 63).to(tl.int64)[None, :]) & 1
            visible = inside[None, :] & (last >= 0)[:, None] & ((seen != 0) | (i < 0)[None, :])
            if HAS_WINDOW:
                deep = tl.load(limit + batch * limit_batch + i * limit_row, mask=inside & own, other=0).to(tl.int32)
                place = tl.where(own, deep, j)
        else:
            visible = inside[None, :] & (j[None, :] <= last[:, None])
        if HAS_WINDOW:
            visible = visible & (place[None, :] > last[:, None] - window)
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(peak - shift)
        total = total * fade + tl.sum(p, 1)
        values = tl.load(v + at[:, None] * v_row + d[None, :] * v_dim, mask=held, other=0.0)
        acc = product(p.to(values.dtype), tl.trans(values), acc * fade[:, None], UPCAST)
        peak = new_peak

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    stored = live[:, None] & wide[None, :]
    if SPLITS == 1:
        o_at = out + batch * o_batch + head[:, None] * o_head + row[:, None].to(tl.int64) * o_row + d[None, :]
        tl.store(o_at, acc.to(out.dtype.element_ty), mask=stored)
    else:
        slot = (pair.to(tl.int64) * SPLITS + split) * (rows * GROUPS) + m
        weight = tl.where(total > 0.0, peak + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(lse + slot, weight, mask=live)
        if begin < end:
            tl.store(part + slot[:, None] * HD + d[None, :], acc, mask=stored)


@triton.jit
def _combine(
    part, lse, out, o_batch, o_head, o_row, kv_heads, rows,
    GROUPS: tl.constexpr, SPLITS: tl.constexpr, SPLITS_P: tl.constexpr, HD: tl.constexpr, HD_P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_early(PDL)
    pair, m = tl.program_id(1), tl.program_id(0)
    batch, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads) * GROUPS + m % GROUPS
    split, d = tl.arange(0, SPLITS_P), tl.arange(0, HD_P)
    slot = (pair.to(tl.int64) * SPLITS + split) * (rows * GROUPS) + m
    weight = tl.load(lse + slot, mask=split < SPLITS, other=float("-inf"))
    full = weight > float("-inf")
    parts = tl.load(
        part + slot[:, None] * HD + d[None, :], mask=full[:, None] & (d < HD)[None, :], other=0.0
    )  # [SPLITS_P, HD_P]
    peak = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(share, 0)
    result = tl.sum(parts * share[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    o_at = out + batch * o_batch + head * o_head + (m // GROUPS).to(tl.int64) * o_row + d
    tl.store(o_at, result.to(out.dtype.element_ty), mask=d < HD)


def launch_shape(q: torch.Tensor, k: torch.Tensor, splits: int) -> dict[str, int]:
    """Tile sizes, warps and the number of splits, from static shapes alone; splits > 0 is taken as it is."""
    batch, heads, rows, head_dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    packed = rows * (heads // kv_heads)
    exact = q.dtype is torch.float32  # products run on the ordinary units, in registers
    block_m = min(max(next_power_of_2(packed), 16), 16 if exact else 64)
    block_n = 16 if exact else (32 if head_dim > 128 else 64)
    tiles = triton.cdiv(packed, block_m)
    if splits == 0:
        programs = INTERPRETED_PROGRAMS
        if q.device.type == "cuda":
            programs = torch.cuda.get_device_properties(q.device).multi_processor_count
        splits = max(1, min(programs // (batch * kv_heads * tiles), triton.cdiv(capacity, block_n), MAX_SPLITS))
    return {
        "block_m": block_m, "block_n": block_n, "tiles": tiles, "splits": splits,
        "num_warps": 8 if head_dim > 128 else 4, "num_stages": 2,
    }  # fmt: skip


def _refuse_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    limit: torch.Tensor,
    tree: torch.Tensor | None,
) -> None:
    if q.dim() != 4 or k.shape != v.shape or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "expected q [batch, heads, rows, head_dim] and k, v [batch, kv_heads, capacity, head_dim]; found "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}."
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"expected heads to be a multiple of kv_heads; found {q.shape[1]} and {k.shape[1]}.")
    if start.shape != (q.shape[0],) or limit.shape != (q.shape[0], q.shape[2]):
        raise ValueError(
            f"expected start [{q.shape[0]}] and limit [{q.shape[0]}, {q.shape[2]}]; found {list(start.shape)} and "
            f"{list(limit.shape)}."
        )
    if tree is not None and (tree.shape != limit.shape or tree.dtype != torch.int64 or q.shape[2] > MAX_TREE_ROWS):
        raise ValueError(
            f"expected tree [{q.shape[0]}, {q.shape[2]}] in int64, of at most {MAX_TREE_ROWS} rows; found "
            f"{list(tree.shape)} in {tree.dtype}."
        )


@custom_op("verify_attention", mutates_args=())
def _verify_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    limit: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    splits: int,
    tree: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, rows, head_dim = q.shape
    kv_heads, capacity = k.shape[1:3]
    shape = launch_shape(q, k, splits)
    splits, groups, wide = shape["splits"], heads // kv_heads, max(next_power_of_2(head_dim), 16)
    early = early_options(early_launches(q.device))
    out = _empty_output(q)
    if not out.numel():
        return out
    part = lse = out
    if splits > 1:
        part = q.new_empty(batch * kv_heads, splits, rows * groups, head_dim, dtype=torch.float32)
        lse = q.new_empty(batch * kv_heads, splits, rows * groups, dtype=torch.float32)
    _attend[(batch * kv_heads, shape["tiles"], splits)](
        q, k, v, start, limit, tree, out, part, lse,
        *q.stride(), *k.stride(), *v.stride(), *out.stride()[:3], start.stride(0), *limit.stride(),
        *((None, None) if tree is None else tree.stride()),
        scale, softcap, window, kv_heads, rows, capacity,
        GROUPS=groups, HAS_CAP=softcap != 0.0, HAS_WINDOW=window > 0, HAS_TREE=tree is not None,
        SPLITS=splits, HD=head_dim, HD_P=wide, BLOCK_M=shape["block_m"], BLOCK_N=shape["block_n"],
        num_warps=shape["num_warps"], num_stages=shape["num_stages"], **product_options(q.dtype), **early,
    )  # fmt: skip
    if splits > 1:
        _combine[(rows * groups, batch * kv_heads)](
            part, lse, out, *out.stride()[:3], kv_heads, rows,
            GROUPS=groups, SPLITS=splits, SPLITS_P=next_power_of_2(splits), HD=head_dim, HD_P=wide, num_warps=4,
            **early,
        )  # fmt: skip
    return out


@_verify_attention.register_fake
def _(q, k, v, start, limit, scale, window, softcap, splits, tree):
    return _empty_output(q)


def _empty_output(q: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, head_dim = q.shape
    return q.new_empty(batch, rows, heads, head_dim).transpose(1, 2)


def verify_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    limit: torch.Tensor,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    splits: int = 0,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by limits: key j is visible to row t of batch row b iff `start[b] <= j <= limit[b, t]` and, with a
    window, `j > limit[b, t] - window`. A row that sees nothing gives zeros.

    With a tree, the key of row i lies in column `limit[b, 0] + i`, but stands at place `limit[b, i]` of the text: row
    t sees it iff bit i of `tree[b, t]` is set and, with a window, `limit[b, i] > limit[b, t] - window`.

    Args:
        q: queries [batch, heads, rows, head_dim], any strides.
        k, v: the cache [batch, kv_heads, capacity, head_dim], any strides; heads is a multiple of kv_heads. Cache rows
            before the start and beyond every limit are never read.
        start: first visible key [batch], int32 or int64.
        limit: last visible key [batch, rows], int32 or int64; -1 for a row that is padding. With a tree, the place of
            every row in the text, that of its root first.
        scale: what q k^T is multiplied by; None: head_dim ** -0.5.
        window: how many keys a row sees at most; 0: all.
        softcap: scores become `softcap * tanh(scores / softcap)`; 0: as they are.
        splits: parts that the keys are split into; 0: chosen from the shapes.
        tree: which rows every row sees, itself among them: int64 [batch, rows], bit i stands for row i. At most 64
            rows, row 0 the root. None: rows see all keys up to their limits.

    Returns:
        [batch, heads, rows, head_dim] in q's dtype, laid out so that `.transpose(1, 2).flatten(2)` is a view.

    Raises:
        ValueError: shapes that do not belong together, dtypes or devices that differ.
    """
    refuse_unlike(q=q, k=k, v=v)
    _refuse_shapes(q, k, v, start, limit, tree)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return ops.verify_attention(q, k, v, start, limit, float(scale), int(window), float(softcap), int(splits), tree)
