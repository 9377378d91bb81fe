"""The exact path of the fast loop for any logits processor: row by row, over full rows, with the row's own prefix."""

from typing import Any

import torch

from .fast_round import Rounds
from .fast_walk import Chain
from .transfer_dspine import TransitionCache
from .walk_dspine import Draft, walk


class RowProcessors:
    """
    A call's processors as one row of its batch sees them: they may count on the batch, by shape or by row number.

    Args:
        processors: the active processors.
        row, batch: which row this is, of how many.
    """

    def __init__(self, processors: list[Any], row: int, batch: int):
        self._processors, self._row, self._batch = processors, row, batch

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` `[1, length]`, `scores` `[1, V]` -> processed `[1, V]`."""
        if self._batch > 1:
            input_ids, scores = input_ids.repeat(self._batch, 1), scores.repeat(self._batch, 1)
        for processor in self._processors:
            scores = processor(input_ids, scores)
        return scores[self._row : self._row + 1] if self._batch > 1 else scores


class RowBlock:
    """One row of a batch of draft blocks."""

    def __init__(self, block: Any, row: int):
        self._block, self._row = block, row
        self.candidates, self.unary = block.candidates[row : row + 1], block.unary[row : row + 1]
        self.transitions = None
        if block.transitions is not None:
            table = block.transitions
            rows = None if table.rows is None else table.rows[row : row + 1]
            self.transitions = TransitionCache(table.first[row : row + 1], table.pairs[row : row + 1], rows)
        self.noise = None if block.noise is None else block.noise[row : row + 1]

    def row(self, slot: int, previous_ids: torch.Tensor) -> torch.Tensor:
        """Full-vocabulary logits `[1, V]` of `slot` given its decided predecessor `[1]`."""
        batch = self._block.candidates.shape[0]
        return self._block.row(slot, previous_ids.expand(batch))[self._row : self._row + 1]


def walk_rows(
    rounds: Rounds, block: Any, processors: list[Any], lengths: list[int], done: list[bool], slots: int
) -> tuple[Chain | None, list[int]]:
    """
    Walks every unfinished row of a batch of blocks with the processors on full rows.

    Returns:
        The chain, as long as the longest row's, and how many of its tokens are each row's own.
    """
    batch, _, n = block.candidates.shape
    drafts: list[Draft | None] = []
    for row in range(batch):
        if done[row]:
            drafts.append(None)
            continue
        ids = rounds.rows.tokens[row : row + 1, : lengths[row]]
        own = processors if batch == 1 else [RowProcessors(processors, row, batch)]
        vocab_size = rounds.drafter.config.vocab_size
        drafts.append(walk(RowBlock(block, row), ids, own, rounds.do_sample, vocab_size))  # type: ignore[arg-type]
    counts = [0 if draft is None else min(slots, draft.tokens.shape[1]) for draft in drafts]
    longest = max(counts)
    if not longest:
        return None, counts
    device = rounds.rows.tokens.device
    tokens = torch.zeros(batch, longest, dtype=torch.long, device=device)
    candidates = torch.arange(n, device=device).repeat(batch, longest, 1)
    q, chosen_q = torch.zeros(batch, longest, n, device=device), torch.ones(batch, longest, device=device)
    for row, (draft, count) in enumerate(zip(drafts, counts, strict=True)):
        if draft is None or not count:
            continue
        tokens[row, :count] = draft.tokens[0, :count]
        if draft.log_q is not None:
            log_q = draft.log_q[0, :count]  # [count, V]
            best, candidates[row, :count] = log_q.topk(n, dim=-1)
            q[row, :count] = best.exp()
            chosen_q[row, :count] = log_q.gather(1, tokens[row, :count, None])[:, 0].exp()
    return Chain(tokens, chosen_q, candidates, q, chosen_q), counts


def processed_scores(
    rounds: Rounds,
    logits: torch.Tensor,
    drafts: torch.Tensor | None,
    processors: list[Any],
    lengths: list[int],
    counts: list[int],
    done: list[bool],
) -> torch.Tensor:
    """
    What the processors make of the target's logits, each row of a pass with its own prefix.

    Args:
        logits: `[batch, rows, V]`.
        drafts: `[batch, rows - 1]`, or None.
        lengths, counts, done: decided columns, own drafts and end of every batch row.
    """
    scores = logits.to(torch.float32, copy=True)
    batch = logits.shape[0]
    for row in range(batch):
        if done[row]:
            continue
        own = RowProcessors(processors, row, batch)
        ids = rounds.rows.tokens[row : row + 1, : lengths[row]]
        if drafts is not None:
            ids = torch.cat([ids, drafts[row : row + 1]], dim=1)
        for slot in range(counts[row] + 1):
            scores[row, slot] = own(ids[:, : lengths[row] + slot], scores[row : row + 1, slot].clone())[0]
    return scores
