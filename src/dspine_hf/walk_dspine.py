"""The walk: a draft block becomes a chain of tokens, and q, the distribution that each of them was sampled from.

There are three ways through a block. With row-wise warpers alone (temperature, top-k, top-p, min-p) every row of the
transition cache is warped at once and the walk is a chain of look-ups. A repetition penalty depends on the tokens
walked, so its rows are warped one by one, still on the candidates. Any other processor sees full rows, in order.
n is the number of candidates a slot: K, or S when sampling.

q is free: rejection sampling keeps the target's distribution whatever q is, as long as the tokens came from it
(Leviathan et al., arXiv 2211.17192).
"""

import math
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
    """Slot 1's scores `[batch, n]` and later slots' `[batch, slots - 1, R, n]`; see [`row_after`]."""
    if block.transitions is None:
        return block.unary[:, 0], block.unary[:, 1:, None]
    return block.transitions.first, block.transitions.pairs


def row_after(block: Any, slot: int, index: torch.Tensor) -> torch.Tensor:
    """[`TransitionCache.row_after`] of a block; slots on their own have one row."""
    return torch.zeros_like(index) if block.transitions is None else block.transitions.row_after(slot, index)


def sampling_options(
    config: Any, processors: list[Any], batch: int, device: Any, kept: int | None = None, width: int | None = None
) -> dict[str, Any]:
    """
    What `draft_block` takes for a block that is to be sampled from S candidates: noise and temperature. Nothing where
    S is not more than K and no chain is drafted beforehand.

    Args:
        config: the drafter's.
        processors: of the call.
        kept, width: K and S of the call, where they are not the drafter's.
    """
    kept, width = kept or config.num_candidates, width or config.sampling_width
    if width <= kept and not config.chain_passes:
        return {}
    chained = {"num_sampled": max(width, kept)} if config.chain_passes else {}
    drawn = config.vocab_size if chained else width
    noise = noise_like(torch.empty(batch, config.num_draft_slots, drawn, device=device))
    temperature = math.prod(p.temperature for p in processors if type(p) is TemperatureLogitsWarper)
    # A tensor: for every number that it meets, torch.compile would compile the draft again.
    return {"noise": noise, "temperature": torch.full((), float(temperature), device=device), **chained}


def finite(scores: torch.Tensor) -> torch.Tensor:
    """An overflow in the drafter must cost acceptance, never a NaN in the target's distribution."""
    return scores.float().nan_to_num(nan=-_FLOOR, posinf=_FLOOR, neginf=-_FLOOR)


def _tables(block: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The finite tables of a single row: `[1, n]` and `[slots - 1, R, n]`."""
    first, pairs = score_tables(block)
    return finite(first), finite(pairs[0])


def noise_like(x: torch.Tensor) -> torch.Tensor:
    """Exponential variables: the argmax of p / noise is distributed as p."""
    return torch.empty_like(x, dtype=torch.float32).exponential_().clamp_min_(1e-30)


def _noise_of(block: Any) -> torch.Tensor:
    """The noise `[slots, n]` that the block's predecessors were chosen by, or fresh noise."""
    return noise_like(block.unary[0]) if block.noise is None else block.noise[0]


def _walk_table(block: Any, warpers: list[LogitsProcessor], do_sample: bool, vocab_size: int) -> Draft:
    first, pairs = _tables(block)  # [1, n], [slots - 1, R, n]
    candidates = block.candidates[0]  # [slots, n]
    no_ids = candidates.new_empty(0, 0)
    for warper in warpers if do_sample else ():
        first = warper(no_ids, first)
        if pairs.numel():
            pairs = warper(no_ids, pairs.flatten(0, 1)).view_as(pairs)
    keys, later_keys = first, pairs
    if do_sample:
        noise = _noise_of(block)
        keys = first.softmax(-1) / noise[:1]
        later_keys = pairs.softmax(-1) / noise[1:, None]

    index = keys.argmax(-1, keepdim=True)  # [1, 1]
    chosen, rows = [index], []
    for slot, best in enumerate(later_keys.argmax(-1).unbind(0), start=2):  # [R] each: the choice in every row
        rows.append(row_after(block, slot, index))
        index = best[None].gather(1, rows[-1])
        chosen.append(index)
    path = torch.cat(chosen, dim=1)  # [1, slots]
    tokens = candidates.gather(1, path.T).T
    if not do_sample:
        return Draft(tokens, None)
    log_q = first.log_softmax(-1)
    if rows:
        used = torch.cat(rows).unsqueeze(-1).expand(-1, 1, pairs.shape[-1])  # [slots - 1, 1, n]
        log_q = torch.cat([log_q, pairs.gather(1, used)[:, 0].log_softmax(-1)])  # [slots, n]
    return Draft(tokens, _spread(log_q, candidates, vocab_size))


def _spread(log_q: torch.Tensor, candidates: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Candidates' log-probabilities `[slots, n]` at their places in the vocabulary: `[1, slots, V]`, else -inf."""
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
    candidates = block.candidates[0]  # [slots, n]
    noise = _noise_of(block) if do_sample else None
    input_ids = input_ids.to(candidates.device)
    repetition = RepetitionPenaltyLogitsProcessor
    seen = {id(p): _SeenTokens(p, input_ids, vocab_size) for p in processors if type(p) is repetition}
    scores, tokens, log_q = first, [], []
    for slot in range(candidates.shape[0]):
        ids = candidates[slot : slot + 1]  # [1, n]
        for processor in processors:
            penalty = seen.get(id(processor))
            scores = penalty.penalise(ids, scores) if penalty else processor(input_ids, scores)
        keys = scores if noise is None else scores.softmax(-1) / noise[slot]
        index = keys.argmax(-1, keepdim=True)  # [1, 1]
        token = ids.gather(1, index)
        for penalty in seen.values():
            penalty.add(token[0])
        tokens.append(token)
        log_q.append(scores)
        if slot + 1 < candidates.shape[0]:
            scores = pairs[slot][row_after(block, slot + 2, index)[0]]
    drafted = torch.cat(tokens, dim=1)
    return Draft(drafted, _spread(torch.cat(log_q).log_softmax(-1), candidates, vocab_size) if do_sample else None)


def _walk_rows(block: Any, input_ids: torch.Tensor, processors: list[LogitsProcessor], do_sample: bool) -> Draft:
    """Full rows through every processor; q is confined to the n best of the processed row, a forced token included."""
    slots, n = block.candidates.shape[1:]
    prefix, tokens, log_q = input_ids, [], []
    for slot in range(1, slots + 1):
        scores = finite(block.row(slot, prefix[:, -1].to(block.candidates.device)))  # [1, V]
        scores = scores.to(input_ids.device)
        for processor in processors:
            scores = processor(prefix, scores)
        best, ids = scores.topk(min(n, scores.shape[-1]), dim=-1)  # [1, n]
        if not bool(best[0, 0] > float("-inf")):
            break
        keys = best.softmax(-1) / noise_like(best) if do_sample else best
        token = ids.gather(1, keys.argmax(-1, keepdim=True))
        prefix = torch.cat([prefix, token], dim=1)
        tokens.append(token)
        if do_sample:
            log_q.append(_spread(best.log_softmax(-1), ids, scores.shape[-1]))
    if not tokens:
        return Draft(input_ids[:, :0], None)
    return Draft(torch.cat(tokens, dim=1), torch.cat(log_q, dim=1) if do_sample else None)
