"""The fast loop at the edges of its arguments: what seldom happens must give plain generate()'s text too."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import dspine_hf
from dspine_hf import fast_call
from helpers.batch_oracle import batch_oracle, padded
from helpers.oracle import prompt, small_target
from helpers.words import character_tokenizer

NEW = 20


@pytest.fixture(scope="module")
def target():
    return small_target(seed=7)


@pytest.fixture
def case(target):
    """A drafter that knows the plain texts of two prompts, and the prompts."""
    texts = [prompt(7, seed=1), prompt(3, seed=2)]
    return batch_oracle(target, [target.generate(text, max_new_tokens=60)[0] for text in texts]), texts


@pytest.mark.parametrize("ignored", [0, 6, 7, 8, 14], ids=str)
def test_a_penalty_ignores_as_many_tokens_as_it_says_even_beyond_the_prompt(target, case, ignored):
    drafter, texts = case
    ids, mask = padded(texts)
    for rows in (1, 2):
        own = ignored if rows == 1 else torch.tensor([ignored, 7])
        try:
            processor = RepetitionPenaltyLogitsProcessor(3.0, prompt_ignore_length=own)
        except ValueError:  # older versions of transformers take one number for all rows
            assert rows == 2
            continue
        options = {"attention_mask": mask[:rows], "max_new_tokens": NEW, "logits_processor": [processor]}
        plain = target.generate(ids[:rows], **options)
        assert torch.equal(dspine_hf.generate(target, drafter, ids[:rows], **options), plain)
        assert torch.equal(dspine_hf.generate(target, None, ids[:rows], **options), plain)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "peft"])
def test_stop_strings_of_the_model_hold_in_every_call_which_runs_on_the_model_itself(wrapped, monkeypatch):
    target, text, tokenizer = small_target(seed=7), prompt(7, seed=1), character_tokenizer()
    plain = target.generate(text, max_new_tokens=NEW)
    drafter, seen, init = batch_oracle(target, plain), [], fast_call.FastCall.__init__
    model = get_peft_model(target, LoraConfig(r=2, target_modules=["q_proj"])) if wrapped else target
    target.generation_config.stop_strings = strings = [tokenizer.decode(plain[0, 11:13])]

    def noted(call, found, *args):
        seen.append(found)
        init(call, found, *args)

    monkeypatch.setattr(fast_call.FastCall, "__init__", noted)
    for _ in range(2):
        out = dspine_hf.generate(model, drafter, input_ids=text, tokenizer=tokenizer, max_new_tokens=NEW)
        assert torch.equal(out, plain[:, : out.shape[1]]) and out.shape[1] <= 13
        assert model.generation_config.stop_strings == strings
    assert all(found is target for found in seen)


def test_stop_strings_as_an_argument_precede_those_of_a_config(target, case):
    drafter, texts = case
    tokenizer, plain = character_tokenizer(), target.generate(texts[0], max_new_tokens=NEW)
    config = GenerationConfig(stop_strings=[tokenizer.decode(plain[0, 8:10])], max_new_tokens=NEW)
    strings = [tokenizer.decode(plain[0, 15:18])]
    options = {"generation_config": config, "stop_strings": strings, "tokenizer": tokenizer}
    out = dspine_hf.generate(target, drafter, texts[0], **options)
    assert torch.equal(out, target.generate(texts[0], **options)) and config.stop_strings != strings
