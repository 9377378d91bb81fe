"""The walk of the fast loop: a batch of draft blocks becomes a batch of chains, without a look at the host.

Row-wise warpers and one repetition penalty run on the n candidates of every slot: K, or S when sampling. q stays
sparse: n probabilities per slot beside the n tokens that they belong to.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .fast_tree import Tree
from .ops_dspine import EAGER, Ops
from .walk_dspine import ROW_WISE, finite, is_spent, noise_like, row_after, score_tables


@dataclass
class Chain:
    """
    A batch of drafts.

    Attributes:
        tokens: `[batch, slots]`.
        confidence: `[batch, slots]`, how probable the drafter finds that the slot is accepted, from the tokens before
            it alone when sampling.
        candidates, q: `[batch, slots, n]`, what the tokens were sampled from; q is None when greedy.
        chosen_q: `[batch, slots]`, q of the tokens; None when greedy.
        tree: what is verified in place of the tokens, if anything is.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor
    candidates: torch.Tensor
    q: torch.Tensor | None = None
    chosen_q: torch.Tensor | None = None
    tree: Tree | None = None


class SeenTokens:
    """
    The tokens that a repetition penalty counts as repeated, per batch row.

    Args:
        penalty: of the call's processor.
        batch, vocab_size: shape of the table.
    """

    def __init__(self, penalty: float, batch: int, vocab_size: int, device: Any):
        self.penalty = penalty
        self.table = torch.zeros(batch, vocab_size, dtype=torch.bool, device=device)

    def begin(self, processor: RepetitionPenaltyLogitsProcessor, input_ids: torch.Tensor) -> None:
        """Counts the prompts `[batch, length]`, as the processor itself would."""
        ignored = processor.prompt_ignore_length
        self.table.zero_()
        counted = torch.ones_like(input_ids, dtype=torch.bool)
        if ignored is not None:
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            counted = counted & (places >= torch.as_tensor(ignored, device=input_ids.device).view(-1, 1))
        for row, ids, keep in zip(self.table, input_ids, counted, strict=True):
            row[ids[keep]] = True

    def add(self, tokens: torch.Tensor, valid: torch.Tensor) -> None:
        """Counts `tokens` `[batch, n]` where `valid`; a row's first token is valid if any of them is."""
        self.table.scatter_(1, torch.where(valid, tokens, tokens[:, :1]), True)

    def after(self, drafts: torch.Tensor) -> torch.Tensor:
        """The tables of every prefix of `drafts` `[batch, n]`: `[batch, n + 1, V]`."""
        n = drafts.shape[1]
        tables = self.table[:, None].repeat(1, n + 1, 1)
        for slot in range(n):
            tables[:, slot + 1 :].scatter_(2, drafts[:, slot, None, None].expand(-1, n - slot, 1), True)
        return tables

    def penalise(self, scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """`scores` with the penalty where `seen`, of the same shape."""
        return torch.where(seen, torch.where(scores < 0, scores * self.penalty, scores / self.penalty), scores)


def active_processors(processors: Any, length: int) -> list[Any]:
    """The processors that change anything at this length or a longer one."""
    return [processor for processor in processors if not is_spent(processor, length)]


def is_fast(processors: list[Any], prompt_length: int) -> bool:
    """
    Whether this walk can run them: row-wise warpers and at most one repetition penalty, which ignores tokens of the
    prompt alone.
    """
    rest = [processor for processor in processors if type(processor) not in ROW_WISE]
    if len(rest) != 1 or type(rest[0]) is not RepetitionPenaltyLogitsProcessor:
        return not rest
    ignored = rest[0].prompt_ignore_length
    return ignored is None or int(torch.as_tensor(ignored).max()) <= prompt_length


def warp(scores: torch.Tensor, processors: list[Any], seen: SeenTokens | None, table: Any) -> torch.Tensor:
    """Runs the processors over `scores` `[.., n]`; `table` says which of these tokens the penalty has seen."""
    flat = scores.reshape(-1, scores.shape[-1])
    no_ids = torch.empty(0, 0, dtype=torch.long, device=scores.device)
    for processor in processors:
        if type(processor) is RepetitionPenaltyLogitsProcessor:
            assert seen is not None
            flat = seen.penalise(flat, table.reshape(flat.shape))
        else:
            flat = processor(no_ids, flat)
    return flat.view_as(scores)


def walk_batch(block: Any, processors: list[Any], seen: SeenTokens | None, do_sample: bool, ops: Ops = EAGER) -> Chain:
    """
    Walks a batch of draft blocks from left to right.

    Args:
        block: what `draft_block` returned.
        processors: the active processors, all of them fast (see [`is_fast`]).
        seen: the table of the repetition penalty among them, if there is one.
        do_sample: sample, instead of taking the best.
        ops: the drafter's operations: a fused walk among them takes the usual processors in their usual order.
    """
    candidates = block.candidates  # [batch, slots, n]
    ops = ops.at(candidates.shape[2])
    if ops.walk_chain is not EAGER.walk_chain and getattr(block.transitions, "rows", None) is None:
        settings = chain_settings(processors)
        if settings is not None:
            return _fused_walk(block, settings, seen, do_sample, ops)
    first, pairs = map(finite, score_tables(block))  # [batch, n], [batch, slots - 1, R, n]
    if not do_sample:
        processors = [p for p in processors if type(p) is RepetitionPenaltyLogitsProcessor]
    if seen is None or not any(type(p) is RepetitionPenaltyLogitsProcessor for p in processors):
        first, pairs = warp(first, processors, None, None), _warp_pairs(pairs, processors)
        rows, index = _look_up(block, first, pairs, do_sample)
    else:
        rows, index = _one_by_one(block, first, pairs, processors, seen, do_sample)
    tokens = candidates.gather(2, index.unsqueeze(-1)).squeeze(-1)
    q = rows.softmax(-1)  # [batch, slots, n]
    chosen_q = q.gather(2, index.unsqueeze(-1)).squeeze(-1)
    if not do_sample:
        return Chain(tokens, chosen_q, candidates)
    return Chain(tokens, q.square().sum(-1), candidates, q, chosen_q)


_SETTINGS: dict[type, tuple[str, str]] = {  # in the order of generate()
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}


def chain_settings(processors: list[Any]) -> dict[str, float] | None:
    """The arguments of `ops.walk_chain` that amount to these processors; None where none do."""
    order, settings = list(_SETTINGS), {}
    place = -1
    for processor in processors:
        kind = type(processor)
        if kind not in _SETTINGS or order.index(kind) <= place:
            return None
        unusual = getattr(processor, "filter_value", float("-inf")) != float("-inf")
        if unusual or getattr(processor, "min_tokens_to_keep", 1) != 1:
            return None
        place = order.index(kind)
        name, argument = _SETTINGS[kind]
        settings[argument] = getattr(processor, name)
    return settings


def _fused_walk(block: Any, settings: dict[str, float], seen: SeenTokens | None, do_sample: bool, ops: Ops) -> Chain:
    candidates = block.candidates
    first, pairs = score_tables(block)  # the operation makes them finite itself
    noise = _noise_of(block) if do_sample else None
    table = seen.table if seen is not None and "repetition_penalty" in settings else None
    tokens, index, log_q, chain = ops.walk_chain(
        candidates, first.float(), pairs.float(), noise=noise, seen=table, **settings
    )
    if not do_sample:
        return Chain(tokens, chain.exp(), candidates)
    q = log_q.exp()
    return Chain(tokens, q.square().sum(-1), candidates, q, q.gather(2, index.unsqueeze(-1)).squeeze(-1))


def _warp_pairs(pairs: torch.Tensor, processors: list[Any]) -> torch.Tensor:
    return warp(pairs, processors, None, None) if pairs.numel() else pairs


def _noise_of(block: Any) -> torch.Tensor:
    """The noise `[batch, slots, n]` that the block's predecessors were chosen by, or fresh noise."""
    return noise_like(block.unary) if block.noise is None else block.noise


def _row(block: Any, pairs: torch.Tensor, slot: int, index: torch.Tensor) -> torch.Tensor:
    """The scores of `slot` (from 2) after candidate `index` `[batch, 1]` of the slot before: `[batch, n]`."""
    place = row_after(block, slot, index).unsqueeze(-1)
    return pairs[:, slot - 2].gather(1, place.expand(-1, 1, pairs.shape[3])).squeeze(1)


def _look_up(
    block: Any, first: torch.Tensor, pairs: torch.Tensor, do_sample: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows are known: the choice in every row at once, then a chain of look-ups."""
    if do_sample:
        noise = _noise_of(block)
        index = (first.softmax(-1) / noise[:, 0]).argmax(-1, keepdim=True)  # [batch, 1]
        best = (pairs.softmax(-1) / noise[:, 1:, None]).argmax(-1)  # [batch, slots - 1, R]
    else:
        index, best = first.argmax(-1, keepdim=True), pairs.argmax(-1)
    path, places = [index], []
    for slot in range(best.shape[1]):
        places.append(row_after(block, slot + 2, index))
        index = best[:, slot].gather(1, places[-1])
        path.append(index)
    rows = first[:, None]
    if places:
        used = torch.cat(places, dim=1)[:, :, None, None].expand(-1, -1, 1, pairs.shape[3])
        rows = torch.cat([rows, pairs.gather(2, used).squeeze(2)], dim=1)
    return rows, torch.cat(path, dim=1)


def _one_by_one(
    block: Any, first: torch.Tensor, pairs: torch.Tensor, processors: list[Any], seen: SeenTokens, do_sample: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The penalty depends on the tokens walked: slot after slot."""
    noise = _noise_of(block) if do_sample else None
    walked: list[torch.Tensor] = []
    scores, rows, path = first, [], []
    for slot, ids in enumerate(block.candidates.unbind(1)):  # [batch, n] each
        repeated = seen.table.gather(1, ids)
        for token in walked:
            repeated = repeated | (ids == token)
        scores = warp(scores, processors, seen, repeated)
        keys = scores if noise is None else scores.softmax(-1) / noise[:, slot]
        index = keys.argmax(-1, keepdim=True)  # [batch, 1]
        rows.append(scores)
        path.append(index)
        walked.append(ids.gather(1, index))
        if slot + 1 < block.candidates.shape[1]:
            scores = _row(block, pairs, slot + 2, index)
    return torch.stack(rows, dim=1), torch.cat(path, dim=1)
