"""The DSpine drafter on vLLM's layers: a DFlash drafter with injection, whose pair scores decide the draft.

vLLM runs the block with `forward`, which scores all candidate pairs at once. Who walks them is the
exported folder's choice. By default `compute_logits` does, greedily: a row holds the scores of its slot's candidates
given the best predecessor, and -inf elsewhere. At T > 0 that is a valid proposal, since vLLM verifies against the row
it sampled from. In a folder exported with `engine_walk` vLLM does, as for a DFlash2 drafter: `compute_candidates` and
`candidate_selector` hand it the candidates and their scores for every predecessor. With
`"draft_sample_method": "probabilistic"` it then samples the chain: every row is conditioned on the token drawn.
"""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.qwen3_dflash import (
    DFlashQwen3DecoderLayer,
    DFlashQwen3ForCausalLM,
    DFlashQwen3Model,
)

from ..configuration_dspine import DSpineConfig
from ..layers_dspine import DSpineInjection
from ..transfer_dspine import TransferSpace
from .tensors import drafter_tensors
from .vllm_attention import PairQueries
from .walk import lattice, realised_scores


def drafter_config(hf_config: Any) -> DSpineConfig:
    """The DSpineConfig inside vLLM's config of a drafter. Raises ValueError if there is none."""
    inner = getattr(hf_config, "model", hf_config)
    if not isinstance(inner, DSpineConfig):
        raise ValueError(
            f"expected a DSpine drafter (model_type 'dspine'); found {type(inner).__name__}. Name the folder that "
            "'dspine export' wrote."
        )
    return inner


class DSpineDecoderLayer(DFlashQwen3DecoderLayer):
    """DFlash's layer with the injection where the config places it; the residual stream is one tensor."""

    def __init__(self, vllm_config: VllmConfig, *, config: Any, layer_idx: int, **kwargs: Any):
        super().__init__(vllm_config, config=config, layer_idx=layer_idx, **kwargs)
        own = drafter_config(config)
        self.inner_write = own.injection_placement == "mlp"
        self.injection = DSpineInjection(own) if own.injects(layer_idx) else None

    def attend(self, positions: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """The attention half with its residual: h [rows, d]."""
        return h + self.self_attn(positions=positions, hidden_states=self.input_layernorm(h))

    def attend_pairs(self, positions: torch.Tensor, h: torch.Tensor, pairs: PairQueries) -> torch.Tensor:
        """The same for candidate pairs, which see the block's keys and values and write none: h [pairs, d]."""
        attention = self.self_attn
        q = attention.qkv_proj(self.input_layernorm(h))[0][..., : attention.q_size]
        q = attention.q_norm(q.reshape(-1, attention.head_dim)).view(-1, attention.q_size)
        q, _ = attention.rotary_emb(positions, q, None)
        return h + attention.o_proj(pairs.attend(attention.attn, q))[0]

    def feed_forward(self, h: torch.Tensor) -> torch.Tensor:
        """The SwiGLU half with its residual."""
        return h + self.mlp(self.post_attention_layernorm(h))

    def write(self, h: torch.Tensor, messages: torch.Tensor) -> torch.Tensor:
        """From the state before the write to the layer's output, for every message.

        Shapes: h [blocks, n, K or 1, d], messages [blocks, n, K, r]. Returns the pairs as rows [blocks * n * K, d].
        """
        assert self.injection is not None, "only a layer with an injection is written to"
        h = self.injection.write(h.unsqueeze(0), messages.unsqueeze(0)).flatten(0, 3)
        return self.feed_forward(h) if self.inner_write else h


class DSpineModel(DFlashQwen3Model):
    """The backbone: blocks of `slots` rows each, one block per request."""

    decoder_layer_cls = DSpineDecoderLayer

    def __init__(self, *, vllm_config: VllmConfig, **kwargs: Any):
        super().__init__(vllm_config=vllm_config, **kwargs)
        own = drafter_config(self.config)
        self.transfer = TransferSpace(own.transfer_rank, own.hidden_size, own.rms_norm_eps)
        self.embedding_scale = own.embedding_scale
        self.learned_mask = own.mask_token_id is None
        self.rewritten = own.num_hidden_layers - 1 - own.rewrite_layers
        self.lattice: torch.Tensor | None = None  # scores that the engine walks: [blocks, slots - 1, S, S]

    def candidate_selector(
        self,
        candidate_ids: torch.Tensor,
        unary_logits: torch.Tensor,
        hidden_states: torch.Tensor,
        anchor_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """The last pass's scores for the engine's walk: [blocks, slots - 1, S, S], see `lattice`."""
        assert self.lattice is not None, "compute_candidates comes first"
        return self.lattice[: candidate_ids.shape[0]]

    def embed_block(self, input_ids: torch.Tensor, slots: int) -> torch.Tensor:
        """Anchors and masks as input embeddings: ids [rows] -> [rows, d]."""
        h = self.embed_tokens(input_ids) * self.embedding_scale
        if not self.learned_mask:
            return h
        drafted = (torch.arange(input_ids.shape[0], device=h.device) % slots > 0).unsqueeze(-1)
        return torch.where(drafted, self.mask_embedding.to(h.dtype), h)

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """K norm of the context, each layer with its own weight: [layers, rows, kv_heads, head_dim].

        vLLM's fused norm applies the first layer's weight to all of them on CPU.
        """
        if all_k.is_cuda:
            return super()._normalize_context_k(all_k)
        return torch.stack([layer.self_attn.k_norm(k) for layer, k in zip(self.layers, all_k, strict=True)])

    def run_block(
        self, input_ids: torch.Tensor, positions: torch.Tensor, anchors: torch.Tensor, slots: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The base stream.

        Args:
            input_ids, positions: [rows], blocks * slots of them and perhaps some padding.
            anchors: phi of each block's anchor [blocks, r].

        Returns:
            Hidden states before the final norm [rows, d], and those before the write that is done again
            [blocks, slots - 1, d].
        """
        used = anchors.shape[0] * slots
        h = self.embed_block(input_ids, slots)
        state = h
        for i, layer in enumerate(self.layers):
            h = layer.attend(positions, h)
            if not layer.inner_write:
                h = layer.feed_forward(h)
            if i == self.rewritten:
                state = h[:used].view(-1, slots, h.shape[-1])[:, 1:]
            if layer.injection is not None:
                written, _ = layer.injection(h[:used].view(-1, slots, h.shape[-1]), anchors)
                h = torch.cat([written.flatten(0, 1), h[used:]])
            if layer.inner_write:
                h = layer.feed_forward(h)
        return h, state

    def rewrite(self, state: torch.Tensor, positions: torch.Tensor, messages: torch.Tensor) -> torch.Tensor:
        """Do the last writes again for every candidate predecessor.

        Args:
            state: [blocks, n, d], slots 2.. before the write; positions: [blocks, n].
            messages: phi of the predecessors [blocks, n, K, r].

        Returns:
            Normed states [blocks, n, K, d].
        """
        blocks, n, k, _ = messages.shape
        positions = positions.unsqueeze(-1).expand(-1, -1, k).reshape(-1)
        pairs = PairQueries(blocks, n * k)
        h = self.layers[self.rewritten].write(state.unsqueeze(2), messages)
        for layer in self.layers[self.rewritten + 1 :]:
            h = layer.attend_pairs(positions, h, pairs)
            h = h if layer.inner_write else layer.feed_forward(h)
            h = layer.write(h.view(blocks, n, k, -1), messages)
        return self.norm(h).view(blocks, n, k, -1)


class DSpineForCausalLM(DFlashQwen3ForCausalLM):
    """What vLLM's "dflash" method loads for the architecture DSpineDraftModel."""

    model_cls = DSpineModel
    has_own_embed_tokens = False
    has_own_lm_head = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        refuse_what_is_not_supported(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.own = drafter_config(self.config)
        self.slots = 1 + vllm_config.speculative_config.num_speculative_tokens
        self.logits_processor = LogitsProcessor(self.own.vocab_size)  # scale and soft-cap: see _finish
        # S candidates a slot: those of which the engine draws, or K, of which we choose.
        self.candidates = self.config.dflash_config.get("selector_top_k", self.own.num_candidates)
        # The engine keeps what it sampled from in the target head's dtype, and takes rows of that dtype alone.
        probabilistic = vllm_config.speculative_config.draft_sample_method == "probabilistic"
        self.row_dtype = vllm_config.model_config.head_dtype if probabilistic else torch.float32
        self._scored: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    # ---- the target's head ------------------------------------------------------------------------------------

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Output-embedding rows E[ids]: [..] -> [.., d]."""
        return self.lm_head.quant_method.embedding(self.lm_head, ids.long())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the vocabulary: [rows, d] -> [rows, V], fp32."""
        raw = self.logits_processor(self.lm_head, hidden, getattr(self.lm_head, "bias", None))
        return self._finish(raw.float())

    def pair_scores(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Scores of the candidates: hidden [blocks, n, K, d], ids [blocks, n, S] -> [blocks, n, K, S]."""
        rows = self.head_rows(ids)
        raw = torch.matmul(hidden.to(rows.dtype), rows.transpose(-1, -2)).float()
        bias: torch.Tensor | None = getattr(self.lm_head, "bias", None)
        return self._finish(raw if bias is None else raw + bias.float()[ids].unsqueeze(-2))

    def _finish(self, raw: torch.Tensor) -> torch.Tensor:
        raw = raw if self.own.logit_scale == 1.0 else raw * self.own.logit_scale
        cap = self.own.logit_softcap
        return raw if cap is None else torch.tanh(raw / cap) * cap

    # ---- what the engine calls --------------------------------------------------------------------------------

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the blocks [rows] and score their candidates; returns normed states [rows, d], see `compute_logits`."""
        blocks = input_ids.shape[0] // self.slots
        used = blocks * self.slots
        anchors = self.model.transfer(self.head_rows(input_ids[: used : self.slots]))
        h, state = self.model.run_block(input_ids, positions, anchors, self.slots)
        hidden = self.model.norm(h)
        self._scored = None
        if self.own.selection == "transition" and blocks:
            drafted = hidden[:used].view(blocks, self.slots, -1)[:, 1:]
            self._scored = self._score(drafted, state, positions[:used].view(blocks, -1)[:, 1:])
        return hidden

    def _score(
        self, drafted: torch.Tensor, state: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Every slot's candidates, their unary scores, and slots 2.. given their predecessor's candidates.

        Shapes: [blocks, slots - 1, S] twice and [blocks, slots - 2, K, S].
        """
        unary = self.logits(drafted.flatten(0, 1))
        unary, candidates = unary.view(*drafted.shape[:2], -1).topk(self.candidates, dim=-1)
        known = self.own.num_candidates
        if candidates.shape[1] == 1:
            return candidates, unary, unary.new_empty(len(unary), 0, known, self.candidates)
        messages = self.model.transfer(self.head_rows(candidates[:, :-1, :known]))
        hidden = self.model.rewrite(state[:, 1:], positions[:, 1:], messages)
        return candidates, unary, self.pair_scores(hidden, candidates[:, 1:])

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows [n, V] for the drafted slots of the last pass, in order: -inf outside each slot's candidates."""
        if self._scored is None:
            return self.logits(hidden_states).to(self.row_dtype)
        candidates, unary, pairs = self._scored
        n = _checked(hidden_states, candidates)
        scores = realised_scores(unary[:, 0], pairs).flatten(0, 1)[:n].to(self.row_dtype)
        rows = scores.new_full((n, self.own.vocab_size), float("-inf"))
        return rows.scatter_(1, candidates.flatten(0, 1)[:n], scores)

    def compute_candidates(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates of the last pass's drafted slots, in order, and their unary scores: each [n, S]."""
        assert self._scored is not None, "an export with engine_walk has candidates"
        candidates, unary, pairs = self._scored
        n = _checked(hidden_states, candidates)
        self.model.lattice = lattice(unary, pairs)
        return candidates.flatten(0, 1)[:n], unary.flatten(0, 1)[:n]

    def get_top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The drafted tokens [n], for engines that ask for no rows."""
        return self.compute_logits(hidden_states).argmax(-1)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a DSpine checkpoint. Raises ValueError for a missing, superfluous or misshapen tensor."""
        tensors = drafter_tensors(self.own, weights)
        tensors.pop("fingerprint")
        mask = tensors.pop("mask_embedding", None)
        if mask is not None:
            self.model.mask_embedding.data.copy_(mask)
        for name in ("W", "c"):
            getattr(self.model.transfer, name).copy_(tensors.pop(f"transfer.{name}"))
        self.model.load_weights(tensors.items())
        self.model._build_fused_kv_buffers()


def _checked(hidden_states: torch.Tensor, candidates: torch.Tensor) -> int:
    """How many rows are asked for. Raises ValueError if the last pass drafted fewer slots."""
    n, drafted = hidden_states.shape[0], candidates.shape[0] * candidates.shape[1]
    if n > drafted:
        raise ValueError(
            f"expected at most the {drafted} drafted slots of the last pass; asked for {n} rows. "
            "This version of vLLM samples drafts in a way that DSpine does not know."
        )
    return n


def refuse_what_is_not_supported(vllm_config: VllmConfig) -> None:
    """Raise ValueError, naming the cure, for settings under which the drafts would be wrong."""
    spec = vllm_config.speculative_config
    own = drafter_config(spec.draft_model_config.hf_config)
    asked = spec.num_speculative_tokens
    problems = (
        (
            asked > own.num_draft_slots,
            f"this drafter drafts at most {own.num_draft_slots} tokens; found num_speculative_tokens={asked}. "
            f"Set it to {own.num_draft_slots}.",
        ),
        (
            spec.num_speculative_tokens_per_batch_size is not None,
            "a DSpine block has one length: leave num_speculative_tokens_per_batch_size out.",
        ),
        (
            vllm_config.parallel_config.tensor_parallel_size > 1,
            "a DSpine drafter runs on one device: set tensor_parallel_size to 1.",
        ),
        (
            own.context_window is not None,
            f"context_window={own.context_window} is not supported with vLLM; use the drafter in Transformers.",
        ),
        (
            own.chain_passes > 0,
            f"chain_passes={own.chain_passes} is not supported with vLLM; use the drafter in Transformers.",
        ),
        (
            str(spec.kv_cache_dtype or vllm_config.cache_config.cache_dtype).startswith(("fp8", "int", "nvfp4")),
            'a DSpine drafter needs an unquantised cache: add "kv_cache_dtype": "auto" to the speculative config.',
        ),
    )
    for wrong, message in problems:
        if wrong:
            raise ValueError(message)
    _refuse_another_target(own, vllm_config)


def _refuse_another_target(own: DSpineConfig, vllm_config: VllmConfig) -> None:
    """Raise ValueError unless the target has the shapes that the drafter was trained for."""
    target = vllm_config.model_config
    found = (target.get_hidden_size(), target.get_vocab_size(), target.get_total_num_hidden_layers())
    wanted = (own.hidden_size, own.vocab_size, own.num_target_layers)
    if found != wanted:
        raise ValueError(
            f"this drafter was trained for hidden_size={wanted[0]}, vocab_size={wanted[1]} and {wanted[2]} layers; "
            f"the target has {found[0]}, {found[1]} and {found[2]}. Load the drafter that belongs to it."
        )
