"""DSpineDraftModel: drafts a block of tokens in one pass, conditioning through depth (arXiv 2609.36173)."""

import inspect
import os
import shutil
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .block_dspine import DraftBlock, block_transitions
from .cache_dspine import DraftCache
from .compat_dspine import install_hook
from .configuration_dspine import DSpineConfig
from .custom_generate_dspine import generate
from .generation_dspine import AssistsGenerate
from .layers_dspine import DSpineLayer, DSpineRotaryEmbedding, Limits, ZeroLinear, normed
from .ops_dspine import EAGER, Ops, fused_ops
from .rewrite_dspine import ChainStates, RewriteState, drafted_chain, rewritten
from .saving_dspine import replaced_whole, weights_of
from .target_dspine import (
    TargetView,
    embedding_fingerprint,
    output_head,
    refuse_wrong_shapes,
    resident,
    same_fingerprint,
)
from .transfer_dspine import TransferSpace

install_hook()

# Per drafter, the targets that it warned of. Kept outside of the module, so that copies and pickles do not carry them.
WARNED_TARGETS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclass
class DSpineOutput:
    """One pass over blocks.

    Args:
        hidden: [batch, blocks, B, d], after the last layer and its write, before the final norm.
        features: z per injected layer, each [batch, blocks, B-1, r] fp32, for slots 1..B-1.
        rewrite: what [`DSpineDraftModel.rewrite`] needs to do the write again with a decided predecessor.
    """

    hidden: torch.Tensor
    features: tuple[torch.Tensor, ...]
    rewrite: RewriteState


class DSpinePreTrainedModel(PreTrainedModel):
    """Initialisation and dtype rules shared by DSpine models."""

    config_class = DSpineConfig
    config: DSpineConfig
    base_model_prefix = ""
    main_input_name = "block_embeds"
    _no_split_modules = ["DSpineLayer"]
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["transfer"]
    _auto_class = "AutoModel"  # saved with its code, for trust_remote_code

    @classmethod
    def from_pretrained(cls, *args: Any, use_safetensors: bool | None = True, **kwargs: Any) -> Any:
        """Load a drafter; see [`PreTrainedModel.from_pretrained`]. Pickled weights are refused: they may run code."""
        if not use_safetensors:
            raise ValueError(
                f"expected use_safetensors=True or left out; found {use_safetensors}. Pickled weights may run code "
                "when they are read: convert them to safetensors where you trust them."
            )
        try:
            return super().from_pretrained(*args, use_safetensors=True, **kwargs)
        except SafetensorError as error:
            raise ValueError(
                f"expected whole safetensors files for this drafter; found: {error}. Save the drafter again, or "
                "download it again."
            ) from error
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise ValueError(
                "expected weights of the shapes that config.json says (hidden_size, intermediate_size, head counts, "
                "target_layer_ids, transfer_rank); found others, listed in the report above. Save the drafter again, "
                "so that both belong together."
            ) from error

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, **kwargs: Any) -> None:
        """Write weights, config and the code of both; see [`PreTrainedModel.save_pretrained`] for the arguments.

        A folder that held a drafter holds the old or the new one afterwards, or does not load: see `saving_dspine.py`.

        Raises:
            OSError: there is no room; the folder then holds what it held before.
        """
        if not is_main_process or os.path.isfile(save_directory) or kwargs.get("distributed_checkpoint"):
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
            return
        folder = Path(save_directory)
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", folder.name)
        with replaced_whole(folder, "config.json", weights_of(kwargs.get("variant"))) as staging:
            recipe = staging / "custom_generate" / "generate.py"
            recipe.parent.mkdir()
            shutil.copyfile(inspect.getfile(generate), recipe)
            super().save_pretrained(staging, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(
            module, ZeroLinear
        ):  # asked of the layer itself: Transformers passes over modules without own weights
            init.zeros_(module.weight)
        elif isinstance(module, TransferSpace):
            init.zeros_(module.W)
            init.zeros_(module.c)
        elif isinstance(module, DSpineDraftModel):
            init.zeros_(module.fingerprint)
            if module.mask_embedding is not None:
                init.normal_(module.mask_embedding, mean=0.0, std=self.config.initializer_range)


class DSpineDraftModel(AssistsGenerate, DSpinePreTrainedModel):
    r"""A DSpine drafter. Load one with `AutoModel.from_pretrained` and pass it as `assistant_model` to `generate()`.

    It holds neither the target's embeddings nor its head: [`DSpineDraftModel.bind_target`] borrows them per call.
    """

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        d = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids or ()) * d, d, bias=False)
        self.hidden_norm = Qwen3RMSNorm(d, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DSpineLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(d, eps=config.rms_norm_eps)
        self.rotary_emb = DSpineRotaryEmbedding(config)
        self.transfer = TransferSpace(config.transfer_rank, d, config.rms_norm_eps)
        self.register_buffer("fingerprint", torch.zeros(16, 16))
        self.mask_embedding = nn.Parameter(torch.empty(d)) if config.mask_token_id is None else None
        self.generation_config = GenerationConfig()
        self.post_init()

    # ---- the target ----------------------------------------------------------------------------------------------

    @classmethod
    def for_target(
        cls, model: nn.Module, token_weights: torch.Tensor | None = None, **config_overrides: Any
    ) -> "DSpineDraftModel":
        """A fresh drafter for `model`: shapes from its config, transfer space and fingerprint from its head.

        Args:
            model: the target causal LM.
            token_weights: weight of each token in the transfer space's mean and covariance [V]; None: all alike.
            config_overrides: any field of [`DSpineConfig`].

        Raises:
            ValueError: the target has no output embedding, or the config is inconsistent.
        """
        weight = resident(output_head(model), "weight")
        config_overrides.setdefault("vocab_size", weight.shape[0])
        config = DSpineConfig.for_target(model.config, **config_overrides)
        drafter = cls(config)
        with torch.no_grad():
            drafter.transfer.fit(weight, token_weights)
            drafter.fingerprint.copy_(embedding_fingerprint(weight))
            if drafter.mask_embedding is not None:
                mean = resident(model.get_input_embeddings(), "weight").detach().float().mean(0)
                mean = mean * config.embedding_scale
                drafter.mask_embedding.copy_(mean)
        return drafter

    def check_target(self, model: nn.Module) -> None:
        """Raise ValueError unless `model` has this drafter's shapes; warn once of another model of those shapes."""
        refuse_wrong_shapes(self.config, model)
        warned = WARNED_TARGETS.setdefault(self, weakref.WeakSet())
        if model in warned:
            return
        found = embedding_fingerprint(resident(model.get_output_embeddings(), "weight"))
        if not same_fingerprint(self.fingerprint, found):
            warned.add(model)
            warnings.warn(
                "this drafter was trained for another target of the same shape: the text stays exact, but few drafts "
                "will be accepted. Load the drafter that belongs to the target.",
                stacklevel=2,
            )

    def bind_target(self, model: nn.Module) -> TargetView:
        """The target's embedding and head, as this drafter uses them. Nothing of it is stored on the drafter."""
        return TargetView(model, self.config, self.transfer, self.fc.weight.dtype, self.fc.weight.device)

    # ---- the context ---------------------------------------------------------------------------------------------

    def new_cache(self, **options: Any) -> DraftCache:
        """An empty context cache for one call; options override [`DraftCache`]'s arguments."""
        return DraftCache(self.config.num_hidden_layers, **{"window": self.config.context_window, **options})

    def extend_context(self, cache: DraftCache, features: torch.Tensor, position_ids: torch.Tensor) -> None:
        """Append verified rows to the context.

        Args:
            cache: the call's [`DraftCache`].
            features: the target's hidden states after `target_layer_ids`, concatenated: [batch, rows, len(ids) * d].
            position_ids: their absolute positions [batch, rows].
        """
        ops = self.ops
        context = normed(self.hidden_norm, self.fc(features.to(self.fc.weight.device, self.fc.weight.dtype)), ops)
        cos, sin = self.rotary_emb(context, position_ids.to(context.device))
        for i, layer in enumerate(self.layers):
            cache.append(i, *layer.self_attn.keys_values(context, cos, sin, ops))
        cache.advance(features.shape[1])

    # ---- the pass ------------------------------------------------------------------------------------------------

    @property
    def ops(self) -> Ops:
        """What computes a pass: the eager operations, or fused kernels when asked for, usable and no gradient is."""
        if not self.config.use_fused_kernels or torch.is_grad_enabled():
            return EAGER
        weight = self.fc.weight
        return fused_ops(weight.device.type, weight.dtype, self.config.transfer_rank, self.config.num_candidates)

    def block_embeds(self, view: TargetView, anchor_ids: torch.Tensor, num_slots: int) -> torch.Tensor:
        """The anchor's embedding, then num_slots times the mask: [.., 1 + num_slots, d] for anchors [..]."""
        anchor = view.embed(anchor_ids).unsqueeze(-2)
        if self.mask_embedding is not None:
            mask = self.mask_embedding.to(anchor.dtype)
        else:
            mask = view.embed(anchor_ids.new_full((), self.config.mask_token_id))
        return torch.cat([anchor, mask.expand(*anchor_ids.shape, num_slots, -1)], dim=-2)

    def forward(
        self,
        block_embeds: torch.Tensor,
        anchor_features: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: DraftCache,
        attention_mask: torch.Tensor | None = None,
        forced_messages: torch.Tensor | list[torch.Tensor | None] | None = None,
        limits: Limits | None = None,
    ) -> DSpineOutput:
        """Run the backbone over blocks.

        Args:
            block_embeds: [batch, blocks, B, d], from [`DSpineDraftModel.block_embeds`].
            anchor_features: phi(anchor) [batch, blocks, r].
            position_ids: absolute positions of the slots [batch, blocks, B].
            past_key_values: the context, extended beforehand.
            attention_mask: bool [batch, blocks * B, context + blocks * B], True where a slot may look;
                None: everything (right for one block per batch row whose context is whole).
            forced_messages: messages [batch, blocks, B-1, r] instead of the predicted ones where not NaN, for every
                layer or as a list with one entry per layer (teacher forcing and the oracle analysis).
            limits: instead of a mask, for one block per batch row.
        """
        blocks, slots = block_embeds.shape[1:3]
        cos, sin = self.rotary_emb(block_embeds, position_ids.flatten(1))
        mask = None if attention_mask is None else attention_mask.unsqueeze(1)
        first = self.config.num_hidden_layers - 1 - self.config.rewrite_layers
        h, features, state, keys_values, ops = block_embeds, [], None, [], self.ops
        for i, layer in enumerate(self.layers):
            x = normed(layer.input_layernorm, h, ops).flatten(1, 2)
            k, v = past_key_values.join(i, *layer.self_attn.keys_values(x, cos, sin, ops))
            if mask is not None and mask.shape[-1] > k.shape[2]:
                mask = mask[..., -k.shape[2] :]
            q = layer.self_attn.queries(x, cos, sin, ops)
            h = h + layer.self_attn(q, k, v, mask, limits).view_as(h)
            if not layer.inner_write:
                h = layer.feed_forward(h, ops)
            before = h
            if layer.injection is not None:
                forced = forced_messages[i] if isinstance(forced_messages, list) else forced_messages
                h, z = layer.injection(h, anchor_features, forced, ops)
                features.append(z)
            if layer.inner_write:
                h = layer.feed_forward(h, ops)
            if i == first:
                state = before[:, :, 1:]
            elif i > first:
                keys_values.append((k, v))
        rotary = tuple(t.unflatten(1, (blocks, slots))[:, :, 1:] for t in (cos, sin))
        slot_mask = None if mask is None else mask[:, 0].unflatten(1, (blocks, slots))[:, :, 1:]
        return DSpineOutput(h, tuple(features), RewriteState(state, keys_values, rotary, slot_mask, limits))

    def rewrite(
        self, state: RewriteState, messages: torch.Tensor, first_slot: int = 1, chain: ChainStates | None = None
    ) -> torch.Tensor:
        """Do the last writes again with decided predecessors (predecessor-conditioned decoding).

        Args:
            state: `DSpineOutput.rewrite`.
            messages: phi of the predecessors [batch, blocks, slots, n, r] for slots first_slot.., n alternatives each.
            first_slot: the slot (from 1) that messages begin with.
            chain: what the slots before a slot look like, for drafters with `chain_passes`.

        Returns:
            Normed states [batch, blocks, slots, n, d], ready for the head.
        """
        return normed(self.norm, rewritten(self, state, messages, first_slot, chain), self.ops)

    @torch.no_grad()
    def draft_block(
        self,
        view: TargetView,
        cache: DraftCache,
        anchor_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        num_slots: int | None = None,
        attention_mask: torch.Tensor | None = None,
        num_candidates: int | None = None,
        limits: Limits | None = None,
        noise: torch.Tensor | None = None,
        temperature: float | torch.Tensor = 1.0,
        num_sampled: int | None = None,
    ) -> DraftBlock:
        """Draft one block per batch row.

        Args:
            view: the bound target.
            cache: the context; unchanged by this call.
            anchor_ids, anchor_positions: [batch], the last decided tokens and their absolute positions.
            num_slots: slots to draft, at most B - 1 (the default).
            attention_mask: bool [batch, context + 1 + num_slots] over context and block, for padded batches.
            num_candidates: K of this block, instead of the config's.
            limits: instead of a mask, for fused attention.
            noise: exponential variables [batch, B-1, S] that a walk will sample with, from S candidates a slot; None:
                from K, or greedily. S rows of the target's head are read for every slot: at most 256 MB of copies at
                a time. The scores take 4 (K + 1) S bytes a slot and batch row: 17 MB for 64 blocks of 16, S = 256.
                With `chain_passes`, which S tokens come into question is not known beforehand: [batch, B-1, V].
            temperature: that it will sample with, a number or a tensor without dimensions.
            num_sampled: S with `chain_passes`; None: the config's.

        Returns:
            The block, of S candidates a slot with noise, else of K.
        """
        slots, device = self.config.num_draft_slots, self.fc.weight.device
        slots = slots if num_slots is None else min(num_slots, slots)
        anchors = anchor_ids.to(device).view(-1, 1)
        positions = anchor_positions.to(device).view(-1, 1, 1) + torch.arange(1 + slots, device=device)
        mask = None if attention_mask is None else attention_mask.unsqueeze(1).expand(-1, 1 + slots, -1)
        anchor_features = view.phi(anchors)
        out = self(self.block_embeds(view, anchors, slots), anchor_features, positions, cache, mask, limits=limits)
        kept = num_candidates or self.config.num_candidates
        chained = self.config.chain_passes > 0
        count = kept if noise is None else (num_sampled or self.config.sampling_width) if chained else noise.shape[-1]
        states, ops = normed(self.norm, out.hidden[:, 0, 1:], self.ops), self.ops
        unary, candidates = view.best(states, count, ops.at(count).topk)
        noise = None if noise is None else noise[:, :slots]
        chain = None
        if chained and slots > 1:
            own = None if noise is None else noise[:, None]
            found = drafted_chain(
                self, view, out.rewrite, anchor_features, candidates[:, None], unary[:, None], own, temperature
            )
            chain, candidates, unary = found.chain, found.candidates[:, 0], found.unary[:, 0]
        if chained and noise is not None:
            noise = noise.gather(2, candidates)
        block = DraftBlock(candidates, unary, None, self, view, out, noise, chain)
        if self.config.selection == "transition":
            block_transitions(self, view, out.rewrite, block, kept, temperature)
        return block
