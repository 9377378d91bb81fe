"""What one draft pass proposes: the candidates of every slot, and the scores of pairs of them."""

from dataclasses import dataclass
from typing import Any

import torch

from .rewrite_dspine import ChainStates, rewritten
from .transfer_dspine import TransitionCache, predecessor_keys


@dataclass
class DraftBlock:
    """What one draft pass proposes, from n candidates a slot: K, or S where it is to be sampled from.

    Args:
        candidates: [batch, slots, n], the best n tokens of each slot's unary logits, best first.
        unary: [batch, slots, n] fp32, their unary logits; with `chain_passes`, those given the chain.
        transitions: pair scores, or None when slots are selected independently.
        noise: [batch, slots, n], what the walk is to sample with; None: the walk draws it.
        chain: whose states the rewritten layers attend to; None without `chain_passes`.
    """

    candidates: torch.Tensor
    unary: torch.Tensor
    transitions: TransitionCache | None
    _drafter: Any
    _view: Any
    _output: Any
    noise: torch.Tensor | None = None
    chain: ChainStates | None = None

    def row(self, slot: int, previous_ids: torch.Tensor) -> torch.Tensor:
        """Full-vocabulary logits [batch, V] of `slot` (from 1) given its decided predecessor [batch]."""
        if self.transitions is None:
            return self._view.logits(self._drafter.norm(self._output.hidden[:, 0, slot]))
        messages = self._view.phi(previous_ids.view(-1, 1, 1, 1))
        hidden = self._drafter.rewrite(self._output.rewrite, messages, slot, self.chain)
        return self._view.logits(hidden[:, 0, 0, 0])


def block_transitions(drafter: Any, view: Any, state: Any, block: DraftBlock, kept: int, temperature: Any) -> None:
    """Puts the scores of candidate pairs into `block`, all slots at once. Slot 1 was written with the anchor: unary is
    score.

    Where the block has more than `kept` candidates a slot, so many predecessors are chosen by the noise that the walk
    will sample with (see [`predecessor_keys`]), and one more row stands for all others: the slot's unary logits.

    Args:
        state: `DSpineOutput.rewrite`. kept: K. temperature: that the walk will sample with.
    """
    unary, candidates, ops = block.unary, block.candidates, drafter.ops
    batch, slots, count = unary.shape
    if slots == 1:
        block.transitions = TransitionCache(unary[:, 0], unary.new_zeros(batch, 0, count, count))
        return
    rows, predecessors = None, candidates[:, :-1]
    if block.noise is not None and kept < count:
        keys = predecessor_keys(unary[:, :-1], block.noise[:, :-1], temperature)
        chosen = keys.topk(kept, dim=-1).indices  # [batch, slots - 1, K]
        predecessors = predecessors.gather(2, chosen)
        places = torch.arange(kept, device=chosen.device).expand_as(chosen)
        rows = torch.full_like(candidates[:, :-1], kept).scatter_(2, chosen, places)
    hidden = rewritten(drafter, state, view.phi(predecessors).unsqueeze(1), 2, block.chain)[:, 0]
    pairs = view.pair_scores(hidden, drafter.norm, candidates[:, 1:], ops.at(count).pair_scores)
    if rows is not None:
        pairs = torch.cat([pairs, unary[:, 1:, None]], dim=2)
    block.transitions = TransitionCache(unary[:, 0], pairs, rows)
