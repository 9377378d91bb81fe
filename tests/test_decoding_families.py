"""Every family of targets in the fast loop: the rows of a padded batch are plain text, or the family is refused."""

import pytest
import torch

import dspine_hf
from helpers.batch_oracle import batch_oracle, padded
from helpers.families import FAMILIES, family_target
from helpers.oracle import prompt

UNSUPPORTED = ("Bloom", "Mpt", "Llama4Text")
NEW_TOKENS = 13  # past the windows of 8


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_plain_text_or_is_refused_by_name(family):
    target = family_target(family)
    texts = [prompt(5, seed=20), prompt(1, seed=21)]
    references = [target.generate(text, max_new_tokens=NEW_TOKENS, use_cache=True)[0] for text in texts]
    drafter, (ids, mask) = batch_oracle(target, references), padded(texts)
    options = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "use_cache": True}
    if family in UNSUPPORTED:
        with pytest.raises(ValueError, match="assistant_model"):
            dspine_hf.generate(target, drafter, ids, **options)
        return
    before = target.config.get_text_config()._attn_implementation
    batch = dspine_hf.generate(target, drafter, ids, **options)
    assert target.config.get_text_config()._attn_implementation == before
    assert drafter.generation_stats.accepted > 5
    tree = dspine_hf.generate(target, drafter, ids, tree_nodes=6, **options)
    for row, other, reference in zip(batch, tree, references, strict=True):
        assert torch.equal(row[-len(reference) :], reference)
        assert torch.equal(other[-len(reference) :], reference)
