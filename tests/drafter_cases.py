"""Small targets and drafters with every weight drawn afresh, for the tests that compare numbers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspine_hf import DSpineConfig, DSpineDraftModel
from reference_loop import PlainConfig, TargetWeights

TARGET_LAYERS = 8
VOCABULARY = 61
WIDTH = 24


def tiny_target(seed: int = 0, **overrides) -> LlamaForCausalLM:
    """A Llama of 8 layers, d = 24 and V = 61, with an output embedding whose mean is not zero."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(seed)
    target = LlamaForCausalLM(LlamaConfig(**{**values, **overrides})).eval().requires_grad_(False)
    with torch.no_grad():
        head = target.get_output_embeddings().weight
        head.copy_(torch.randn(head.shape) * 0.5 + torch.randn(head.shape[1]) * 0.3)
        target.get_input_embeddings().weight.normal_(0, 1.0)
    return target


def tiny_config(target, **overrides) -> DSpineConfig:
    """A drafter of 3 layers, B = 5, r = 6 and K = 4 for `target`."""
    values = {
        "num_hidden_layers": 3,
        "block_size": 5,
        "transfer_rank": 6,
        "num_candidates": 4,
        "target_layer_ids": [1, 3],
    }
    return DSpineConfig.for_target(target.config, **{**values, **overrides})


def redraw(drafter: DSpineDraftModel, seed: int, injection_scale: float = 0.5) -> DSpineDraftModel:
    """Draw every weight afresh: injections from N(0, 0.5), norms around 1, the rest at the scale of their inputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if ".injection." in name:
                weight.copy_(noise * injection_scale)
            elif weight.dim() == 1:
                weight.copy_(noise * 0.3 + (0.0 if "mask" in name or "bias" in name else 1.0))
            else:
                weight.copy_(noise * weight.shape[1] ** -0.5)
    return drafter.eval().requires_grad_(False)


def tiny_drafter(target, seed: int = 1, **overrides) -> DSpineDraftModel:
    """A fresh drafter for `target` with every weight redrawn; the transfer space is the fitted one."""
    values = {
        "num_hidden_layers": 3,
        "block_size": 5,
        "transfer_rank": 6,
        "num_candidates": 4,
        "target_layer_ids": [1, 3],
    }
    return redraw(DSpineDraftModel.for_target(target, **{**values, **overrides}), seed)


def plain_config(config: DSpineConfig, **overrides) -> PlainConfig:
    """The same numbers, as the loop transcription takes them."""
    values = {
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "block_size": config.block_size,
        "num_candidates": config.num_candidates,
        "eps": config.rms_norm_eps,
        "rope": config.rope_parameters,
        "injection": config.injection,
        "placement": config.injection_placement,
        "rewrite_layers": config.rewrite_layers,
        "context_window": config.context_window,
        "mask_token_id": config.mask_token_id,
        "embedding_scale": config.embedding_scale,
        "logit_scale": config.logit_scale,
        "logit_softcap": config.logit_softcap,
    }
    return PlainConfig(**{**values, **overrides})


def target_weights(target) -> TargetWeights:
    """The embedding and head that the transcription borrows."""
    head = target.get_output_embeddings()
    return TargetWeights(target.get_input_embeddings().weight, head.weight, getattr(head, "bias", None))


def random_context(rows: int, config: DSpineConfig, seed: int = 2, first_position: int = 0):
    """Features [rows, taps * d] of a context, with consecutive positions."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, len(config.target_layer_ids) * config.hidden_size, generator=generator)
    return features, list(range(first_position, first_position + rows))


def filled_cache(drafter: DSpineDraftModel, features: torch.Tensor, positions: list[int], pieces=None):
    """A context cache with these rows, appended in pieces of the given lengths (all at once by default)."""
    cache = drafter.new_cache()
    start = 0
    for length in pieces if pieces is not None else ([len(positions)] if positions else []):
        rows = slice(start, start + length)
        drafter.extend_context(cache, features[rows].unsqueeze(0), torch.tensor([positions[rows]]))
        start += length
    assert start == len(positions) == cache.context_length
    return cache
