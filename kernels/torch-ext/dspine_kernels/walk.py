"""The whole left-to-right choice through a block in one launch, greedy or sampled, with the warpers on K candidates.

One program walks one batch row. While it decides a slot it already loads the next slot's table, so that no slot waits
for memory. The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p.
"""

import torch
import triton
import triton.language as tl

from ._ops import custom_op, ops
from ._runtime import next_power_of_2, refuse_tables

FLOOR = tl.constexpr(1e30)  # what an infinite score counts as, in place of NaN in the target's distribution
INF = tl.constexpr(float("inf"))


@triton.jit
def _finite(x, valid):
    """Scores without NaN and infinities; -inf only where there is no candidate."""
    x = tl.where(x == x, x, -FLOOR)
    x = tl.where(x == INF, FLOOR, tl.where(x == -INF, -FLOOR, x))
    return tl.where(valid, x, -INF)


@triton.jit
def _softmax(x):
    """Probabilities and log-probabilities of one row."""
    x = x - tl.max(x, axis=0)
    e = tl.exp(x)
    total = tl.sum(e, axis=0)
    return e / total, x - tl.log(total)


@triton.jit
def _warp(
    x, place, temperature, top_k, tail, min_p,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
):  # fmt: skip
    """Temperature, top-k, top-p (tail = 1 - top_p) and min-p on one row of scores; -inf where one is removed."""
    x = x / temperature
    if HAS_TOP_K:  # removed: below the k-th largest
        above = tl.sum((x[None, :] > x[:, None]).to(tl.int32), axis=1)
        x = tl.where(above >= top_k, -INF, x)
    if HAS_TOP_P:  # removed: the ascending cumulative probability is at most 1 - top_p; the last one stays
        p, _ = _softmax(x)
        tied = (x[None, :] == x[:, None]) & (place[None, :] <= place[:, None])
        up_to = (x[None, :] < x[:, None]) | tied  # [i, j]: j comes no later than i in ascending order
        cumulative = tl.sum(tl.where(up_to, p[None, :], 0.0), axis=1)
        later = tl.sum((~up_to).to(tl.int32), axis=1)
        x = tl.where((cumulative <= tail) & (later > 0), -INF, x)
    if HAS_MIN_P:
        p, _ = _softmax(x)
        x = tl.where(p < min_p * tl.max(p, axis=0), -INF, x)
    return x


@triton.jit
def _walk_kernel(
    ids_ptr, first_ptr, pairs_ptr, noise_ptr, seen_ptr, tokens_ptr, path_ptr, log_q_ptr, chain_ptr,
    ids_row, ids_slot, first_row, pairs_row, pairs_slot, pairs_prev, noise_row, noise_slot, seen_row,
    slots, temperature, top_k, tail, min_p, penalty,
    K: tl.constexpr, R: tl.constexpr, K_PAD: tl.constexpr, R_PAD: tl.constexpr, SLOTS_PAD: tl.constexpr,
    SAMPLE: tl.constexpr, HAS_SEEN: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k, previous, place = tl.arange(0, K_PAD), tl.arange(0, R_PAD), tl.arange(0, SLOTS_PAD)
    valid = k < K
    ids_ptr += row * ids_row
    pairs_ptr += row * pairs_row
    noise_ptr += row * noise_row
    chosen = tl.full([SLOTS_PAD], -1, tl.int64)  # the tokens walked so far
    scores = _finite(tl.load(first_ptr + row * first_row + k, mask=valid, other=0.0).to(tl.float32), valid)
    ids = tl.load(ids_ptr + k, mask=valid, other=0).to(tl.int64)
    for slot in range(slots):
        more = tl.where(slot + 1 < slots, 1, 0)
        table_at = pairs_ptr + slot * pairs_slot + previous[:, None] * pairs_prev + k[None, :]
        inside = (previous < R * more)[:, None] & valid[None, :]
        table = tl.load(table_at, mask=inside, other=0.0).to(tl.float32)  # [R, K] of the next slot
        next_ids = tl.load(ids_ptr + (slot + 1) * ids_slot + k, mask=k < K * more, other=0).to(tl.int64)

        _, raw = _softmax(scores)  # log-probabilities before penalty and warpers
        if HAS_SEEN:
            repeated = tl.load(seen_ptr + row * seen_row + ids, mask=valid, other=0) != 0
            in_chain = (chosen[None, :] == ids[:, None]) & (place < slot)[None, :]
            repeated = repeated | (tl.max(in_chain.to(tl.int32), axis=1) > 0)
            penalised = tl.where(scores < 0.0, scores * penalty, scores / penalty)
            scores = tl.where(repeated & valid, penalised, scores)
        if SAMPLE:
            scores = _warp(scores, k, temperature, top_k, tail, min_p, HAS_TOP_K, HAS_TOP_P, HAS_MIN_P)
            p, log_q = _softmax(scores)
            noise = tl.load(noise_ptr + slot * noise_slot + k, mask=valid, other=1.0)
            index = tl.argmax(tl.where(p > 0.0, p / noise, -1.0), axis=0)
        else:
            index = tl.argmax(scores, axis=0)
            log_q = tl.where(k == index, 0.0, -INF)
        here = k == index
        token = tl.sum(tl.where(here, ids, 0), axis=0)
        chosen = tl.where(place == slot, token, chosen)
        at = row * slots + slot
        tl.store(tokens_ptr + at, token)
        tl.store(path_ptr + at, index.to(tl.int64))
        tl.store(chain_ptr + at, tl.sum(tl.where(here, raw, 0.0), axis=0))
        tl.store(log_q_ptr + at * K + k, log_q, mask=valid)
        picked = previous == (index if R > 1 else 0)
        scores = _finite(tl.sum(tl.where(picked[:, None], table, 0.0), axis=0), valid)
        ids = next_ids


@custom_op("walk_chain", mutates_args=())
def _walk_chain(
    candidates: torch.Tensor,
    first: torch.Tensor,
    pairs: torch.Tensor,
    noise: torch.Tensor | None,
    seen: torch.Tensor | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, slots, K = candidates.shape
    tokens, path, log_q, chain = outputs = _empty_outputs(candidates)
    if not candidates.numel():
        return outputs
    R = pairs.shape[2]
    sample, penalised = noise is not None, seen is not None and repetition_penalty != 1.0
    noise_strides = noise.stride()[:2] if noise is not None else (0, 0)
    seen_row = seen.stride(0) if seen is not None else 0
    _walk_kernel[(rows,)](
        candidates, first, pairs, first if noise is None else noise, candidates if seen is None else seen,
        tokens, path, log_q, chain,
        *candidates.stride()[:2], first.stride(0), *pairs.stride()[:3], *noise_strides, seen_row,
        slots, temperature, top_k, 1.0 - top_p, min_p, repetition_penalty,
        K=K, R=R, K_PAD=next_power_of_2(K), R_PAD=next_power_of_2(R), SLOTS_PAD=next_power_of_2(slots),
        SAMPLE=sample, HAS_SEEN=penalised, HAS_TOP_K=0 < top_k < K, HAS_TOP_P=top_p < 1.0, HAS_MIN_P=min_p > 0.0,
        num_warps=1,
    )  # fmt: skip
    return outputs


@_walk_chain.register_fake
def _(candidates, first, pairs, noise, seen, temperature, top_k, top_p, min_p, repetition_penalty):
    return _empty_outputs(candidates)


def _empty_outputs(candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens, path, log_q and chain."""
    rows, slots, K = candidates.shape
    ids = [candidates.new_empty(rows, slots, dtype=torch.int64) for _ in range(2)]
    return (*ids, *(candidates.new_empty(*shape, dtype=torch.float32) for shape in ((rows, slots, K), (rows, slots))))


def walk_chain(
    candidates: torch.Tensor,
    first: torch.Tensor,
    pairs: torch.Tensor,
    noise: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk every batch row's block from left to right, as `walk_dspine.walk` does with transformers' warpers.

    Args:
        candidates: token ids [batch, slots, K], int64.
        first: slot 1's scores [batch, K].
        pairs: the later slots' scores [batch, slots - 1, R, K], row i after candidate i of the slot before; R is K, or
            1 where slots are independent.
        noise: exponential variables [batch, slots, K] fp32 to sample with; None: the best candidate (greedy, where of
            the settings below only the repetition penalty counts).
        seen: tokens already in the text, bool [batch, V]; tokens chosen on the way count too. None: no penalty.
        temperature, top_k, top_p, min_p, repetition_penalty: as in transformers; 1, 0, 1, 0 and 1 change nothing.

    Returns:
        Tokens [batch, slots] int64; the chosen candidates' indices [batch, slots] int64; log_q [batch, slots, K] fp32,
        the log-probabilities that each token was drawn from, -inf where removed (greedy: 0 at the choice, -inf
        elsewhere); and [batch, slots] fp32, each chosen token's log-probability among the K candidates given its
        predecessor, before penalty and warpers.

    Raises:
        ValueError: shapes that do not belong together, or a setting out of range.
    """
    refuse_tables(candidates, first, pairs)
    rows = candidates.shape[0]
    if noise is not None and (noise.shape != candidates.shape or noise.dtype != torch.float32):
        raise ValueError(f"expected noise {list(candidates.shape)} fp32; found {list(noise.shape)} {noise.dtype}.")
    if seen is not None and (seen.dim() != 2 or seen.shape[0] != rows or seen.dtype != torch.bool):
        raise ValueError(f"expected seen [{rows}, V] bool; found {list(seen.shape)} {seen.dtype}.")
    if temperature <= 0 or top_k < 0 or not 0 <= top_p <= 1 or not 0 <= min_p <= 1 or repetition_penalty <= 0:
        raise ValueError(
            "expected temperature and repetition_penalty above 0, top_k at least 0, top_p and min_p in 0..1; found "
            f"{temperature=}, {repetition_penalty=}, {top_k=}, {top_p=}, {min_p=}."
        )
    candidates, first, pairs, noise, seen = (
        t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (candidates, first, pairs, noise, seen)
    )
    return ops.walk_chain(
        candidates, first, pairs, noise, seen, float(temperature), int(top_k), float(top_p), float(min_p),
        float(repetition_penalty),
    )  # fmt: skip
