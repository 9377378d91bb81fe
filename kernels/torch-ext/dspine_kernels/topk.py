"""The exact top K of every row of logits, in two launches: the best of each chunk of the vocabulary, then their merge.

Keys are 64-bit integers that hold the value's order above the complement of its index, so that a repeated maximum
gives the values in descending order and equal values in ascending order of their indices.
"""

import torch
import triton
import triton.language as tl

from ._ops import add_op_namespace_prefix, ops
from ._runtime import DTYPES, MAX_K, next_power_of_2

MERGED = 4096  # keys that one program of the merge holds, unless the vocabulary or K is very large
LEAST = tl.constexpr(-(2**63))  # below every key


@triton.jit
def _keys(values, index):
    """int64 keys: descending keys are descending values (NaN above +inf, as torch has it), then ascending indices."""
    x = values.to(tl.float32) + 0.0  # -0.0 and 0.0 are equal
    bits = x.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(x != x, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _values(keys):
    """The values of keys, fp32."""
    order = (keys >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(keys, K: tl.constexpr, K_PAD: tl.constexpr):
    """The K largest keys, descending: [K_PAD], the rest LEAST."""
    place = tl.arange(0, K_PAD)
    best = tl.full([K_PAD], LEAST, tl.int64)
    for k in range(K):
        top = tl.max(keys, axis=0)
        best = tl.where(place == k, top, best)
        keys = tl.where(keys == top, LEAST, keys)
    return best


@triton.jit
def _chunk_kernel(x_ptr, partial_ptr, stride, V, K: tl.constexpr, K_PAD: tl.constexpr, CHUNK: tl.constexpr):
    """One program: the K largest keys of one chunk of one row -> partial [rows, chunks, K_PAD]."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    valid = index < V
    x = tl.load(x_ptr + row * stride + index, mask=valid, other=0.0)
    keys = tl.where(valid, _keys(x, index), LEAST)
    out = partial_ptr + (row * tl.num_programs(0) + chunk) * K_PAD + tl.arange(0, K_PAD)
    tl.store(out, _best(keys, K, K_PAD))


@triton.jit
def _merge_kernel(
    partial_ptr, values_ptr, index_ptr, count, K: tl.constexpr, K_PAD: tl.constexpr, COUNT: tl.constexpr
):
    """One program: the K largest of one row's partial keys -> values and indices [rows, K]."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, COUNT)
    keys = tl.load(partial_ptr + row * count + place, mask=place < count, other=LEAST)
    best = _best(keys, K, K_PAD)
    k = tl.arange(0, K_PAD)
    tl.store(values_ptr + row * K + k, _values(best), mask=k < K)
    tl.store(index_ptr + row * K + k, 0x7FFFFFFF - (best & 0x7FFFFFFF), mask=k < K)


@torch.library.custom_op(add_op_namespace_prefix("topk"), mutates_args=())
def _topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, V = x.shape
    K_PAD = next_power_of_2(k)
    CHUNK = 2048
    while triton.cdiv(V, CHUNK) * K_PAD > MERGED and CHUNK < 8192:
        CHUNK *= 2
    CHUNK = min(CHUNK, next_power_of_2(V))
    chunks = triton.cdiv(V, CHUNK)
    partial = torch.empty(rows, chunks, K_PAD, dtype=torch.int64, device=x.device)
    values = torch.empty(rows, k, dtype=torch.float32, device=x.device)
    index = torch.empty(rows, k, dtype=torch.int64, device=x.device)
    if rows:
        count = chunks * K_PAD
        _chunk_kernel[(chunks, rows)](x, partial, x.stride(0), V, k, K_PAD, CHUNK, num_warps=4)
        _merge_kernel[(rows,)](partial, values, index, count, k, K_PAD, next_power_of_2(count), num_warps=4)
    return values, index


@_topk.register_fake
def _(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], k, dtype=torch.float32), x.new_empty(x.shape[0], k, dtype=torch.int64)


def topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest logits of every row, descending, and their indices.

    Args:
        logits: [.., V] in float32, bfloat16 or float16.
        k: 1 to 32, at most V.

    Returns:
        Values [.., k] fp32, exactly those of `torch.topk`, and indices [.., k] int64. Of equal values the lower index
        comes first (torch leaves their order open). NaN counts as the largest value, as in torch.

    Raises:
        ValueError: another dtype, or k out of range.
    """
    V = logits.shape[-1]
    if logits.dtype not in DTYPES:
        raise ValueError(f"expected logits in float32, bfloat16 or float16; found {logits.dtype}. Cast them.")
    if not 1 <= k <= min(MAX_K, V):
        raise ValueError(f"expected k in 1..{min(MAX_K, V)}; found {k}. Use torch.topk.")
    rows = logits.reshape(-1, V)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    values, index = ops.topk(rows, k)
    shape = (*logits.shape[:-1], k)
    return values.view(shape), index.view(shape)
