"""The walk: a draft block becomes a chain of tokens, and q, the distribution that each of them was sampled from.

There are three ways through a block. With row-wise warpers alone (temperature, top-k, top-p, min-p) every row of the
transition cache is warped at once and the walk is a chain of look-ups. A repetition penalty depends on the tokens
walked, so its rows are warped one by one, still on the K candidates. Any other processor sees full rows, in order.

q is free: rejection sampling keeps the target's distribution whatever q is, as long as the tokens came from it
(DESIGN.md section 1).
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

ROW_WISE = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    LogitNormalization,
    InfNanRemoveLogitsProcessor,
)
_FLOOR = 1e30


@dataclass
class Draft:
    """
    Drafted tokens and where they came from.

    Attributes:
        tokens: `[1, n]`, n at most the block's slots.
        log_q: `[1, n, V]` fp32 log-probabilities that the tokens were sampled from, -inf outside the candidates; None
            when the draft is greedy.
    """

    tokens: torch.Tensor
    log_q: torch.Tensor | None


def walk(
    block: Any, input_ids: torch.Tensor, processors: list[LogitsProcessor], do_sample: bool, vocab_size: int
) -> Draft:
    """
    Walks a draft block from left to right.

    Args:
        block: what `draft_block` returned, for batch size 1.
        input_ids: `[1, length]`, all tokens decided so far, the anchor last.
        processors: the logits processors of the call.
        do_sample: sample, instead of taking the best.
        vocab_size: V, the width of q.
    """
    active = [processor for processor in processors if not is_spent(processor, input_ids.shape[1])]
    if all(type(processor) in ROW_WISE for processor in active):
        return _walk_table(block, active, do_sample, vocab_size)
    if all(type(processor) in (*ROW_WISE, RepetitionPenaltyLogitsProcessor) for processor in active):
        return _walk_candidates(block, input_ids, active, do_sample, vocab_size)
    return _walk_rows(block, input_ids, active, do_sample)


def is_spent(processor: LogitsProcessor, length: int) -> bool:
    """Whether the processor changes nothing for this length and every longer one."""
    kind = type(processor)
    if kind is MinLengthLogitsProcessor:
        return length >= processor.min_length
    if kind is MinNewTokensLengthLogitsProcessor:
        return length - processor.prompt_length_to_skip >= processor.min_new_tokens
    if kind is SuppressTokensAtBeginLogitsProcessor:
        return length > processor.begin_index
    return kind is ForcedBOSTokenLogitsProcessor and length > 1


def score_tables(block: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot 1's scores `[batch, K]` and later slots' `[batch, slots - 1, R, K]`: R = K given each predecessor, or 1."""
    if block.transitions is None:
        return block.unary[:, 0], block.unary[:, 1:, None]
    return block.transitions.first, block.transitions.pairs


def finite(scores: torch.Tensor) -> torch.Tensor:
    """An overflow in the drafter must cost acceptance, never a NaN in the target's distribution."""
    return scores.float().nan_to_num(nan=-_FLOOR, posinf=_FLOOR, neginf=-_FLOOR)


def _tables(block: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The finite tables of a single row: `[1, K]` and `[slots - 1, R, K]`."""
    first, pairs = score_tables(block)
    return finite(first), finite(pairs[0])


def _noise(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Exponential variables: the argmax of p / noise is distributed as p."""
    return torch.empty(shape, dtype=torch.float32, device=like.device).exponential_()


def _walk_table(block: Any, warpers: list[LogitsProcessor], do_sample: bool, vocab_size: int) -> Draft:
    first, pairs = _tables(block)  # [1, K], [slots - 1, R, K]
    candidates = block.candidates[0]  # [slots, K]
    no_ids = candidates.new_empty(0, 0)
    for warper in warpers if do_sample else ():
        first = warper(no_ids, first)
        if pairs.numel():
            pairs = warper(no_ids, pairs.flatten(0, 1)).view_as(pairs)
    keys, later_keys = first, pairs
    if do_sample:
        noise = _noise(tuple(candidates.shape), first)
        keys = first.softmax(-1) / noise[:1]
        later_keys = pairs.softmax(-1) / noise[1:, None]

    index = keys.argmax(-1)  # [1]
    chosen = [index]
    for best in later_keys.argmax(-1).unbind(0):  # [R] each: the choice after every predecessor
        index = best if best.shape[0] == 1 else best.gather(0, index)
        chosen.append(index)
    path = torch.cat(chosen)  # [slots]
    tokens = candidates.gather(1, path[:, None]).T
    if not do_sample:
        return Draft(tokens, None)
    rows = pairs.log_softmax(-1)
    if rows.shape[1] > 1:
        rows = rows.gather(1, path[:-1, None, None].expand(-1, 1, rows.shape[-1]))
    log_q = torch.cat([first.log_softmax(-1), rows[:, 0]])  # [slots, K]
    return Draft(tokens, _spread(log_q, candidates, vocab_size))


def _spread(log_q: torch.Tensor, candidates: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Candidates' log-probabilities `[n, K]` at their places in the vocabulary: `[1, n, V]`, -inf elsewhere."""
    full = log_q.new_full((log_q.shape[0], vocab_size), float("-inf"))
    return full.scatter_(1, candidates, log_q).unsqueeze(0)


class _SeenTokens:
    """Which tokens a repetition penalty counts as repeated, over the whole vocabulary."""

    def __init__(self, processor: RepetitionPenaltyLogitsProcessor, input_ids: torch.Tensor, vocab_size: int):
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, int):
            input_ids = input_ids[:, ignored:]
        elif ignored is not None:
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            input_ids = input_ids.masked_fill(places < ignored.to(input_ids.device)[:, None], vocab_size)
        self.penalty = processor.penalty
        self.seen = torch.zeros(vocab_size + 1, dtype=torch.bool, device=input_ids.device)
        self.add(input_ids[0].clamp(max=vocab_size))

    def add(self, ids: torch.Tensor) -> None:
        self.seen[ids] = True

    def penalise(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        penalised = torch.where(scores < 0, scores * self.penalty, scores / self.penalty)
        return torch.where(self.seen[ids], penalised, scores)


def _walk_candidates(
    block: Any, input_ids: torch.Tensor, processors: list[LogitsProcessor], do_sample: bool, vocab_size: int
) -> Draft:
    first, pairs = _tables(block)
    candidates = block.candidates[0]  # [slots, K]
    input_ids = input_ids.to(candidates.device)
    repetition = RepetitionPenaltyLogitsProcessor
    seen = {id(p): _SeenTokens(p, input_ids, vocab_size) for p in processors if type(p) is repetition}
    scores, tokens, log_q = first, [], []
    for slot in range(candidates.shape[0]):
        ids = candidates[slot : slot + 1]  # [1, K]
        for processor in processors:
            penalty = seen.get(id(processor))
            scores = penalty.penalise(ids, scores) if penalty else processor(input_ids, scores)
        keys = scores.softmax(-1) / _noise((1, ids.shape[1]), scores) if do_sample else scores
        index = keys.argmax(-1)  # [1]
        token = ids.gather(1, index[:, None])
        for penalty in seen.values():
            penalty.add(token[0])
        tokens.append(token)
        log_q.append(scores)
        if slot + 1 < candidates.shape[0]:
            rows = pairs[slot]  # [R, K]
            scores = rows if rows.shape[0] == 1 else rows[index]
    drafted = torch.cat(tokens, dim=1)
    return Draft(drafted, _spread(torch.cat(log_q).log_softmax(-1), candidates, vocab_size) if do_sample else None)


def _walk_rows(block: Any, input_ids: torch.Tensor, processors: list[LogitsProcessor], do_sample: bool) -> Draft:
    """Full rows through every processor; q is confined to the K best of the processed row, a forced token included."""
    slots, K = block.candidates.shape[1:]
    prefix, tokens, log_q = input_ids, [], []
    for slot in range(1, slots + 1):
        scores = finite(block.row(slot, prefix[:, -1].to(block.candidates.device)))  # [1, V]
        scores = scores.to(input_ids.device)
        for processor in processors:
            scores = processor(prefix, scores)
        best, ids = scores.topk(min(K, scores.shape[-1]), dim=-1)  # [1, K]
        if not bool(best[0, 0] > float("-inf")):
            break
        keys = best.softmax(-1) / _noise(tuple(best.shape), best) if do_sample else best
        token = ids.gather(1, keys.argmax(-1, keepdim=True))
        prefix = torch.cat([prefix, token], dim=1)
        tokens.append(token)
        if do_sample:
            log_q.append(_spread(best.log_softmax(-1), ids, scores.shape[-1]))
    if not tokens:
        return Draft(input_ids[:, :0], None)
    return Draft(torch.cat(tokens, dim=1), torch.cat(log_q, dim=1) if do_sample else None)
