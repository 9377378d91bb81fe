"""What cannot be combined with a drafter is refused by name, before the target runs once."""

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    WatermarkingConfig,
)
from transformers.cache_utils import QuantizedLayer
from transformers.generation.logits_process import WatermarkLogitsProcessor

from dspine_hf.compat_dspine import STATIC_CACHE_CAN_BE_CROPPED, check_cache
from helpers.oracle import oracle_for, prompt, small_target


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module")
def drafter(target):
    return oracle_for(target)


def refused(target, drafter, match, ids=None, **options):
    """Asserts that the call is refused and that the target did not run."""
    passes = []
    hook = target.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises(ValueError, match=match):
            ids = prompt() if ids is None else ids
            target.generate(ids, max_new_tokens=8, assistant_model=drafter, **options)
    finally:
        hook.remove()
    assert not passes


REFUSED = {
    "num_beams": {"num_beams": 3},
    "num_return_sequences": {"num_return_sequences": 2, "do_sample": True},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 2},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5, "do_sample": True},
    "speculation_type": {"speculation_type": "dflash"},
    "guidance_scale": {"guidance_scale": 1.5},
    "watermarking_config": {"watermarking_config": WatermarkingConfig()},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "quantized"},
    "num_beam_groups=2": {"num_beam_groups": 2},
    "num_beam_groups": {"num_beam_groups": 2, "num_beams": 4, "diversity_penalty": 0.5},
    "force_words_ids": {"force_words_ids": [[5]], "num_beams": 3},
    "constraints": {"constraints": [object()]},
    "penalty_alpha|contrastive": {"penalty_alpha": 0.6, "top_k": 4, "do_sample": False},
}


@pytest.mark.parametrize("name", REFUSED)
def test_conflicting_arguments_are_refused_by_name(target, drafter, name):
    refused(target, drafter, name, **REFUSED[name])


def test_text_watermarks_are_refused_by_name(target, drafter):
    config = SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)
    refused(target, drafter, "watermarking_config", watermarking_config=config, do_sample=True)


def test_a_batch_is_refused(target, drafter):
    refused(target, drafter, "batch of 2", ids=prompt().repeat(2, 1))


def test_a_watermark_among_the_users_processors_is_refused(target, drafter):
    processors = LogitsProcessorList([WatermarkLogitsProcessor(vocab_size=61, device="cpu")])
    refused(target, drafter, "WatermarkLogitsProcessor", logits_processor=processors)


def test_an_encoder_decoder_is_refused(drafter):
    config = T5Config(vocab_size=61, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    refused(T5ForConditionalGeneration(config), drafter, "encoder-decoder")


def test_a_target_of_another_shape_is_refused_with_both_shapes(drafter):
    other = small_target(vocab_size=70)
    refused(other, drafter, "vocab_size=61.*70")


def test_a_hybrid_target_is_refused():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=16, moe_intermediate_size=8, shared_expert_intermediate_size=8, num_experts=2,
        num_experts_per_tok=1, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"] * 2,
    )  # fmt: skip
    hybrid = Qwen3NextForCausalLM(config).eval()
    refused(hybrid, oracle_for(hybrid, layer_types=None), "linear_attention")


def test_a_quantised_cache_is_refused(target):
    layer = QuantizedLayer.__new__(
        type("AnyQuantizedLayer", (QuantizedLayer,), {"_quantize": None, "_dequantize": None})
    )
    cache = DynamicCache()
    cache.layers.append(layer)
    with pytest.raises(ValueError, match="quantised"):
        check_cache(cache)


def test_no_cache_is_refused():
    with pytest.raises(ValueError, match="cache"):
        check_cache(None)


def test_a_static_sliding_cache_longer_than_its_window_is_refused():
    windowed = small_target(family=(MistralConfig, MistralForCausalLM), sliding_window=8)
    cache = StaticCache(config=windowed.config, max_cache_len=64)
    refused(windowed, oracle_for(windowed), "static", past_key_values=cache, do_sample=False)
    refused(windowed, oracle_for(windowed), "static", cache_implementation="static", do_sample=False)


@pytest.mark.parametrize("user_cache", [True, False])
def test_a_static_cache_is_refused_or_gives_the_plain_text(target, user_cache):
    ids = prompt()
    reference = target.generate(ids, max_new_tokens=60, do_sample=False)[0]
    drafter = oracle_for(target, reference, 4)
    options = {"cache_implementation": "static"}
    if user_cache:
        options = {"past_key_values": StaticCache(config=target.config, max_cache_len=40)}
    if not STATIC_CACHE_CAN_BE_CROPPED:
        return refused(target, drafter, "static", do_sample=False, **options)
    output = target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=drafter, **options)
    assert torch.equal(output[0], reference[:27])
    assert drafter.generation_stats.accepted > 0
    if user_cache:
        asked = torch.cat([output, prompt(3, seed=2)], dim=1)
        second = target.generate(asked, max_new_tokens=8, do_sample=False)
        drafter.reference = second[0].tolist()
        output = target.generate(asked, max_new_tokens=8, do_sample=False, assistant_model=drafter, **options)
        assert torch.equal(output, second)
        assert drafter.generation_stats.accepted > 0
