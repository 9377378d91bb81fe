"""The exact top K of every row of logits in two launches: every group's best, then the best of the K best groups.

The K-th best of the groups' maxima bounds the K-th best logit from below, so the top K lie in the K groups that have
the largest maxima. Keys are 64-bit integers that hold the value's order above the complement of its index: all differ,
and a repeated maximum gives the values in descending order, equal values in ascending order of their indices.
"""

import torch
import triton
import triton.language as tl

from ._ops import custom_op, ops
from ._runtime import DTYPES, MAX_K, next_power_of_2

GROUP = 128  # logits
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
def _indices(keys):
    """The indices of keys, int64; of LEAST a very large one."""
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF)


@triton.jit
def _groups_kernel(x_ptr, maxima_ptr, stride, V, groups, GROUP: tl.constexpr, MANY: tl.constexpr):
    """One program: the largest key of each of MANY groups of a row -> maxima [rows, groups]."""
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * MANY + tl.arange(0, MANY)
    index = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * stride + index, mask=index < V, other=0.0)
    keys = tl.where(index < V, _keys(x, index), LEAST)
    tl.store(maxima_ptr + row * groups + group, tl.max(keys, axis=1), mask=group < groups)


@triton.jit
def _best_kernel(
    x_ptr, maxima_ptr, values_ptr, index_ptr, stride, V, groups,
    K: tl.constexpr, K_PAD: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """One program: the K best of a row -> values and indices [rows, K]."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, COUNT)
    maxima = tl.load(maxima_ptr + row * groups + place, mask=place < groups, other=LEAST)
    best = _best(maxima, K, K_PAD)  # of the K best groups, or of all
    index = (_indices(best) // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    valid = (best > LEAST)[:, None] & (index < V)
    x = tl.load(x_ptr + row * stride + index, mask=valid, other=0.0)
    keys = tl.where(valid, _keys(x, index), LEAST)
    best = _best(tl.reshape(keys, [K_PAD * GROUP]), K, K_PAD)
    k = tl.arange(0, K_PAD)
    tl.store(values_ptr + row * K + k, _values(best), mask=k < K)
    tl.store(index_ptr + row * K + k, _indices(best), mask=k < K)


@custom_op("topk", mutates_args=())
def _topk(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, V = x.shape
    groups, many = triton.cdiv(V, GROUP), 16
    maxima = torch.empty(rows, groups, dtype=torch.int64, device=x.device)
    values = torch.empty(rows, k, dtype=torch.float32, device=x.device)
    index = torch.empty(rows, k, dtype=torch.int64, device=x.device)
    if rows:
        grid = (triton.cdiv(groups, many), rows)
        _groups_kernel[grid](x, maxima, x.stride(0), V, groups, GROUP=GROUP, MANY=many, num_warps=4)
        sizes = {"K": k, "K_PAD": next_power_of_2(k), "GROUP": GROUP, "COUNT": next_power_of_2(groups)}
        _best_kernel[(rows,)](x, maxima, values, index, x.stride(0), V, groups, **sizes, num_warps=8)
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
