"""Greedy text with a drafter is the text without one, whatever the target, the prompt and the processors."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from drafter_cases import redraw
from dspine_hf import DSpineDraftModel
from helpers.oracle import greedy_pair, oracle_for, prompt, small_target

FAMILIES = {
    "llama": {},
    "qwen3": {"family": (Qwen3Config, Qwen3ForCausalLM), "head_dim": 8},
    "gemma2": {"family": (Gemma2Config, Gemma2ForCausalLM), "head_dim": 8, "sliding_window": 8},
    "mistral-window": {"family": (MistralConfig, MistralForCausalLM), "sliding_window": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("miss_every", [1000, 4, 3])
def test_greedy_text_equals_plain_generate_and_drafts_are_accepted(family, miss_every):
    target = small_target(**FAMILIES[family])
    for length in (1, 2, 7, 12):
        plain, drafted, drafter = greedy_pair(target, prompt(length), miss_every)
        assert torch.equal(plain, drafted)
        assert drafter.generation_stats.accepted > 0
        assert drafter.generation_stats.acceptance_length > 1.5


def test_a_drafter_that_knows_everything_fills_every_block():
    target = small_target()
    plain, drafted, drafter = greedy_pair(target, prompt(), miss_every=1000, max_new_tokens=25)
    stats = drafter.generation_stats
    assert torch.equal(plain, drafted)
    assert (stats.rounds, stats.drafted, stats.accepted) == (4, 20, 20)
    assert stats.acceptance_length == 24 / 4
    assert stats.slot_acceptance == (1.0,) * 5


def test_a_drafter_that_knows_nothing_costs_one_pass_per_token():
    target = small_target()
    plain, drafted, drafter = greedy_pair(target, prompt(), miss_every=1, max_new_tokens=10)
    stats = drafter.generation_stats
    assert torch.equal(plain, drafted)
    assert (stats.rounds, stats.accepted, stats.acceptance_length) == (9, 0, 1.0)
    assert stats.slot_acceptance == (0.0,)


def test_stats_count_every_slot_given_that_the_earlier_ones_were_accepted():
    target = small_target()
    ids = prompt(4)
    reference = target.generate(ids, max_new_tokens=40, do_sample=False)[0]
    drafter = oracle_for(target, reference, miss_every=7)
    target.generate(ids, max_new_tokens=23, do_sample=False, assistant_model=drafter)
    # The oracle misses positions 7, 14 and 21, so anchors stand at 4, 7, 13, 14, 20 and 21.
    stats = drafter.generation_stats
    assert (stats.rounds, stats.new_tokens, stats.drafted, stats.accepted) == (6, 23, 5 * 5 + 4, 2 + 5 + 0 + 5 + 0 + 4)
    assert stats.acceptance_length == pytest.approx(22 / 6)
    assert stats.slot_acceptance == (4 / 6, 4 / 4, 3 / 4, 3 / 3, 2 / 2)


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 6, 7, 8])
def test_text_never_overruns_max_new_tokens(new_tokens):
    target = small_target()
    plain, drafted, drafter = greedy_pair(target, prompt(), miss_every=1000, max_new_tokens=new_tokens)
    assert torch.equal(plain, drafted)
    assert drafter.generation_stats.new_tokens == new_tokens


def test_max_length_inside_a_block_is_kept():
    target = small_target()
    plain, drafted, _ = greedy_pair(target, prompt(), miss_every=1000, max_new_tokens=None, max_length=17)
    assert torch.equal(plain, drafted) and drafted.shape[1] == 17


@pytest.mark.parametrize("limit", [0, 1, 3, 100])
@pytest.mark.parametrize("where", ["drafter", "argument"])
def test_num_assistant_tokens_is_an_upper_bound_on_drafts(limit, where):
    target = small_target()
    ids = prompt()
    drafter = oracle_for(target, target.generate(ids, max_new_tokens=60, do_sample=False)[0], 1000)
    options = {"num_assistant_tokens": limit} if where == "argument" else {}
    if where == "drafter":
        drafter.generation_config.num_assistant_tokens = limit
    drafted = target.generate(ids, max_new_tokens=19, do_sample=False, assistant_model=drafter, **options)
    assert torch.equal(drafted, target.generate(ids, max_new_tokens=19, do_sample=False))
    stats = drafter.generation_stats
    assert len(stats.slot_acceptance) == min(limit, 5)
    assert stats.rounds == -(-18 // (1 + min(limit, 5)))


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_of_a_single_prompt_changes_nothing(family):
    target = small_target(**FAMILIES[family])
    ids = prompt(6)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(9) >= 3).long()[None]
    plain, drafted, drafter = greedy_pair(target, padded, attention_mask=mask)
    assert torch.equal(plain, drafted)
    assert torch.equal(drafted[:, 3:], target.generate(ids, max_new_tokens=24, do_sample=False))
    assert drafter.generation_stats.accepted > 0
    assert drafter.context_lengths[0] == 6


@pytest.mark.parametrize("padding", [0, 2])
def test_prompts_given_as_embeddings_are_supported(padding):
    target = small_target()
    ids = prompt(6)
    embeds = target.get_input_embeddings()(ids)
    options = {"max_new_tokens": 20, "do_sample": False}
    if padding:
        embeds = torch.cat([torch.zeros(1, padding, 32), embeds], dim=1)
        options["attention_mask"] = (torch.arange(6 + padding) >= padding).long()[None]
    drafter = oracle_for(target, target.generate(ids, max_new_tokens=60, do_sample=False)[0])
    plain = target.generate(inputs_embeds=embeds, **options)
    drafted = target.generate(inputs_embeds=embeds, assistant_model=drafter, **options)
    assert torch.equal(plain, drafted)
    assert drafter.generation_stats.accepted > 0
    assert drafter.generation_stats.new_tokens == 20


PROCESSORS = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "no repeated bigram": {"no_repeat_ngram_size": 2},
    "minimum length": {"min_new_tokens": 9, "eos_token_id": 2},
    "suppressed tokens": {"suppress_tokens": [2, 23, 47]},
    "suppressed at the beginning": {"begin_suppress_tokens": [47]},
    "forced beginning": {"forced_bos_token_id": 5, "_length": 1},
    "forced end": {"forced_eos_token_id": 9},
    "bad words": {"bad_words_ids": [[47], [23, 2]]},
    "bias": {"sequence_bias": [[[31], 4.0]]},
    "prefix function": {"prefix_allowed_tokens_fn": lambda _, ids: [3, 8, 12] if len(ids) % 3 else list(range(61))},
    "forced in a prefix function": {
        "prefix_allowed_tokens_fn": lambda _, ids: [len(ids)] if len(ids) % 5 == 4 else [7, 9]
    },
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("selection", ["transition", "independent"])
def test_greedy_text_equals_plain_generate_under_processors(name, selection):
    options = {"max_new_tokens": 20, "do_sample": False, **PROCESSORS[name]}
    target = small_target()
    ids = prompt(options.pop("_length", 7))
    plain = target.generate(ids, **options)
    injection = "all" if selection == "transition" else "none"
    drafter = oracle_for(target, plain[0], selection=selection, injection=injection)
    drafted = target.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(plain, drafted)
    assert drafter.generation_stats.accepted > 3


def test_no_allowed_token_ends_the_draft_before_its_slot():
    from transformers import LogitsProcessor, LogitsProcessorList

    class NothingFromTwelve(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, float("-inf")) if input_ids.shape[1] > 12 else scores

    from dspine_hf.walk_dspine import walk
    from helpers.oracle import oracle_block

    block = oracle_block(torch.randn(5, 20), torch.randn(20, 20), 4)
    processors = LogitsProcessorList([NothingFromTwelve()])
    for do_sample in (False, True):
        assert walk(block, prompt(10, vocabulary=20), processors, do_sample, 20).tokens.shape == (1, 3)
        assert walk(block, prompt(13, vocabulary=20), processors, do_sample, 20).tokens.shape == (1, 0)


@pytest.mark.parametrize("switches", [("all", "transition"), ("last", "transition"), ("none", "independent")], ids=str)
def test_greedy_text_equals_plain_generate_with_a_drafter_of_random_weights(switches):
    injection, selection = switches
    target = small_target(seed=2)
    drafter = redraw(DSpineDraftModel.for_target(target, injection=injection, selection=selection), seed=3)
    for length in (1, 9):
        for options in ({}, {"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.2}):
            options = {"max_new_tokens": 15, "do_sample": False, **options}
            drafted = target.generate(prompt(length), assistant_model=drafter, **options)
            assert torch.equal(drafted, target.generate(prompt(length), **options))
            assert drafter.generation_stats.drafted > 0
