"""Several turns over one cache: the text of plain generation; the drafter keeps its context or starts afresh."""

import copy

import pytest
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from dspine_hf.compat_dspine import find_cache
from helpers.oracle import oracle_for, prompt, small_target

FAMILIES = {"llama": {}, "mistral-window": {"family": (MistralConfig, MistralForCausalLM), "sliding_window": 8}}
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


def new_cache(target, windowed=True):
    return DynamicCache(config=target.config) if windowed else DynamicCache()


def references(target):
    """The conversation `[1, length]` after each of two turns, plain and without a cache."""
    first = target.generate(prompt(), **OPTIONS)
    asked = torch.cat([first, prompt(4, seed=5)], dim=1)
    return first, asked, target.generate(asked, **OPTIONS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("windowed", [True, False])
@pytest.mark.parametrize("full_ids", [True, False])
def test_a_second_turn_over_the_same_cache_equals_plain_text(family, windowed, full_ids):
    target = small_target(seed=7, **FAMILIES[family])
    first, asked, second = references(target)
    drafter = oracle_for(target, second[0], 5)
    cache = new_cache(target, windowed)
    assert torch.equal(first, target.generate(prompt(), past_key_values=cache, assistant_model=drafter, **OPTIONS))
    options = dict(OPTIONS)
    ids = asked
    if not full_ids:
        ids = asked[:, cache.get_seq_length() :]
        options["attention_mask"] = torch.ones_like(asked)
    drafter.context_lengths = []
    output = target.generate(ids, past_key_values=cache, assistant_model=drafter, **options)
    assert torch.equal(output[0, -12:], second[0, -12:])
    assert drafter.generation_stats.accepted > 0
    assert drafter.context_lengths[0] == asked.shape[1]
    assert cache.get_seq_length() == second.shape[1] - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_after_a_plain_one_starts_the_drafters_context_at_the_new_tokens(family):
    target = small_target(seed=7, **FAMILIES[family])
    first, asked, second = references(target)
    cache = new_cache(target)
    target.generate(prompt(), past_key_values=cache, **OPTIONS)
    drafter = oracle_for(target, second[0], 5)
    output = target.generate(asked, past_key_values=cache, assistant_model=drafter, **OPTIONS)
    assert torch.equal(output, second)
    assert drafter.generation_stats.accepted > 0
    assert drafter.context_lengths[0] == asked.shape[1] - (first.shape[1] - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_turn_may_follow_a_drafted_one(family):
    target = small_target(seed=7, **FAMILIES[family])
    first, asked, second = references(target)
    cache = new_cache(target)
    target.generate(prompt(), past_key_values=cache, assistant_model=oracle_for(target, first[0], 5), **OPTIONS)
    assert torch.equal(target.generate(asked, past_key_values=cache, **OPTIONS), second)


def test_a_returned_cache_may_start_the_next_turn():
    target = small_target(seed=7)
    first, asked, second = references(target)
    drafter = oracle_for(target, second[0], 5)
    output = target.generate(prompt(), return_dict_in_generate=True, assistant_model=drafter, **OPTIONS)
    drafter.context_lengths = []
    output = target.generate(asked, past_key_values=find_cache(output), assistant_model=drafter, **OPTIONS)
    assert torch.equal(output, second)
    assert drafter.context_lengths[0] == asked.shape[1]


def test_a_cropped_cache_takes_the_drafters_context_with_it():
    target = small_target(seed=7)
    first, asked, _ = references(target)
    cache = new_cache(target)
    drafter = oracle_for(target, first[0], 5)
    target.generate(prompt(), past_key_values=cache, assistant_model=drafter, **OPTIONS)
    cache.crop(-5)
    asked = torch.cat([first[:, : cache.get_seq_length()], prompt(3, seed=8)], dim=1)
    second = target.generate(asked, **OPTIONS)
    drafter.reference, drafter.context_lengths = second[0].tolist(), []
    output = target.generate(asked, past_key_values=cache, assistant_model=drafter, **OPTIONS)
    assert torch.equal(output, second)
    assert drafter.context_lengths[0] == asked.shape[1]


@pytest.mark.parametrize("refilled", [3, 5])
def test_rows_that_took_the_place_of_cropped_ones_start_the_context_afresh(refilled):
    """A plain turn between two drafted ones, whose tokens the drafter has not seen, to no greater length."""
    target = small_target(seed=7)
    first, *_ = references(target)
    cache = new_cache(target)
    drafter = oracle_for(target, first[0], 5)
    target.generate(prompt(), past_key_values=cache, assistant_model=drafter, **OPTIONS)
    cache.crop(-6)
    asked = torch.cat([first[:, : cache.get_seq_length()], prompt(2, seed=8)], dim=1)
    other = target.generate(asked, past_key_values=cache, max_new_tokens=refilled - 1, do_sample=False)
    rows = cache.get_seq_length()
    assert rows == first.shape[1] - 7 + refilled
    asked = torch.cat([other, prompt(3, seed=9)], dim=1)
    second = target.generate(asked, **OPTIONS)
    drafter.reference, drafter.context_lengths = second[0].tolist(), []
    output = target.generate(asked, past_key_values=cache, assistant_model=drafter, **OPTIONS)
    assert torch.equal(output, second)
    assert drafter.generation_stats.accepted > 0
    assert drafter.context_lengths[0] == asked.shape[1] - rows


def test_another_drafter_and_a_copied_cache_start_afresh():
    target = small_target(seed=7)
    first, asked, second = references(target)
    cache = new_cache(target)
    target.generate(prompt(), past_key_values=cache, assistant_model=oracle_for(target, first[0], 5), **OPTIONS)
    for turn_cache in (copy.deepcopy(cache), cache):
        drafter = oracle_for(target, second[0], 5)
        assert torch.equal(
            target.generate(asked, past_key_values=turn_cache, assistant_model=drafter, **OPTIONS), second
        )
        assert drafter.context_lengths[0] == asked.shape[1] - (first.shape[1] - 1)


@pytest.mark.parametrize("full_ids", [True, False])
def test_a_second_turn_with_left_padding_equals_plain_text(full_ids):
    target = small_target(seed=7)
    first, asked, second = references(target)
    padding = torch.zeros(1, 3, dtype=torch.long)
    drafter = oracle_for(target, second[0], 5)
    cache = new_cache(target)
    padded = torch.cat([padding, prompt()], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    output = target.generate(padded, attention_mask=mask, past_key_values=cache, assistant_model=drafter, **OPTIONS)
    assert torch.equal(output[:, 3:], first)
    ids = torch.cat([padding, asked], dim=1)
    mask = (torch.arange(ids.shape[1]) >= 3).long()[None]
    if not full_ids:
        ids = ids[:, cache.get_seq_length() :]
    drafter.context_lengths = []
    output = target.generate(ids, attention_mask=mask, past_key_values=cache, assistant_model=drafter, **OPTIONS)
    assert torch.equal(output[0, -12:], second[0, -12:])
    assert drafter.generation_stats.accepted > 0
    assert drafter.context_lengths[0] == asked.shape[1]


def test_a_prompt_that_the_cache_already_holds_is_refused():
    target = small_target(seed=7)
    cache = new_cache(target)
    drafter = oracle_for(target, [], 5)
    first = target.generate(prompt(), past_key_values=cache, assistant_model=drafter, **OPTIONS)
    with pytest.raises(ValueError, match="nothing is left to feed"):
        target.generate(first[:, :-1], past_key_values=cache, assistant_model=drafter, **OPTIONS)


def test_sampled_turns_run_over_one_cache():
    target = small_target(seed=7, **FAMILIES["mistral-window"])
    drafter = oracle_for(target, [], 5)
    cache = new_cache(target)
    ids = prompt()
    for turn in range(3):
        ids = target.generate(
            ids, past_key_values=cache, assistant_model=drafter, do_sample=True, max_new_tokens=9, top_p=0.9
        )
        assert cache.get_seq_length() == ids.shape[1] - 1
        ids = torch.cat([ids, prompt(2, seed=turn)], dim=1)
