"""One training step's loss: blocks through the drafter, both streams through the frozen head, z against the truth."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .blocks import Blocks, cut_blocks, run_blocks
from .losses import LossWeights, feature_loss, slot_weights, token_loss
from .modeling_dspine import DSpineDraftModel
from .rewrite_dspine import told_states
from .target_dspine import TargetView


@dataclass
class SequenceBatch:
    """Sequences with the target's states: tokens [batch, length], lengths and prompt_lengths [batch].

    features: hidden states after `target_layer_ids`, concatenated [batch, length, len(ids) * d].
    final: the target's normed last states [batch, length, d]; only distillation needs them.
    anchors: [batch, blocks].
    forcing: where the true predecessor's message is forced [batch, blocks, B-1]; None: drawn, if at all.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor
    features: torch.Tensor
    anchors: torch.Tensor
    final: torch.Tensor | None = None
    forcing: torch.Tensor | None = None

    def cut(self, block_size: int) -> Blocks:
        """The blocks of B = `block_size` slots that start at the anchors."""
        return cut_blocks(self.tokens, self.prompt_lengths, self.lengths, self.anchors, block_size)


@dataclass
class BlockStates:
    """Rows [n, d] of both streams (n = batch * blocks * (B-1)), and z per layer [n, r]."""

    unary: torch.Tensor
    conditional: torch.Tensor | None
    features: tuple[torch.Tensor, ...]


def block_states(
    drafter: DSpineDraftModel,
    view: TargetView,
    features: torch.Tensor,
    anchors: torch.Tensor,
    predecessors: torch.Tensor,
    forcing: torch.Tensor | None = None,
) -> BlockStates:
    """Both streams of every slot: unary (predicted messages) and conditional (the true predecessor's, or with
    `chain_passes` the true prefix's).

    Args:
        forcing: bool [batch, blocks, B-1]; True where the true predecessor's phi replaces the predicted message at
            every layer (teacher forcing; all True is the oracle).
    """
    messages = view.phi(predecessors)  # [batch, blocks, B-1, r]
    forced = None
    if forcing is not None:
        forced = torch.where(forcing.unsqueeze(-1), messages, torch.full_like(messages, float("nan")))
    out = run_blocks(drafter, view, features, anchors, predecessors[..., 0], forced)
    unary = drafter.norm(out.hidden[:, :, 1:])
    conditional = None
    if drafter.config.selection == "transition":
        conditional = told_states(drafter, out.rewrite, messages).flatten(0, 2)
    return BlockStates(unary.flatten(0, 2), conditional, tuple(z.flatten(0, 2) for z in out.features))


def row_weights(blocks: Blocks, weights: LossWeights, conditional: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-row weights of the unary and the conditional cross-entropy, each [n]; they sum to the terms' weights.

    Slot 1's streams are one and the same, so its rows carry both weights on the unary stream.
    """
    decay = slot_weights(blocks.labels.shape[-1] + 1, weights.gamma, blocks.labels.device)
    base = blocks.valid * decay
    base = base / base.sum().clamp_min(1e-6)
    if not conditional:
        return base.flatten(), base.flatten()
    first = (torch.arange(len(decay), device=decay.device) == 0).to(decay.dtype)
    unary = base * (weights.unary + weights.conditional * first)
    return unary.flatten(), (base * weights.conditional * (1 - first)).flatten()


def teacher_rows(batch: SequenceBatch, blocks: Blocks, weights: LossWeights) -> torch.Tensor | None:
    """The target's normed last state at every slot's predecessor [n, d]; None when no term of the loss reads it."""
    if batch.final is None or not (weights.distill or weights.total_variation):
        return None
    places = (blocks.label_positions - 1).clamp_max(batch.tokens.shape[1] - 1).flatten(1)
    return batch.final.gather(1, places.unsqueeze(-1).expand(-1, -1, batch.final.shape[-1])).flatten(0, 1)


def training_loss(
    drafter: DSpineDraftModel, view: TargetView, batch: SequenceBatch, weights: LossWeights, **options: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss that this drafter is trained with: its own `training_loss` where it has one, else [`block_loss`]."""
    own = getattr(drafter, "training_loss", None)
    if own is not None:
        return own(view, batch, weights, **options)
    return block_loss(drafter, view, batch, weights, **options)


def block_loss(
    drafter: DSpineDraftModel,
    view: TargetView,
    batch: SequenceBatch,
    weights: LossWeights,
    forcing_probability: float = 0.0,
    states_fn: Callable[..., Any] = block_states,
    compiled: bool = False,
    negatives: int = 2048,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one batch, and its parts.

    Args:
        forcing_probability: chance that a slot's message is the true predecessor's (teacher forcing).
        states_fn: `block_states` or a compiled copy of it.
        compiled: compile the head's part too.
        negatives: sampled tokens of the contrastive layer loss.

    Returns:
        The loss, and {"token_loss", "layer_loss", "unary_accuracy", "conditional_accuracy"}: scalars, and accuracies
        per slot [B-1] (teacher-forced).
    """
    config = drafter.config
    blocks = batch.cut(config.block_size)
    forcing = batch.forcing
    if forcing is None and forcing_probability > 0:
        forcing = torch.rand(blocks.labels.shape, device=blocks.labels.device) < forcing_probability
    states = states_fn(drafter, view, batch.features, batch.anchors, blocks.predecessors, forcing)
    labels = blocks.labels.flatten()
    unary_rows, conditional_rows = row_weights(blocks, weights, states.conditional is not None)
    head = view.head_weight
    loss, hits = token_loss(
        states.unary.to(head.dtype),
        None if states.conditional is None else states.conditional.to(head.dtype),
        head,
        labels,
        unary_rows,
        conditional_rows,
        teacher_rows(batch, blocks, weights),
        weights,
        compiled=compiled,
        shape=view.logit_shape,
    )
    parts = {"token_loss": loss.detach(), **_accuracies(hits, blocks, states.conditional is not None)}
    if states.features and weights.layer:
        layer = _layer_term(view, states, blocks, labels, weights, negatives)
        parts["layer_loss"] = layer.detach()
        loss = loss + weights.layer * layer
    return loss, parts


def _layer_term(
    view: TargetView, states: BlockStates, blocks: Blocks, labels: torch.Tensor, weights: LossWeights, negatives: int
) -> torch.Tensor:
    decay = slot_weights(blocks.labels.shape[-1] + 1, weights.gamma, labels.device)
    rows = blocks.valid * decay
    rows = (rows / rows.sum().clamp_min(1e-6)).flatten()
    sampled = ids = None
    if weights.layer_loss == "contrast":
        drawn = labels[torch.randint(labels.shape[0], (negatives // 2,), device=labels.device)]
        uniform = torch.randint(view.head_weight.shape[0], (negatives // 2,), device=labels.device)
        ids = torch.cat([drawn, uniform])
        sampled = view.phi(ids)
    return feature_loss(states.features, view.phi(labels), rows, weights, labels, sampled, ids)


def slot_accuracy(hits: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Share of valid rows that hit, per slot: hits [n] -> [B-1]."""
    valid = blocks.valid.flatten(0, 1).float()
    return (hits.view_as(valid).float() * valid).sum(0) / valid.sum(0).clamp_min(1)


def _accuracies(hits: torch.Tensor, blocks: Blocks, conditional: bool) -> dict[str, torch.Tensor]:
    unary = slot_accuracy(hits[0], blocks)
    if not conditional:
        return {"unary_accuracy": unary}
    return {
        "unary_accuracy": unary,
        "conditional_accuracy": torch.cat([unary[:1], slot_accuracy(hits[1], blocks)[1:]]),
    }
