"""What `return_dict_in_generate` returns has the shapes and values of plain generation, field by field."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from dspine_hf.compat_dspine import find_cache
from helpers.oracle import oracle_for, prompt, small_target
from test_generate_stops import StopAtLength

FAMILIES = {
    "llama": {},
    "mistral-window": {"family": (MistralConfig, MistralForCausalLM), "sliding_window": 8},
    "gemma2": {"family": (Gemma2Config, Gemma2ForCausalLM), "head_dim": 8, "sliding_window": 8},
}
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "do_sample": False,
}


def assert_same(plain, drafted):
    assert torch.equal(plain.sequences, drafted.sequences)
    for name in ("scores", "logits"):
        a, b = getattr(plain, name), getattr(drafted, name)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert x.shape == y.shape
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)
    for name in ("hidden_states", "attentions"):
        a, b = getattr(plain, name), getattr(drafted, name)
        assert len(a) == len(b)
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            assert len(x) == len(y)
            for layer, (p, q) in enumerate(zip(x, y, strict=True)):
                assert p.shape == q.shape, (name, step, layer, p.shape, q.shape)
                torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-4)
    p, q = find_cache(plain), find_cache(drafted)
    assert p.get_seq_length() == q.get_seq_length()
    for x, y in zip(p.layers, q.layers, strict=True):
        torch.testing.assert_close(x.keys, y.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(x.values, y.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stop", [None, 10, 13])
@pytest.mark.parametrize("miss_every", [1000, 4])
def test_every_field_equals_that_of_plain_generate(family, stop, miss_every):
    target = small_target(seed=7, attn_implementation="eager", **FAMILIES[family])
    reference = target.generate(prompt(), max_new_tokens=60, do_sample=False)[0]
    options = {**EVERYTHING, "max_new_tokens": 16, "repetition_penalty": 1.01}
    if stop:
        options["stopping_criteria"] = [StopAtLength(stop)]
    drafter = oracle_for(target, reference, miss_every)
    plain = target.generate(prompt(), **options)
    drafted = target.generate(prompt(), assistant_model=drafter, **options)
    assert drafter.generation_stats.accepted > 0
    assert_same(plain, drafted)


def test_every_field_equals_that_of_plain_generate_for_embeddings():
    target = small_target(seed=7, attn_implementation="eager")
    reference = target.generate(prompt(), max_new_tokens=60, do_sample=False)[0]
    embeds = target.get_input_embeddings()(prompt())
    drafter = oracle_for(target, reference, 4)
    options = {**EVERYTHING, "max_new_tokens": 16, "inputs_embeds": embeds}
    assert_same(target.generate(**options), target.generate(assistant_model=drafter, **options))


def test_fields_that_were_not_asked_for_are_none():
    target = small_target(seed=7)
    drafter = oracle_for(target, target.generate(prompt(), max_new_tokens=60, do_sample=False)[0], 4)
    output = target.generate(
        prompt(), max_new_tokens=9, do_sample=False, return_dict_in_generate=True, assistant_model=drafter
    )
    assert output.scores is output.logits is output.hidden_states is output.attentions is None
