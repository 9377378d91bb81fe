"""Tiny random targets of many model families, each built from its own config."""

import torch
import transformers

VOCABULARY = 61
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": None,
}
DEEPSEEK = {
    **LATENT,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TOWER = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 16}
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
FALCON = {"head_dim": None, "num_key_value_heads": None, "intermediate_size": None, "ffn_hidden_size": 48}

FAMILIES: dict[str, dict] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Ministral": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Mixtral": {"num_local_experts": 4},
    "Qwen2": {},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "Gemma": {},
    "Gemma2": {"final_logit_softcapping": 3.0, "sliding_window": 8},
    "Gemma3Text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Gemma3": {  # with a vision tower, of which only the text part is used
        "text_config": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "vision_config": VISION,
    },
    "Gemma4Text": {
        "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Phi": {"partial_rotary_factor": 0.5},
    "Phi3": {"partial_rotary_factor": 0.5},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.5},
    "GraniteMoe": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "num_local_experts": 4},
    "Cohere": {"logit_scale": 0.25},
    "Cohere2": {
        "logit_scale": 0.25,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "SmolLM3": {},
    "GptOss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "DeepseekV2": {**DEEPSEEK, "topk_method": "greedy"},
    "DeepseekV3": DEEPSEEK,
    "MiniCPM3": LATENT,
    "Falcon": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "GPTNeoX": {},
    "GPT2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "GPTBigCode": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "multi_query": True},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Bloom": {"n_layer": 4, "n_head": 4},
    "StableLm": {},
    "Starcoder2": {"sliding_window": 8},
    "Glm4": {},
    "Glm4Moe": {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "Exaone4": {},
    "Helium": {},
    "Nemotron": {},
    "NanoChat": {},
    "Ernie4_5": {},
    "SeedOss": {},
    "Apertus": {},
    "Arcee": {},
    "Llama4Text": {"interleave_moe_layer_step": 2, "num_local_experts": 2, "intermediate_size_mlp": 48},
    "Glm": {},
    "Olmo": {},
    "GPTJ": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    "Mistral3": {"text_config": {"model_type": "mistral"}, "vision_config": {**VISION, "model_type": "pixtral"}},
    "Llava": {"text_config": {"model_type": "llama"}, "vision_config": {**VISION, "model_type": "clip_vision_model"}},
    "Qwen2_5_VL": {"text_config": {"rope_parameters": MROPE}, "vision_config": TOWER},
    "Qwen3VL": {
        "text_config": {"rope_parameters": MROPE},
        "vision_config": {**TOWER, "deepstack_visual_indexes": [0]},
    },
    "Mpt": {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 128},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
}

RECURRENT: dict[str, dict] = {
    "Qwen3Next": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3_5Text": LINEAR,
    "Mamba": {"state_size": 4},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 1},
    "Jamba": {
        "mamba_d_state": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "FalconH1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "Bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1, 3]},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "RecurrentGemma": {"lru_width": 32, "attention_window_size": 16},
    "Rwkv": {"attention_hidden_size": 32},
    "Zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_d_state": 8,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    "GraniteMoeHybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    },
    "NemotronH": {"layers_block_type": ["mamba", "attention"] * 2, "mamba_num_heads": 8, "mamba_head_dim": 8},
    "MiniMax": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 2},
}


STACKED = {
    "Gemma3nText": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
}

# What enters their first layer is more than a token's embedding: normed, or with learned positions.
OTHER_INPUTS = ("Bloom", "NanoChat", "GPT2", "GPTBigCode", "OPT")


def family_config(family: str, **overrides):
    """The config of a tiny target; None drops a value of the base. A multimodal one has the base in its text part."""
    own = {**FAMILIES.get(family, {}), **RECURRENT.get(family, {}), **STACKED.get(family, {}), **overrides}
    if "text_config" in own:
        values = {**own, "text_config": {**BASE, **own["text_config"]}, "tie_word_embeddings": False}
    else:
        values = {**BASE, **own}
    keep = {k: v for k, v in values.items() if v is not None or k == "eos_token_id"}
    return getattr(transformers, f"{family}Config")(**keep)


def family_target(family: str, seed: int = 0, **overrides):
    """A target in float32 whose norms and biases are not trivial, and whose text varies."""
    torch.manual_seed(seed)
    config = family_config(family, **overrides)
    several = "text_config" in FAMILIES.get(family, {})
    make = transformers.AutoModelForImageTextToText if several else transformers.AutoModelForCausalLM
    model = make.from_config(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
        model.get_input_embeddings().weight.normal_(0, 1.0, generator=generator)
        head = model.get_output_embeddings()
        if head.weight is not model.get_input_embeddings().weight:
            head.weight.normal_(0, 0.5, generator=generator)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)
