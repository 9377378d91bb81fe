"""Oracle drafters for batches: each row has a reference continuation of its own."""

from dataclasses import dataclass

import torch

from dspine_hf import DSpineDraftModel
from dspine_hf.transfer_dspine import TransitionCache
from helpers.oracle import oracle_block, smallest_oracle


@dataclass
class BatchBlock:
    """A batch of blocks read off full rows `[batch, slots, V]` and a bonus `[batch, V, V]` for each predecessor."""

    rows: torch.Tensor
    given: torch.Tensor
    candidates: torch.Tensor
    unary: torch.Tensor
    transitions: TransitionCache | None
    noise: torch.Tensor | None = None

    def row(self, slot, previous_ids):
        row = self.rows[:, slot - 1]
        if self.transitions is None or slot == 1:
            return row
        return row + self.given[torch.arange(len(row)), previous_ids]


def batch_block(
    rows: torch.Tensor, given: torch.Tensor, K: int, independent: bool = False, kept: int | None = None
) -> BatchBlock:
    """The [`oracle_block`] of every batch row, as one block."""
    blocks = [oracle_block(r, g, K, independent, kept) for r, g in zip(rows, given, strict=True)]
    candidates, unary = (torch.cat([getattr(b, name) for b in blocks]) for name in ("candidates", "unary"))
    tables = [b.transitions for b in blocks]
    transitions = None
    if not independent:
        places = None if kept is None else torch.cat([table.rows for table in tables])
        first, pairs = (torch.cat([getattr(table, name) for table in tables]) for name in ("first", "pairs"))
        transitions = TransitionCache(first, pairs, places)
    return BatchBlock(rows, given, candidates, unary, transitions)


class BatchOracle(DSpineDraftModel):
    """
    Drafts row `b` as `references[b][position]` except where `(position + b) % miss_every == 0`; position 0 is the
    first real prompt token. Everything but the draft itself is the real drafter's, whose own blocks are kept.
    """

    references: list = []
    miss_every: int = 4
    boost: float = 20.0

    @torch.no_grad()
    def draft_block(self, view, cache, anchor_ids, anchor_positions, num_slots=None, attention_mask=None, **more):
        block = super().draft_block(view, cache, anchor_ids, anchor_positions, num_slots, attention_mask, **more)
        self.blocks = [*getattr(self, "blocks", []), (anchor_positions.tolist(), block.unary, block.candidates)]
        slots, V = self.config.num_draft_slots, self.config.vocab_size
        rows, given = [], []
        for b, position in enumerate(anchor_positions.tolist()):
            generator = torch.Generator().manual_seed(1000 * b + position)
            scores = torch.randn(slots, V, generator=generator)
            for slot in range(1, slots + 1):
                place = position + slot
                if b < len(self.references) and place < len(self.references[b]):
                    token = self.references[b][place]
                    scores[slot - 1, (token + int((place + b) % self.miss_every == 0)) % V] += self.boost
            rows.append(scores)
            given.append(torch.randn(V, V, generator=generator))
        independent = self.config.selection == "independent"
        return batch_block(torch.stack(rows), torch.stack(given), self.config.num_candidates, independent)


def batch_oracle(target, references=(), miss_every: int = 4, boost: float = 20.0, **overrides) -> BatchOracle:
    """A batch oracle for `target`, of the smallest shapes."""
    drafter = smallest_oracle(BatchOracle, target, miss_every, boost, **overrides)
    drafter.references = [[int(token) for token in reference] for reference in references]
    return drafter


def padded(prompts, pad: int = 0):
    """Prompts `[1, n]` of any lengths as one left-padded batch: ids and mask."""
    longest = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0), value=pad) for p in prompts])
    mask = torch.cat(
        [torch.nn.functional.pad(torch.ones_like(p), (longest - p.shape[1], 0), value=0) for p in prompts]
    )
    return ids, mask
