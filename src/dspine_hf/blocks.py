"""Many blocks per sequence in one pass: anchors, labels, the attention mask by block, and the training pass."""

from dataclasses import dataclass

import torch

from .modeling_dspine import DSpineDraftModel, DSpineOutput
from .target_dspine import TargetView


@dataclass
class Blocks:
    """Blocks cut from sequences, for a drafter with B slots.

    anchors: index of each block's anchor in its sequence [batch, blocks].
    labels: the true tokens of slots 1..B-1 [batch, blocks, B-1].
    predecessors: the true token before each of those [batch, blocks, B-1]; slot 1's is the anchor.
    valid: which labels exist [batch, blocks, B-1]; False past the end of a sequence and in unused blocks.
    """

    anchors: torch.Tensor
    labels: torch.Tensor
    predecessors: torch.Tensor
    valid: torch.Tensor

    @property
    def label_positions(self) -> torch.Tensor:
        """Index of each label in its sequence, clamped to it [batch, blocks, B-1]."""
        return self.anchors.unsqueeze(-1) + torch.arange(1, self.labels.shape[-1] + 1, device=self.anchors.device)


def sample_anchors(
    prompt_lengths: torch.Tensor,
    lengths: torch.Tensor,
    count: int,
    generator: torch.Generator | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """`count` anchors per sequence, spread over its response with a random offset: [batch, count].

    An anchor is a response token with at least one token after it. A sequence without one gets anchor 0, whose labels
    [`cut_blocks`] marks invalid.

    offsets: numbers in [0, 1) [batch, count] to place the anchors by; None: drawn afresh.
    """
    device = lengths.device
    if offsets is None:
        offsets = torch.rand(lengths.shape[0], count, generator=generator, device=device)
    spans = (lengths - 1 - prompt_lengths).clamp_min(0).unsqueeze(1)
    places = ((torch.arange(count, device=device) + offsets) / count * spans).long()
    anchors = prompt_lengths.unsqueeze(1) + places.clamp_max((spans - 1).clamp_min(0))
    return torch.where(spans > 0, anchors, torch.zeros_like(anchors))


def cut_blocks(
    tokens: torch.Tensor, prompt_lengths: torch.Tensor, lengths: torch.Tensor, anchors: torch.Tensor, block_size: int
) -> Blocks:
    """Cut the blocks that start at `anchors` [batch, blocks] out of `tokens` [batch, length]."""
    steps = torch.arange(block_size, device=tokens.device)
    places = anchors.unsqueeze(-1) + steps  # [batch, blocks, B]
    valid = (places[..., 1:] < lengths.view(-1, 1, 1)) & (anchors >= prompt_lengths.unsqueeze(1)).unsqueeze(-1)
    window = tokens.gather(1, places.clamp_max(tokens.shape[1] - 1).flatten(1)).view_as(places)
    return Blocks(anchors, window[..., 1:], window[..., :-1], valid)


def block_attention_mask(
    anchors: torch.Tensor, context: int, block_size: int, window: int | None = None
) -> torch.Tensor:
    """True where a slot may look: context rows before its anchor, and its own block.

    Returns bool [batch, blocks * B, context + blocks * B].
    """
    batch, blocks = anchors.shape
    rows = torch.arange(context, device=anchors.device)
    seen = rows < anchors.unsqueeze(-1)  # [batch, blocks, context]
    if window is not None:
        seen &= rows >= anchors.unsqueeze(-1) - window
    own = torch.eye(blocks, dtype=torch.bool, device=anchors.device)
    own = own.repeat_interleave(block_size, 0).repeat_interleave(block_size, 1)
    return torch.cat([seen.repeat_interleave(block_size, 1), own.expand(batch, -1, -1)], dim=-1)


def run_blocks(
    drafter: DSpineDraftModel,
    view: TargetView,
    features: torch.Tensor,
    anchors: torch.Tensor,
    anchor_ids: torch.Tensor,
    forced_messages: torch.Tensor | list[torch.Tensor | None] | None = None,
) -> DSpineOutput:
    """One backbone pass over all blocks of a batch of sequences.

    Args:
        features: the target's hidden states [batch, length, len(target_layer_ids) * d]; row i belongs to token i.
        anchors: index of each block's anchor [batch, blocks]; anchor_ids: those tokens [batch, blocks].
        forced_messages: as in [`DSpineDraftModel.forward`].
    """
    config = drafter.config
    length = features.shape[1]
    cache = drafter.new_cache(window=None)
    positions = torch.arange(length, device=features.device).expand(features.shape[0], -1)
    drafter.extend_context(cache, features, positions)
    block_positions = anchors.unsqueeze(-1) + torch.arange(config.block_size, device=anchors.device)
    mask = block_attention_mask(anchors, length, config.block_size, config.context_window)
    embeds = drafter.block_embeds(view, anchor_ids, config.num_draft_slots)
    return drafter(embeds, view.phi(anchor_ids), block_positions, cache, mask, forced_messages)
