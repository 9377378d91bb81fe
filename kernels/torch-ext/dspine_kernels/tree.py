"""Trees of drafts in one launch each: the likeliest paths through the candidates, and the target's branch.

One program grows one batch row's tree, best path first: every row of the tree knows its best child that is not in the
tree yet, and the best of those enters. A child never costs less than its parent, so what entered stays. Ancestors are
bits of one number, so that 63 drafts are the most.
"""

import torch
import triton
import triton.language as tl

from ._ops import custom_op, ops
from ._runtime import DTYPES, MAX_K, early_launches, early_options, next_power_of_2, refuse_tables
from ._tiles import start_early
from .walk import _finite

MAX_NODES = 63  # N, drafts of a tree
MAX_SLOTS = 32  # steps of a path
# What a step costs beside its log-probability, and what it costs at most without: as the eager operation has them.
STEP, MOST = tl.constexpr(1e-3), tl.constexpr(20.0)
NONE = tl.constexpr(0x7FFFFFFF)  # what a row costs that has no child left: more than any other


@triton.jit
def _largest(x):
    """The largest of a vector. Integers are compared: one instruction of the GPU reduces them."""
    bits = x.to(tl.int32, bitcast=True)
    top = tl.max(bits ^ ((bits >> 31) & 0x7FFFFFFF), axis=0)
    return (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _at(values, here):
    """The number where `here` is true, which is one place."""
    return tl.sum(tl.where(here, values, 0), axis=0)


@triton.jit
def _best_child(
    first, pairs, depth, last, taken, cost, slots, pairs_slot, pairs_prev,
    K: tl.constexpr, R: tl.constexpr, K_PAD: tl.constexpr,
):  # fmt: skip
    """The cheapest child, of those without a bit in `taken`, of a row that costs `cost`, is `depth` steps behind the
    anchor and ends with candidate `last`: its cost and its candidate. Costs are the bits of positive fp32 numbers,
    which have their order.
    """
    k = tl.arange(0, K_PAD)
    children = tl.where(depth < slots, K, 0)
    at_anchor = tl.where(depth == 0, K, 0)
    x = tl.load(first + k, mask=k < at_anchor, other=0.0).to(tl.float32)
    later = pairs + (depth - 1) * pairs_slot + (last if R > 1 else 0) * pairs_prev + k
    x += tl.load(later, mask=k < children - at_anchor, other=0.0).to(tl.float32)
    x = _finite(x, k < K)
    x = x - _largest(x)
    steps = tl.minimum(tl.log(tl.sum(tl.exp(x), axis=0)) - x, MOST) + STEP
    total = (cost.to(tl.float32, bitcast=True) + steps).to(tl.int32, bitcast=True)
    total = tl.where((k < children) & ((taken >> k) & 1 == 0), total, NONE)
    least = tl.min(total, axis=0)
    return least, tl.min(tl.where(total == least, k, K_PAD), axis=0)


@triton.jit
def _grow_kernel(
    ids_ptr, first_ptr, pairs_ptr, tokens_ptr, parent_ptr, depth_ptr, bits_ptr,
    ids_row, ids_slot, first_row, pairs_row, pairs_slot, pairs_prev, slots, N,
    K: tl.constexpr, R: tl.constexpr, K_PAD: tl.constexpr, N_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_early(PDL)
    batch = tl.program_id(0).to(tl.int64)
    first, pairs = first_ptr + batch * first_row, pairs_ptr + batch * pairs_row
    place = tl.arange(0, N_PAD)  # the tree's rows, the anchor's first
    nothing = tl.zeros([N_PAD], tl.int32)
    cost, depth, last, parent, taken = nothing, nothing, nothing, nothing, nothing
    bits = tl.where(place == 0, 1, 0).to(tl.int64)
    zero = tl.sum(nothing, axis=0)
    least, k = _best_child(first, pairs, zero, zero, zero, zero, slots, pairs_slot, pairs_prev, K, R, K_PAD)
    best, child = tl.where(place == 0, least, NONE), tl.where(place == 0, k, 0)  # of each row's next child
    for n in range(1, N + 1):
        least = tl.min(best, axis=0)
        source = tl.min(tl.where(best == least, place, N_PAD), axis=0)
        here, new = place == source, place == n
        k, steps, end = _at(child, here), _at(depth, here), _at(last, here)
        gone = _at(taken, here) | (1 << k)
        rest, next_k = _best_child(
            first, pairs, steps, end, gone, _at(cost, here), slots, pairs_slot, pairs_prev, K, R, K_PAD
        )
        below, below_k = _best_child(
            first, pairs, steps + 1, k, zero, least, slots, pairs_slot, pairs_prev, K, R, K_PAD
        )
        best = tl.where(here, rest, tl.where(new, below, best))
        child = tl.where(here, next_k, tl.where(new, below_k, child))
        taken = tl.where(here, gone, taken)
        cost, depth = tl.where(new, least, cost), tl.where(new, steps + 1, depth)
        last, parent = tl.where(new, k, last), tl.where(new, source, parent)
        seen = _at(bits, here) | (tl.full([], 1, tl.int64) << n)
        bits = tl.where(new, seen, bits)
    drafted, inside = (place > 0) & (place <= N), place <= N
    tokens = tl.load(ids_ptr + batch * ids_row + (depth - 1) * ids_slot + last, mask=drafted, other=0)
    tl.store(tokens_ptr + batch * N + place - 1, tokens, mask=drafted)
    tl.store(parent_ptr + batch * N + place - 1, parent.to(tl.int64), mask=drafted)
    tl.store(depth_ptr + batch * (N + 1) + place, depth.to(tl.int64), mask=inside)
    tl.store(bits_ptr + batch * (N + 1) + place, bits, mask=inside)


@triton.jit
def _follow_kernel(
    tokens_ptr, parent_ptr, depth_ptr, bits_ptr, choice_ptr, agreed_ptr, out_ptr, rows_ptr, slots, N,
    N_PAD: tl.constexpr, SLOTS_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_early(PDL)
    batch = tl.program_id(0).to(tl.int64)
    place, step = tl.arange(0, N_PAD), tl.arange(0, SLOTS_PAD)
    drafted, inside = (place > 0) & (place <= N), place <= N
    choice_ptr += batch * (N + 1)
    token = tl.load(tokens_ptr + batch * N + place - 1, mask=drafted, other=0)
    parent = tl.load(parent_ptr + batch * N + place - 1, mask=drafted, other=0)
    depth = tl.load(depth_ptr + batch * (N + 1) + place, mask=inside, other=0)
    bits = tl.load(bits_ptr + batch * (N + 1) + place, mask=inside, other=0)
    choice = tl.load(choice_ptr + place, mask=inside, other=0)
    wrong = drafted & (token != tl.load(choice_ptr + parent, mask=drafted, other=0))
    wrong_bits = tl.sum(wrong.to(tl.int64) << place.to(tl.int64), axis=0)
    reached = tl.where(inside & (bits & wrong_bits == 0), depth, -1)  # the row and all its ancestors agree
    agreed = tl.max(reached, axis=0)
    end = tl.min(tl.where(reached == agreed, place, N_PAD), axis=0)
    branch = tl.sum(tl.where(place == end, bits, 0), axis=0)
    on_it = inside & ((branch >> place.to(tl.int64)) & 1 == 1)
    tl.store(agreed_ptr + batch, agreed)
    out_ptr += batch * (slots + 1)
    rows_ptr += batch * (slots + 1)
    tl.store(rows_ptr + depth, place.to(tl.int64), mask=on_it)
    tl.store(out_ptr + depth, choice, mask=on_it)
    behind, own = (step > agreed) & (step <= slots), tl.minimum(step, N)
    tl.store(rows_ptr + step, own.to(tl.int64), mask=behind)
    tl.store(out_ptr + step, tl.load(choice_ptr + own, mask=behind, other=0), mask=behind)


@custom_op("grow_tree", mutates_args=())
def _grow_tree(
    candidates: torch.Tensor, first: torch.Tensor, pairs: torch.Tensor, nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, slots, K = candidates.shape
    outputs = _empty_tree(candidates, nodes)
    if batch:
        _grow_kernel[(batch,)](
            candidates, first, pairs, *outputs,
            *candidates.stride()[:2], first.stride(0), *pairs.stride()[:3], slots, nodes,
            K=K, R=pairs.shape[2], K_PAD=next_power_of_2(K), N_PAD=next_power_of_2(nodes + 1), num_warps=1,
            **early_options(early_launches(candidates.device)),
        )  # fmt: skip
    return outputs


@_grow_tree.register_fake
def _(candidates, first, pairs, nodes):
    return _empty_tree(candidates, nodes)


def _empty_tree(candidates: torch.Tensor, nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, parent, depth, bits = (
        candidates.new_empty(candidates.shape[0], rows, dtype=torch.int64)
        for rows in (nodes, nodes, nodes + 1, nodes + 1)
    )
    return tokens, parent, depth, bits


def grow_tree(
    candidates: torch.Tensor, first: torch.Tensor, pairs: torch.Tensor, nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The likeliest paths through the candidates, as `fast_tree.grow` finds them, in the order of their scores.

    Args:
        candidates: token ids [batch, slots, K], int64; at most 32 slots and 32 candidates.
        first: slot 1's scores [batch, K].
        pairs: the later slots' scores [batch, slots - 1, R, K], row i after candidate i of the slot before; R is K, or
            1 where slots are independent.
        nodes: N, 1 to 63; fewer where there are no more paths.

    Returns:
        Of the tree, whose row 0 is the anchor: tokens [batch, N]; the rows of their parents [batch, N], which
        come first; how many steps each row is behind the anchor [batch, N + 1]; and [batch, N + 1], whose bit j says
        whether the row is row j or behind it. All int64. Of equally likely paths any may be taken.

    Raises:
        ValueError: shapes that do not belong together, another dtype, or a size out of range.
    """
    refuse_tables(candidates, first, pairs)
    _, slots, K = candidates.shape
    if candidates.dtype != torch.int64 or not {first.dtype, pairs.dtype} <= set(DTYPES):
        raise ValueError(
            "expected candidates in int64 and scores in float32, bfloat16 or float16; found "
            f"{candidates.dtype}, {first.dtype} and {pairs.dtype}. Cast them."
        )
    if not (1 <= nodes <= MAX_NODES and 1 <= slots <= MAX_SLOTS and 1 <= K <= MAX_K):
        raise ValueError(
            f"expected 1 to {MAX_NODES} nodes, {MAX_SLOTS} slots and {MAX_K} candidates at most; found {nodes}, "
            f"{slots} and {K}. Use the eager operation."
        )
    candidates, first, pairs = (t if t.stride(-1) == 1 else t.contiguous() for t in (candidates, first, pairs))
    return ops.grow_tree(candidates, first, pairs, min(nodes, sum(K**length for length in range(1, slots + 1))))


@custom_op("follow_tree", mutates_args=())
def _follow_tree(
    tokens: torch.Tensor, parent: torch.Tensor, depth: torch.Tensor, bits: torch.Tensor, choice: torch.Tensor,
    slots: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    outputs = _empty_branch(choice, slots)
    batch, N = tokens.shape
    if batch:
        _follow_kernel[(batch,)](
            tokens, parent, depth, bits, choice, *outputs, slots, N,
            N_PAD=next_power_of_2(N + 1), SLOTS_PAD=next_power_of_2(slots + 1), num_warps=1,
            **early_options(early_launches(tokens.device)),
        )  # fmt: skip
    return outputs


@_follow_tree.register_fake
def _(tokens, parent, depth, bits, choice, slots):
    return _empty_branch(choice, slots)


def _empty_branch(choice: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = choice.shape[0]
    one, other = (choice.new_empty(batch, slots + 1, dtype=torch.int64) for _ in range(2))
    return choice.new_empty(batch, dtype=torch.int64), one, other


def follow_tree(
    tokens: torch.Tensor, parent: torch.Tensor, depth: torch.Tensor, bits: torch.Tensor, choice: torch.Tensor,
    slots: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The branch of a tree that the target takes, as `fast_tree.follow` finds it.

    Args:
        tokens, parent: [batch, N]. depth, bits: [batch, N + 1]. See [`grow_tree`].
        choice: the target's own token after every row [batch, N + 1].
        slots: the length of the longest branch.

    Returns:
        How many drafts stand [batch]; the tokens [batch, slots + 1]: the branch, the target's next token, and
        whatever; the rows of the branch [batch, slots + 1], the anchor's first; those behind it lie in their places.
        All int64.

    Raises:
        ValueError: shapes that do not belong together, another dtype than int64, or more than 63 drafts.
    """
    given = {"tokens": tokens, "parent": parent, "depth": depth, "bits": bits, "choice": choice}
    batch, N = tokens.shape
    for name, tensor in given.items():
        shape = (batch, N if name in ("tokens", "parent") else N + 1)
        if tensor.shape != shape or tensor.dtype != torch.int64:
            raise ValueError(f"expected {name} {list(shape)} int64; found {list(tensor.shape)} {tensor.dtype}.")
    if not 1 <= N <= MAX_NODES or slots < 1:
        raise ValueError(f"expected 1 to {MAX_NODES} drafts and slots from 1; found {N} and {slots}.")
    return ops.follow_tree(*(tensor.contiguous() for tensor in given.values()), int(slots))
