"""An EAGLE-3-style drafter to compare with: one autoregressive layer, trained on its own states."""

import functools
from typing import Any

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .configuration_dspine import DSpineConfig, spread_layer_ids
from .layers_dspine import DSpineLayer, normed
from .losses import LossWeights, token_loss
from .modeling_dspine import DraftBlock, DSpineDraftModel
from .objective import SequenceBatch, row_weights, slot_accuracy, teacher_rows
from .ops_dspine import EAGER, Ops
from .target_dspine import TargetView


class EagleLayer(DSpineLayer):
    """One decoder layer whose attention reads [token embedding ; feature], normed; the feature is the residual."""

    def __init__(self, config: DSpineConfig):
        super().__init__(config, 0)
        d = config.hidden_size
        self.hidden_norm = Qwen3RMSNorm(d, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * d, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)

    def joined(self, embeds: torch.Tensor, features: torch.Tensor, ops: Ops = EAGER) -> torch.Tensor:
        """What the attention reads: embeds and features [.., d] -> [.., 2d]."""
        return torch.cat([normed(self.input_layernorm, embeds, ops), normed(self.hidden_norm, features, ops)], dim=-1)


class EagleDrafter(DSpineDraftModel):
    """EAGLE-3-style: one layer over the text's tokens and the target's fused features, drafting token by token.

    The row of token i reads its embedding and the feature of the row before it: the target's, fused by `fc`, up to the
    anchor; the drafter's own last state after it, in training too (training-time test over B-1 steps).
    """

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        layer = EagleLayer(config)
        layer.apply(self._init_weights)
        self.layers = nn.ModuleList([layer])
        self.mask_embedding = None

    @classmethod
    def for_target(
        cls, model: nn.Module, token_weights: torch.Tensor | None = None, **config_overrides: Any
    ) -> DSpineDraftModel:
        """As [`DSpineDraftModel.for_target`], with one layer that reads the features a 5-layer drafter would."""
        text = model.config.get_text_config(decoder=True)
        values = {"target_layer_ids": spread_layer_ids(text.num_hidden_layers, 5), **config_overrides}
        values |= {"injection": "none", "selection": "independent", "num_hidden_layers": 1}
        return super().for_target(model, token_weights, **values)

    def draft_block(self, *args: Any, **options: Any) -> DraftBlock:
        """Not supported: it drafts token by token, and is measured by [`offline.offline_walk`]."""
        raise NotImplementedError("an EAGLE-3-style drafter has no block pass: measure it with offline.offline_walk.")

    def unroll(
        self,
        view: TargetView,
        features: torch.Tensor,
        tokens: torch.Tensor,
        anchors: torch.Tensor,
        predecessors: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """B-1 steps from every anchor.

        Args:
            features: [batch, length, len(target_layer_ids) * d]; tokens: [batch, length]; anchors: [batch, blocks].
            predecessors: the tokens fed at each step [batch, blocks, B-1]; None: the drafter's own greedy choices.

        Returns:
            Normed states [batch, blocks, B-1, d], and each step's successor [batch, blocks, B-1]: the greedy choice,
            or the token fed at that step when predecessors are given.
        """
        layer, (batch, blocks), length, ops = self.layers[0], anchors.shape, tokens.shape[1], self.ops
        fused = normed(self.hidden_norm, self.fc(features.to(self.fc.weight.dtype)), ops)
        shifted = torch.cat([torch.zeros_like(fused[:, :1]), fused[:, :-1]], dim=1)  # row i: the feature of i - 1
        places = torch.arange(length, device=tokens.device)
        context = layer.joined(view.embed(tokens), shifted, ops)
        cos, sin = self.rotary_emb(context, places.expand(batch, -1))
        keys, values = layer.self_attn.keys_values(context, cos, sin, ops)
        seen = places < anchors.unsqueeze(-1)  # [batch, blocks, length]
        own = torch.eye(blocks, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        state = shifted.gather(1, anchors.unsqueeze(-1).expand(-1, -1, shifted.shape[-1]))
        token, states, chosen = tokens.gather(1, anchors), [], []
        for step in range(self.config.num_draft_slots):
            token = token if predecessors is None else predecessors[..., step]
            x = layer.joined(view.embed(token), state, ops)
            cos, sin = self.rotary_emb(x, anchors + step)
            k, v = layer.self_attn.keys_values(x, cos, sin, ops)
            keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
            mask = torch.cat([seen, own.repeat(1, 1, step + 1)], dim=-1).unsqueeze(1)
            q = layer.self_attn.queries(x, cos, sin, ops)
            state = state + layer.self_attn(q, keys, values, mask)
            state = layer.feed_forward(state, ops)
            states.append(normed(self.norm, state, ops))
            if predecessors is None:
                token = view.logits(states[-1]).argmax(-1)
            chosen.append(token)
        return torch.stack(states, dim=2), torch.stack(chosen, dim=2)

    def training_loss(
        self,
        view: TargetView,
        batch: SequenceBatch,
        weights: LossWeights,
        compiled: bool = False,
        **ignored: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The cross-entropy of every step, fed with the true tokens and its own states; only slot weights matter."""
        blocks = batch.cut(self.config.block_size)
        unroll = _compiled_unroll() if compiled else EagleDrafter.unroll
        states, _ = unroll(self, view, batch.features, batch.tokens, batch.anchors, blocks.predecessors)
        rows, _ = row_weights(blocks, weights, conditional=False)
        head = view.head_weight
        loss, hits = token_loss(
            None,
            states.flatten(0, 2).to(head.dtype),
            head,
            blocks.labels.flatten(),
            None,
            rows,
            teacher_rows(batch, blocks, weights),
            weights,
            compiled=compiled,
            shape=view.logit_shape,
        )
        return loss, {"token_loss": loss.detach(), "conditional_accuracy": slot_accuracy(hits[1], blocks)}


@functools.cache
def _compiled_unroll() -> Any:
    """Made when it is first asked for: torch.compile imports its backend at once, which takes seconds."""
    return torch.compile(EagleDrafter.unroll, dynamic=False)
