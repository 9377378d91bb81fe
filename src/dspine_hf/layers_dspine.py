"""The drafter's layers: Qwen3-style attention and SwiGLU, and the gated adjacent injection of arXiv 2609.36173."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from .configuration_dspine import DSpineConfig
from .ops_dspine import EAGER, Ops, gated_injection, rotated
from .transfer_dspine import Fp32Buffers

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class DSpineRotaryEmbedding(Fp32Buffers, Qwen3RotaryEmbedding):
    """Rotary positions; a cast of the drafter leaves the frequencies in fp32, without which far positions drift."""


class ZeroLinear(nn.Linear):
    """A projection that starts at zero."""


@dataclass
class Limits:
    """What a block sees, for fused attention: a run of keys, the same for all of its rows.

    Args:
        attend: [`ops_dspine.verify_attention`], or the fused operation of that name.
        first, last: the first and the last visible key of every batch row [batch].
    """

    attend: Callable
    first: torch.Tensor
    last: torch.Tensor


class DSpineAttention(nn.Module):
    """Grouped-query attention with q/k norm and rotary positions; the block sees the context and all of itself."""

    def __init__(self, config: DSpineConfig):
        super().__init__()
        d, hd, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = hd
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = nn.Linear(d, config.num_attention_heads * hd, bias=bias)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * hd, bias=bias)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * hd, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * hd, d, bias=bias)
        self.q_norm = Qwen3RMSNorm(hd, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(hd, eps=config.rms_norm_eps)

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ops: Ops = EAGER) -> torch.Tensor:
        """Rotated queries: x [batch, rows, d], cos/sin [batch, rows, head_dim] -> [batch, heads, rows, head_dim]."""
        return _rotated(self.q_norm, self.q_proj(x), cos, sin, ops)

    def keys_values(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ops: Ops = EAGER
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values: each [batch, kv_heads, rows, head_dim]."""
        keys = _rotated(self.k_norm, self.k_proj(x), cos, sin, ops)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        limits: Limits | None = None,
    ) -> torch.Tensor:
        """Attend: q [batch, heads, rows, head_dim], k/v [batch, kv_heads, keys, head_dim] -> [batch, rows, d].

        mask: bool [batch, 1, rows, keys], True where a row may look; None: everywhere. limits: instead of a mask.
        """
        if limits is not None:
            last = limits.last[:, None].expand(-1, q.shape[2])
            out = limits.attend(q, k, v, limits.first, last).transpose(1, 2)
        elif torch.is_grad_enabled():
            if self.groups > 1:
                k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        else:  # heads that share keys are rows of one product, so that keys and values are not copied
            mask = None if mask is None else mask.repeat(1, 1, self.groups, 1)
            packed = q.unflatten(1, (-1, self.groups)).flatten(2, 3)  # [batch, kv_heads, groups * rows, head_dim]
            out = F.scaled_dot_product_attention(packed, k, v, attn_mask=mask)
            out = out.unflatten(2, (self.groups, -1)).permute(0, 3, 1, 2, 4)  # [batch, rows, kv_heads, groups, hd]
        return self.o_proj(out.flatten(2))


def normed(norm: Qwen3RMSNorm, x: torch.Tensor, ops: Ops = EAGER) -> torch.Tensor:
    """x [.., d] through a norm, by these operations; a module that stands in its place, as peft's do, runs itself."""
    if type(norm) is not Qwen3RMSNorm:
        return norm(x)
    return ops.rms_norm(x, norm.weight, norm.variance_epsilon)


def _rotated(norm: Qwen3RMSNorm, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ops: Ops) -> torch.Tensor:
    """The rotated heads of a projection x [batch, rows, heads * head_dim] behind their norm, see [`normed`]."""
    if type(norm) is not Qwen3RMSNorm:
        return rotated(norm(x.unflatten(-1, (-1, cos.shape[-1]))), cos, sin)
    return ops.rotated_heads(x, norm.weight, norm.variance_epsilon, cos, sin)


class DSpineInjection(nn.Module):
    """Gated adjacent injection: each slot's predicted feature is written into its successor."""

    def __init__(self, config: DSpineConfig):
        super().__init__()
        d, r = config.hidden_size, config.transfer_rank
        self.eps = config.rms_norm_eps
        self.norm = Qwen3RMSNorm(d, eps=config.rms_norm_eps)
        self.P = nn.Linear(d, r, bias=False)
        self.A = nn.Linear(d, r, bias=False)
        self.B = nn.Linear(r, r, bias=True)
        self.U = ZeroLinear(r, d, bias=False)

    def forward(
        self, h: torch.Tensor, anchor: torch.Tensor, forced: torch.Tensor | None = None, ops: Ops = EAGER
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write into slots 1..B-1 of h [.., B, d]; anchor is phi(anchor) [.., r].

        forced: messages [.., B-1, r] that replace the predicted ones where they are not NaN; always eager.
        Returns the new h and the features z [.., B-1, r] of slots 1..B-1.
        """
        if forced is not None:
            return gated_injection(h, anchor, *self._weights(), self.eps, forced)
        return ops.gated_injection(h, anchor, *self._weights(), self.eps)

    def _weights(self) -> Weights:
        """w, P, A, B, b, U, as the operations take them."""
        return (self.norm.weight, self.P.weight, self.A.weight, self.B.weight, self.B.bias, self.U.weight)

    def write(self, h: torch.Tensor, s: torch.Tensor, ops: Ops = EAGER) -> torch.Tensor:
        """The write alone: h [batch, blocks, slots, n or 1, d], n messages s a slot [.., n, r] -> [.., n, d]."""
        w, _, A, B, b, U = self._weights()
        if h.shape[-2] == s.shape[-2]:  # every message has a state of its own
            states, messages = h.flatten(2, 3), s.flatten(2, 3).unsqueeze(3)
        else:
            states, messages = h.squeeze(3), s
        out = ops.pair_write(states.flatten(0, 1), w, self.eps, messages.flatten(0, 1), A, B, b, U)
        return out.reshape(*s.shape[:-1], -1)


class DSpineLayer(nn.Module):
    """One pre-norm layer: attention, SwiGLU, and the injection where the config places it."""

    def __init__(self, config: DSpineConfig, layer_idx: int):
        super().__init__()
        self.inner_write = config.injection_placement == "mlp"
        self.self_attn = DSpineAttention(config)
        self.mlp = Qwen3MLP(config)
        self.swiglu = config.hidden_act in ("silu", "swish")
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.injection = DSpineInjection(config) if config.injects(layer_idx) else None

    def feed_forward(self, h: torch.Tensor, ops: Ops = EAGER) -> torch.Tensor:
        """The SwiGLU half with its residual."""
        x, mlp = normed(self.post_attention_layernorm, h, ops), self.mlp
        if not self.swiglu or type(mlp) is not Qwen3MLP:  # another activation, or what stands in its place
            return h + mlp(x)
        return h + mlp.down_proj(ops.swiglu(mlp.gate_proj(x), mlp.up_proj(x)))

    def write(self, h: torch.Tensor, s: torch.Tensor, ops: Ops = EAGER) -> torch.Tensor:
        """From the state before the write to the layer's output, with the messages s."""
        assert self.injection is not None, "only a layer with an injection is written to"
        h = self.injection.write(h, s, ops)
        return self.feed_forward(h, ops) if self.inner_write else h
