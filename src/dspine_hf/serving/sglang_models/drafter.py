"""The DSpine drafter on SGLang's layers: a DFlash drafter with injection and a lattice of its own.

The candidates of a slot attend through the block's own attention metadata: one call per candidate rank, in which each
slot's query is that of its candidate. So every attention backend and CUDA graph that runs the block runs the pairs.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.models.dflash import (
    CandidateSelector,
    DFlash2DraftModel,
    DFlashAttention,
    DFlashDecoderLayer,
    DFlashDraftModel,
)
from sglang.srt.runtime_context import get_parallel
from torch import nn

from ...configuration_dspine import DSpineConfig
from ...layers_dspine import DSpineInjection
from ...transfer_dspine import TransferSpace
from ..tensors import drafter_tensors

# How SGLang stacks the checkpoint's projections.
STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
STACKED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


class DSpineAttention(DFlashAttention):
    """DFlash's attention, which keeps the block's keys and values for the pairs of the same pass."""

    block: tuple[torch.Tensor, torch.Tensor] | None = None

    def _queries(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = self.q_norm(q.reshape(-1, self.head_dim)).view(q.shape)
        k = self.k_norm(k.reshape(-1, self.head_dim)).view(k.shape)
        return self.rotary_emb(positions, q, k)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        """The block's own rows [rows, d]; their keys and values go to the cache."""
        sizes = [self.q_size, self.kv_size, self.kv_size]
        q, k, v = (t.contiguous() for t in self.qkv_proj(hidden_states)[0].split(sizes, dim=-1))
        q, k = self._queries(positions, q, k)
        self.block = (k, v)
        return self.o_proj(self.attn(q, k, v, forward_batch))[0]

    def attend_pairs(self, positions: torch.Tensor, x: torch.Tensor, forward_batch: Any, slots: int) -> torch.Tensor:
        """Candidates of the last n of `slots` slots: positions [blocks, n], x [blocks, n, K, d] -> same shape as x."""
        assert self.block is not None, "the block runs before its pairs"
        blocks, n, ranks, _ = x.shape
        rows = self.qkv_proj(x.flatten(0, 2))[0][..., : self.q_size + self.kv_size]
        q, k = (t.contiguous() for t in rows.split([self.q_size, self.kv_size], dim=-1))
        q, _ = self._queries(positions.unsqueeze(-1).expand(-1, -1, ranks).reshape(-1), q, k)
        q = F.pad(q.view(blocks, n, -1), (0, 0, slots - n, 0)).view(blocks, slots, ranks, -1)
        out = [
            self.attn(q[:, :, rank].reshape(blocks * slots, -1), *self.block, forward_batch, save_kv_cache=False)
            for rank in range(ranks)
        ]
        stacked = torch.stack([o.reshape(blocks, slots, -1)[:, slots - n :] for o in out], dim=2)
        return self.o_proj(stacked.flatten(0, 2))[0].view(x.shape)


class DSpineDecoderLayer(DFlashDecoderLayer):
    """DFlash's layer with the injection where the config places it; the residual stream is one tensor."""

    attention_cls = DSpineAttention

    def __init__(self, config: DSpineConfig, layer_id: int, **kwargs: Any):
        super().__init__(config, layer_id, **kwargs)
        self.inner_write = config.injection_placement == "mlp"
        self.injection = DSpineInjection(config) if config.injects(layer_id) else None

    def attend(self, positions: torch.Tensor, h: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        """The attention half with its residual: h [rows, d]."""
        return h + self.self_attn(positions, self.input_layernorm(h), forward_batch)

    def attend_pairs(self, positions: torch.Tensor, h: torch.Tensor, forward_batch: Any, slots: int) -> torch.Tensor:
        """The same for candidate pairs, which write no keys and values: h [blocks, n, K, d]."""
        x = self.input_layernorm(h.flatten(0, 2)).view(h.shape)
        return h + self.self_attn.attend_pairs(positions, x, forward_batch, slots)

    def feed_forward(self, h: torch.Tensor) -> torch.Tensor:
        """The SwiGLU half with its residual: h [.., d]."""
        rows = h.flatten(0, -2)
        return h + self.mlp(self.post_attention_layernorm(rows)).view(h.shape)

    def write(self, h: torch.Tensor, messages: torch.Tensor) -> torch.Tensor:
        """From the state before the write to the layer's output, with messages [blocks, n, K, r].

        h: [blocks, n, K or 1, d]. Returns [blocks, n, K, d].
        """
        assert self.injection is not None, "only a layer with an injection is written to"
        h = self.injection.write(h.unsqueeze(0), messages.unsqueeze(0))[0]
        return self.feed_forward(h) if self.inner_write else h


class PairSelector(CandidateSelector):
    """SGLang's selector, which walks and samples; its lattice holds the scores that the drafter's pass computed."""

    def __init__(self, top_k: int):
        nn.Module.__init__(self)
        self.top_k = top_k
        self.scores: torch.Tensor | None = None  # [blocks, slots - 1, K_prev, K]

    def build_lattice(
        self,
        *,
        candidate_ids: torch.Tensor,
        unary_logits: torch.Tensor,
        hidden_states: torch.Tensor,
        anchor_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Scores [blocks, slots - 1, K_prev, K] of the last pass; without one, each slot alone."""
        blocks = candidate_ids.shape[0]
        if self.scores is not None and self.scores.shape[0] >= blocks:
            return self.scores[:blocks]
        return unary_logits.unsqueeze(2).expand(-1, -1, self.top_k, -1)


class DSpineDraftModel(DFlashDraftModel):
    """What SGLang's DFLASH worker loads for the architecture of a DSpine checkpoint."""

    decoder_layer_cls = DSpineDecoderLayer
    candidates: tuple[torch.Tensor, torch.Tensor] | None = None
    _transform_unary_logits = DFlash2DraftModel._transform_unary_logits

    def __init__(self, config: DSpineConfig, quant_config: Any = None, prefix: str = ""):
        refuse_what_is_not_supported(config, quant_config)
        super().__init__(config=config, quant_config=quant_config, prefix=prefix)
        self.transfer = TransferSpace(config.transfer_rank, config.hidden_size, config.rms_norm_eps)
        learned = config.mask_token_id is None
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size), requires_grad=False) if learned else None
        self.candidate_selector = PairSelector(config.num_candidates)
        self.rewritten = config.num_hidden_layers - 1 - config.rewrite_layers
        self.lm_head: Any = None

    def attach_target(self, target: nn.Module) -> None:
        """Borrow the target's output embedding, which the injection reads from the first pass on."""
        self.lm_head = target.lm_head

    def set_block_size(self, block_size: int) -> None:
        """Adopt the worker's block size. Raises ValueError if the drafter was trained for less."""
        if block_size > self.config.block_size:
            raise ValueError(
                f"this drafter was trained for blocks of {self.config.block_size}; found {block_size}. Set "
                f"--speculative-num-draft-tokens to at most {self.config.block_size}."
            )
        super().set_block_size(block_size)

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Output-embedding rows E[ids]: [..] -> [.., d]."""
        return F.embedding(ids, self.lm_head.weight)

    def embed_block(self, embeds: torch.Tensor) -> torch.Tensor:
        """The worker's embeddings of anchors and mask tokens [rows, d], with the learned mask where there is one."""
        if self.mask_embedding is None:
            return embeds
        drafted = (torch.arange(embeds.shape[0], device=embeds.device) % self.block_size > 0).unsqueeze(-1)
        return torch.where(drafted, self.mask_embedding.to(embeds.dtype), embeds)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: Any = None,
    ) -> LogitsProcessorOutput:
        """Run the blocks [rows] and score their candidate pairs; returns normed states [rows, d]."""
        if input_embeds is None or self.lm_head is None:
            raise ValueError(
                "expected the target's embeddings and head; found none. Start with --speculative-algorithm DFLASH, "
                "and leave the plug-in 'dspine' on."
            )
        slots = self.block_size
        anchors = self.transfer(self.head_rows(input_ids[::slots]))
        h, state = self.embed_block(input_embeds), None
        for i, layer in enumerate(self.layers):
            h = layer.attend(positions, h, forward_batch)
            if not layer.inner_write:
                h = layer.feed_forward(h)
            if i == self.rewritten:
                state = h.view(-1, slots, h.shape[-1])
            if layer.injection is not None:
                h = layer.injection(h.view(-1, slots, h.shape[-1]), anchors)[0].flatten(0, 1)
            if layer.inner_write:
                h = layer.feed_forward(h)
        hidden = self.norm(h)
        if len(h):
            self._score(hidden.view(-1, slots, h.shape[-1]), state, positions.view(-1, slots), forward_batch)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    def _score(self, hidden: torch.Tensor, state: Any, positions: torch.Tensor, forward_batch: Any) -> None:
        """Candidates of every slot and the lattice over them, kept for the worker's next two calls."""
        blocks, slots, _ = hidden.shape
        ids, unary = DFlash2DraftModel.compute_candidates(self, hidden[:, 1:].flatten(0, 1))
        self.candidates = (ids, unary)
        ids, unary = (t.view(blocks, slots - 1, -1) for t in self.candidates)
        lattice = unary.unsqueeze(2).expand(-1, -1, unary.shape[-1], -1)
        if self.config.selection == "transition" and slots > 2:
            pairs = self._pair_scores(state[:, 2:], positions[:, 2:], ids, forward_batch, slots)
            lattice = torch.cat([lattice[:, :1], pairs], dim=1)
        self.candidate_selector.scores = lattice.contiguous()

    def _pair_scores(
        self, state: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor, forward_batch: Any, slots: int
    ) -> torch.Tensor:
        """Scores of slots 2.. given their predecessor's candidates.

        Args:
            state: [blocks, n, d] before the write that is done again; positions: [blocks, n].
            ids: candidates of slots 1.. [blocks, n + 1, K].

        Returns:
            [blocks, n, K_prev, K].
        """
        messages = self.transfer(self.head_rows(ids[:, :-1]))
        h = self.layers[self.rewritten].write(state.unsqueeze(2), messages)
        for layer in self.layers[self.rewritten + 1 :]:
            h = layer.attend_pairs(positions, h, forward_batch, slots)
            h = layer.write(h if layer.inner_write else layer.feed_forward(h), messages)
        h = self.norm(h.flatten(0, 2)).view(h.shape)
        rows = self.head_rows(ids[:, 1:])
        return self._transform_unary_logits(torch.matmul(h.to(rows.dtype), rows.transpose(-1, -2)))

    def compute_candidates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and unary logits [n, K] of the drafted slots: those of the last pass, if it had as many."""
        if self.candidates is not None and self.candidates[0].shape[0] >= hidden.shape[0]:
            return tuple(t[: hidden.shape[0]] for t in self.candidates)  # type: ignore[return-value]
        return DFlash2DraftModel.compute_candidates(self, hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a DSpine checkpoint. Raises ValueError for a missing, superfluous or misshapen tensor."""
        tensors = drafter_tensors(self.config, weights)
        tensors.pop("fingerprint")
        for name in ("W", "c"):
            getattr(self.transfer, name).copy_(tensors.pop(f"transfer.{name}"))
        named = {_stacked(name) for name in tensors}
        own = {name for name, _ in self.named_parameters() if not name.startswith("lm_head.")}
        if named != own:
            raise ValueError(
                f"expected a tensor for each parameter of SGLang's layers; without: {', '.join(sorted(own - named))}; "
                f"unknown: {', '.join(sorted(named - own))}. This version of SGLang builds DFlash layers differently."
            )
        super().load_weights(tensors.items())


def _stacked(name: str) -> str:
    """A checkpoint's tensor name as SGLang's parameter name."""
    return ".".join(STACKED.get(part, part) for part in name.split("."))


def refuse_what_is_not_supported(config: Any, quant_config: Any) -> None:
    """Raise ValueError, naming the cure, for settings under which the drafts would be wrong."""
    if not isinstance(config, DSpineConfig):
        raise ValueError(
            f"expected a DSpine drafter (model_type 'dspine'); found {type(config).__name__}. Name the folder that "
            "'dspine export' wrote."
        )
    problems = (
        (get_parallel().tp_size > 1, "a DSpine drafter runs on one device: set --tp-size to 1."),
        (quant_config is not None, "a DSpine drafter is not quantised: leave its quantisation out."),
        (
            config.context_window is not None,
            f"context_window={config.context_window} is not supported with SGLang; use the drafter in Transformers.",
        ),
        (
            config.chain_passes > 0,
            f"chain_passes={config.chain_passes} is not supported with SGLang; use the drafter in Transformers.",
        ),
        (
            config.embedding_scale != 1.0,
            f"embedding_scale={config.embedding_scale} is not supported with SGLang; use the drafter in Transformers.",
        ),
    )
    for wrong, message in problems:
        if wrong:
            raise ValueError(message)


EntryClass = DSpineDraftModel
