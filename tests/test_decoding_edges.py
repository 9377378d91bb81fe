"""The fast loop at the edges of its arguments: what seldom happens must give plain generate()'s text too."""

import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import dspine_hf
from helpers.batch_oracle import batch_oracle, padded
from helpers.oracle import prompt, small_target

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
        processor = RepetitionPenaltyLogitsProcessor(3.0, prompt_ignore_length=own)
        options = {"attention_mask": mask[:rows], "max_new_tokens": NEW, "logits_processor": [processor]}
        plain = target.generate(ids[:rows], **options)
        assert torch.equal(dspine_hf.generate(target, drafter, ids[:rows], **options), plain)
        assert torch.equal(dspine_hf.generate(target, None, ids[:rows], **options), plain)
