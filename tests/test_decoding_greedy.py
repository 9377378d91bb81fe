"""The fast loop's greedy text is plain generate()'s text, for one prompt and for every row of a padded batch."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

import dspine_hf
from drafter_cases import redraw
from helpers.batch_oracle import batch_oracle, padded
from helpers.families import family_target
from helpers.oracle import prompt, small_target

LENGTHS = (7, 1, 4)
SOFT_CAP = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "sliding_window": 6, "head_dim": 8}
TARGETS = {
    "full attention": ({}, {}),
    "sliding window": ({"family": (MistralConfig, MistralForCausalLM)}, {"sliding_window": 6}),
    "soft-capped": ({"family": (Gemma2Config, Gemma2ForCausalLM)}, SOFT_CAP),
}
CALLS = {
    "greedy": {},
    "eos": {"eos_token_id": [5, 9, 17], "pad_token_id": 0},
    "repetition penalty": {"repetition_penalty": 1.4},
    "no repeated bigram": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[12], [3, 4]]},
    "minimum": {"min_new_tokens": 9, "eos_token_id": [5, 9, 17, 21, 30], "pad_token_id": 0},
    "penalty and bigram": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
}


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    options, overrides = TARGETS[request.param]
    return small_target(seed=2, **options, **overrides)


def prompts(lengths=LENGTHS):
    return [prompt(length, seed=20 + i) for i, length in enumerate(lengths)]


def oracle_of(target, texts, **options):
    """An oracle that knows the unprocessed continuation of every prompt."""
    references = [target.generate(ids, max_new_tokens=40, do_sample=False)[0] for ids in texts]
    return batch_oracle(target, references, **options)


@pytest.mark.parametrize("call", CALLS)
def test_text_of_one_prompt_and_of_every_row_is_plain_text(target, call):
    options = {"max_new_tokens": 25, "do_sample": False, **CALLS[call]}
    texts = prompts()
    drafter = oracle_of(target, texts)
    ids, mask = padded(texts)
    batch = dspine_hf.generate(target, drafter, ids, attention_mask=mask, **options)
    assert drafter.generation_stats.accepted > 3
    assert torch.equal(batch, target.generate(ids, attention_mask=mask, **options))
    drafter.references = drafter.references[:1]
    plain = target.generate(texts[0], **options)
    assert torch.equal(dspine_hf.generate(target, drafter, texts[0], **options), plain)
    assert torch.equal(dspine_hf.generate(target, None, texts[0], **options), plain)


def test_a_row_is_the_text_of_its_prompt_alone(target):
    texts = prompts()
    ids, mask = padded(texts)
    batch = dspine_hf.generate(target, oracle_of(target, texts), ids, attention_mask=mask, max_new_tokens=20)
    for row, text in zip(batch, texts, strict=True):
        assert torch.equal(row[-20 - text.shape[1] :], target.generate(text, max_new_tokens=20)[0])


@pytest.mark.parametrize("overrides", [{}, {"context_window": 5}, {"selection": "independent"}], ids=str)
@pytest.mark.parametrize("lengths", [(7,), (9, 3, 1)], ids=str)
def test_blocks_are_those_of_a_drafted_generate(overrides, lengths):
    target = small_target(seed=2)
    texts = prompts(lengths)
    ids, mask = padded(texts)
    drafter = redraw(oracle_of(target, texts, **overrides), seed=5)
    dspine_hf.generate(target, drafter, ids, attention_mask=mask, max_new_tokens=20)
    fast, references = drafter.blocks, drafter.references
    for row, text in enumerate(texts):
        drafter.blocks, drafter.references = [], references[row : row + 1]
        single = {places[row]: (unary[row], ids[row]) for places, unary, ids in fast}
        drafter.miss_every = 4
        drafter.generation_config.num_assistant_tokens = None
        shift_references(drafter, row)
        target.generate(text, assistant_model=drafter, max_new_tokens=20)
        compared = 0
        for places, unary, candidates in drafter.blocks:
            if places[0] in single:
                torch.testing.assert_close(single[places[0]][0], unary[0], rtol=1e-4, atol=1e-4)
                assert torch.equal(single[places[0]][1], candidates[0])
                compared += 1
        assert compared > 3


def shift_references(drafter, row):
    """The row alone is row 0 of its batch, and misses the same positions."""
    reference = drafter.references[0]
    drafter.references = [
        [
            (token + int((place + row) % 4 == 0) - int(place % 4 == 0)) % drafter.config.vocab_size
            for place, token in enumerate(reference)
        ]
    ]


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 5])
def test_an_eos_anywhere_in_a_block_ends_the_row_there(position):
    target = small_target(seed=2)
    text = prompts()[0]
    plain = target.generate(text, max_new_tokens=30)[0].tolist()
    eos = plain[7 + 3 + position]
    options = {"max_new_tokens": 30, "eos_token_id": eos, "pad_token_id": 0}
    drafter = oracle_of(target, [text], miss_every=100)
    assert torch.equal(dspine_hf.generate(target, drafter, text, **options), target.generate(text, **options))


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 6, 7, 8])
def test_a_text_ends_at_its_length_limit(max_new_tokens):
    target, texts = small_target(seed=2), prompts()
    ids, mask = padded(texts)
    drafter = oracle_of(target, texts)
    options = {"attention_mask": mask, "max_new_tokens": max_new_tokens}
    assert torch.equal(dspine_hf.generate(target, drafter, ids, **options), target.generate(ids, **options))


def test_learned_positions_are_used_up_to_the_last():
    target = family_target("GPT2")
    texts = [prompt(110, seed=3), prompt(90, seed=4)]
    ids, mask = padded(texts)
    options = {"attention_mask": mask, "max_length": 128}
    drafter = batch_oracle(target, [target.generate(text, max_length=128)[0] for text in texts])
    assert torch.equal(dspine_hf.generate(target, drafter, ids, **options), target.generate(ids, **options))
    assert drafter.generation_stats.accepted > 5
