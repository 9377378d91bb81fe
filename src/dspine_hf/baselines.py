"""Drafters to compare DSpine with, on the same backbone, data and objective: DSpark-, DFlash2- and EAGLE-3-style."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .configuration_dspine import DSpineConfig
from .eagle import EagleDrafter
from .losses import LossWeights, token_loss
from .modeling_dspine import DraftBlock, DSpineDraftModel
from .objective import SequenceBatch, block_states, row_weights, slot_accuracy, teacher_rows
from .offline_sampled import candidate_log_q
from .target_dspine import TargetView
from .transfer_dspine import TransitionCache

RANK = 256

PUBLISHED_WEIGHTS = {
    "dspark": LossWeights(unary=0.0, conditional=1.0),
    "dflash2": LossWeights(unary=0.5, conditional=0.5),
    "eagle3": LossWeights(unary=0.0, conditional=1.0),
}


class PairScores(nn.Module):
    """What token b gains in a slot of state h after token a: <A[a] * H h, B[b]>, or <A[a], B[b]> without H.

    A [V, r] starts with rows of norm about 1, B [V, r] with zeros, so that a fresh drafter is DFlash.
    """

    def __init__(self, vocabulary: int, rank: int, hidden_size: int | None = None):
        super().__init__()
        self.A = nn.Parameter(torch.empty(vocabulary, rank))
        self.B = nn.Parameter(torch.empty(vocabulary, rank))
        self.H = None if hidden_size is None else nn.Linear(hidden_size, rank, bias=False)

    def reset(self) -> None:
        """Draw the initial weights; those that a checkpoint already filled stay."""
        init.normal_(self.A, mean=0.0, std=self.A.shape[1] ** -0.5)
        init.zeros_(self.B)
        if self.H is not None:
            init.normal_(self.H.weight, mean=0.0, std=self.H.weight.shape[1] ** -0.5)

    def code(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """The left factor: normed states [.., d] and previous tokens [..] -> [.., r]."""
        left = F.embedding(previous, self.A)
        return left if self.H is None else left * self.H(hidden.to(self.H.weight.dtype))

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Normed states [.., d], previous tokens [.., m], tokens [.., n] -> gains [.., m, n], fp32."""
        left = self.code(hidden.unsqueeze(-2), previous)
        return torch.matmul(left.float(), F.embedding(ids, self.B).float().transpose(-1, -2))

    def row(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Gains of the whole vocabulary: normed states [.., d], previous tokens [..] -> [.., V], fp32."""
        return torch.matmul(self.code(hidden, previous).float(), self.B.float().T)


class PairDrafter(DSpineDraftModel):
    """A DFlash backbone with [`PairScores`] beside its head; what the two methods share.

    Config fields of its own: `pair_rank` (256).
    """

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        self.pair = PairScores(config.vocab_size, getattr(config, "pair_rank", RANK), self._pair_width(config))
        self.pair.reset()

    def _init_weights(self, module):
        if isinstance(module, PairScores):
            module.reset()
        else:
            super()._init_weights(module)

    @classmethod
    def for_target(
        cls, model: nn.Module, token_weights: torch.Tensor | None = None, **config_overrides: Any
    ) -> DSpineDraftModel:
        """As [`DSpineDraftModel.for_target`], with the backbone of DFlash."""
        switches = {"injection": "none", "selection": "independent", **config_overrides}
        return super().for_target(model, token_weights, **switches)

    def _pair_width(self, config: DSpineConfig) -> int | None:
        raise NotImplementedError

    def _candidates(self, hidden: torch.Tensor, logits: torch.Tensor, anchor_ids: torch.Tensor) -> torch.Tensor:
        """Candidates [n, slots, K] from states [n, slots, d], unary logits [n, slots, V] and anchors [n]."""
        raise NotImplementedError

    def scored_candidates(
        self, view: TargetView, hidden: torch.Tensor, anchor_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, TransitionCache]:
        """Candidates and their unary logits [n, slots, K], and all pair scores; hidden [n, slots, d], anchors [n]."""
        logits = view.logits(hidden)
        candidates = self._candidates(hidden, logits, anchor_ids)
        unary = logits.gather(-1, candidates)
        first = unary[:, 0] + self.pair(hidden[:, 0], anchor_ids.unsqueeze(1), candidates[:, 0]).squeeze(1)
        pairs = unary[:, 1:].unsqueeze(2) + self.pair(hidden[:, 1:], candidates[:, :-1], candidates[:, 1:])
        return candidates, unary, TransitionCache(first, pairs)

    def true_log_q(self, view: TargetView, hidden: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        """log q of the true tokens window[:, 1:] given those before them: hidden [n, slots, d] -> [n, slots]."""
        unary, candidates = view.logits(hidden).topk(self.config.num_candidates, dim=-1)
        gain = self.pair(hidden, window[:, :-1].unsqueeze(-1), candidates).squeeze(-2)
        return candidate_log_q(unary + gain, candidates, window[:, 1:])

    @torch.no_grad()
    def draft_block(
        self, view: TargetView, cache: Any, anchor_ids: torch.Tensor, *args: Any, **options: Any
    ) -> DraftBlock:
        """As [`DSpineDraftModel.draft_block`], with this drafter's pair scores as the transitions."""
        block = super().draft_block(view, cache, anchor_ids, *args, **options)
        hidden = self.norm(block._output.hidden[:, 0, 1:])
        scored = self.scored_candidates(view, hidden, anchor_ids.to(hidden.device).view(-1))
        return PairBlock(*scored, self, view, block._output)


class PairBlock(DraftBlock):
    """A [`DraftBlock`] whose rows carry the pair scores of the whole vocabulary."""

    def row(self, slot: int, previous_ids: torch.Tensor) -> torch.Tensor:
        """Full-vocabulary logits [batch, V] of `slot` (from 1) given its decided predecessor [batch]."""
        hidden = self._drafter.norm(self._output.hidden[:, 0, slot])
        return self._view.logits(hidden) + self._drafter.pair.row(hidden, previous_ids.to(hidden.device).view(-1))


class DSparkDrafter(PairDrafter):
    """DSpark-style: logits E norm(h_t) + W2 W1[previous token]; here A is W1 and B is W2."""

    def _pair_width(self, config):
        return None

    def _candidates(self, hidden, logits, anchor_ids):
        """The top K of each slot's full row given the greedy choice before it, so that the greedy chain is exact."""
        chosen, previous = [], anchor_ids
        for slot in range(logits.shape[1]):
            row = logits[:, slot] + self.pair.row(hidden[:, slot], previous)
            chosen.append(row.topk(self.config.num_candidates, dim=-1).indices)
            previous = chosen[-1][:, 0]
        return torch.stack(chosen, dim=1)

    def true_log_q(self, view, hidden, window):
        """Over the whole vocabulary: it samples each slot from its full row."""
        rows = view.logits(hidden) + self.pair.row(hidden, window[:, :-1])
        return rows.log_softmax(-1).gather(-1, window[:, 1:].unsqueeze(-1)).squeeze(-1)

    def training_loss(
        self,
        view: TargetView,
        batch: SequenceBatch,
        weights: LossWeights,
        states_fn: Callable = block_states,
        compiled: bool = False,
        **ignored: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`weights.unary` x CE(E h) + `weights.conditional` x CE(the sum, given the true predecessor).

        The published loss has no unary part. Options of `block_loss` that concern the injection are ignored.
        """
        blocks = batch.cut(self.config.block_size)
        hidden = states_fn(self, view, batch.features, batch.anchors, blocks.predecessors, None).unary
        rows, _ = row_weights(blocks, weights, conditional=False)
        code = self.pair.code(hidden, blocks.predecessors.flatten())
        head = view.head_weight
        states = hidden.to(head.dtype)
        loss, hits = token_loss(
            states if weights.unary else None,
            states,
            head,
            blocks.labels.flatten(),
            rows * weights.unary,
            rows * weights.conditional,
            teacher_rows(batch, blocks, weights),
            weights,
            compiled=compiled,
            shape=view.logit_shape,
            extra=(code, self.pair.B),
        )
        parts = {"token_loss": loss.detach(), "conditional_accuracy": slot_accuracy(hits[1], blocks)}
        if weights.unary:
            parts["unary_accuracy"] = slot_accuracy(hits[0], blocks)
        return loss, parts


class DFlash2Drafter(PairDrafter):
    """DFlash2-style selector: S_t(a, b) = U_t(b) + <A[a] * H h_t, B[b]> over the K best of the unary logits U_t.

    Config field of its own: `detach_unary` (False). The K-way loss trains U as well, because what is drafted is the
    argmax of the sum: cut off, U would stay the marginal, and only rank-r products could carry the condition.
    """

    def _pair_width(self, config):
        return config.hidden_size

    def _candidates(self, hidden, logits, anchor_ids):
        return logits.topk(self.config.num_candidates, dim=-1).indices

    def training_loss(
        self,
        view: TargetView,
        batch: SequenceBatch,
        weights: LossWeights,
        states_fn: Callable = block_states,
        compiled: bool = False,
        **ignored: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`weights.unary` x CE(U) + `weights.conditional` x K-way CE(S given the true predecessor).

        The published loss weighs both alike. Distillation and total variation act on U alone.
        """
        blocks = batch.cut(self.config.block_size)
        hidden = states_fn(self, view, batch.features, batch.anchors, blocks.predecessors, None).unary
        rows, _ = row_weights(blocks, weights, conditional=False)
        labels, head = blocks.labels.flatten(), view.head_weight
        states = hidden.to(head.dtype)
        loss, hits = token_loss(
            states,
            None,
            head,
            labels,
            rows * weights.unary,
            None,
            teacher_rows(batch, blocks, weights),
            weights,
            compiled=compiled,
            shape=view.logit_shape,
        )
        candidates, place, covered = with_label(top_tokens(states, head, self.config.num_candidates), labels)
        scores = self.candidate_scores(head, hidden, blocks.predecessors.flatten(), candidates)
        choice = (F.cross_entropy(scores, place, reduction="none") * rows).sum()
        parts = {
            "token_loss": loss.detach(),
            "choice_loss": choice.detach(),
            "unary_accuracy": slot_accuracy(hits[0], blocks),
            "conditional_accuracy": slot_accuracy((scores.argmax(-1) == place) & covered, blocks),
            "coverage": slot_accuracy(covered, blocks),
        }
        return loss + weights.conditional * choice, parts

    def candidate_scores(
        self, head: torch.Tensor, hidden: torch.Tensor, previous: torch.Tensor, candidates: torch.Tensor
    ) -> torch.Tensor:
        """S of each row's candidates: hidden [n, d], previous [n], candidates [n, K] -> [n, K], fp32."""
        rows = F.embedding(candidates, head.detach())
        unary = torch.matmul(rows, hidden.to(rows.dtype).unsqueeze(-1)).squeeze(-1).float()
        if getattr(self.config, "detach_unary", False):
            unary = unary.detach()
        return unary + self.pair(hidden, previous.unsqueeze(1), candidates).squeeze(1)


@torch.no_grad()
def top_tokens(hidden: torch.Tensor, head: torch.Tensor, count: int, chunk: int = 2048) -> torch.Tensor:
    """The `count` best tokens of each row, best first: hidden [n, d], head [V, d] -> [n, count]."""
    parts = [(part @ head.T).topk(count, dim=-1).indices for part in hidden.detach().split(chunk)]
    return torch.cat(parts)


def with_label(candidates: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put each row's label into its candidates [n, K], in the last place, where it is missing.

    Returns the candidates, the label's place [n], and whether it was there already [n].
    """
    found = candidates == labels.unsqueeze(1)
    covered = found.any(-1)
    last = torch.where(covered, candidates[:, -1], labels)
    place = torch.where(covered, found.long().argmax(-1), candidates.shape[1] - 1)
    return torch.cat([candidates[:, :-1], last.unsqueeze(1)], dim=1), place, covered


def _builder(kind: type[DSpineDraftModel]) -> Callable[..., DSpineDraftModel]:
    def build(model: nn.Module, token_weights: torch.Tensor | None = None, **config_overrides: Any) -> Any:
        return kind.for_target(model, token_weights, **config_overrides)

    return build


BASELINES = {"dspark": _builder(DSparkDrafter), "dflash2": _builder(DFlash2Drafter), "eagle3": _builder(EagleDrafter)}
