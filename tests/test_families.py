"""Every family of targets: the same text, sampling, a saved drafter, a training step; or a refusal before any work."""

import functools
import re
import warnings
from pathlib import Path

import pytest
import torch

from drafter_cases import redraw
from dspine_hf import DSpineDraftModel
from dspine_hf.features import TargetReader
from helpers.families import FAMILIES, RECURRENT, STACKED, VOCABULARY, family_target
from helpers.oracle import oracle_for, prompt
from helpers.training_runs import losses, trainer_for

NEW_TOKENS = 17  # past the windows of 8
README = Path(__file__).resolve().parents[1] / "README.md"


@functools.cache
def case(family: str):
    """(target, prompt, greedy text): made once, shared by the tests of a family."""
    target, ids = family_target(family), prompt(5)
    return target, ids, target.generate(ids, max_new_tokens=NEW_TOKENS + 7, do_sample=False, use_cache=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_every_family_is_plain_text_and_drafts_are_accepted(family):
    target, ids, text = case(family)
    drafter = oracle_for(target, text[0])
    options = {"max_new_tokens": NEW_TOKENS, "assistant_model": drafter, "use_cache": True}
    drafted = target.generate(ids, do_sample=False, **options)
    assert torch.equal(drafted, text[:, :22])
    assert drafter.generation_stats.accepted > 3
    # With one token to choose from, sampling is greedy decoding by way of rejection sampling.
    assert torch.equal(target.generate(ids, do_sample=True, top_k=1, **options), text[:, :22])
    assert drafter.generation_stats.accepted > 3
    torch.manual_seed(0)
    sampled = target.generate(ids, do_sample=True, temperature=0.7, **options)
    assert sampled.shape == (1, 22) and 0 <= int(sampled.min()) and int(sampled.max()) < VOCABULARY
    assert drafter.generation_stats.new_tokens == NEW_TOKENS


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_of_every_family_drafts_alike_after_a_load(family, tmp_path):
    target, ids, text = case(family)
    drafter = redraw(DSpineDraftModel.for_target(target, num_hidden_layers=2, block_size=5, transfer_rank=6), seed=3)
    drafter.save_pretrained(tmp_path)
    loaded = DSpineDraftModel.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded.check_target(target)
    stats = []
    for model in (drafter, loaded):
        drafted = target.generate(ids, max_new_tokens=5, do_sample=False, assistant_model=model, use_cache=True)
        assert torch.equal(drafted, text[:, :10])
        stats.append(model.generation_stats)
    assert stats[0] == stats[1] and stats[0].drafted > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_of_every_family_learns_from_the_states_that_it_drafts_from(family, tmp_path):
    target, ids, text = case(family)
    trainer = trainer_for(
        tmp_path,
        target,
        redraw(
            DSpineDraftModel.for_target(target, num_hidden_layers=2, block_size=5, transfer_rank=6), 3
        ).requires_grad_(),
        rows=[{"tokens": text[0].tolist(), "prompt_length": 5}] * 4,
        max_steps=1,
        save_strategy="no",
        warmup_steps=0,
        lr_scheduler_type="constant",
    )
    before = {name: weight.clone() for name, weight in trainer.drafter.named_parameters()}
    head = target.get_output_embeddings().weight.clone()
    trainer.train()
    (loss,) = losses(trainer.state.log_history)
    assert 0 < loss < 50
    still = [name for name, weight in trainer.drafter.named_parameters() if torch.equal(weight, before[name])]
    assert not still
    assert torch.equal(head, target.get_output_embeddings().weight)

    features, final = TargetReader(target, trainer.drafter.config.target_layer_ids)(text)
    with torch.no_grad():
        out = target(text, output_hidden_states=True)
    wanted = torch.cat([out.hidden_states[i + 1] for i in trainer.drafter.config.target_layer_ids], dim=-1)
    torch.testing.assert_close(features, wanted)
    torch.testing.assert_close(trainer.drafter.bind_target(target).logits(final), out.logits)


def refused_before_any_pass(target, drafter, message):
    passes = []
    hook = target.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match=message):
        target.generate(prompt(5), max_new_tokens=5, assistant_model=drafter)
    hook.remove()
    assert not passes


@pytest.mark.parametrize("family", RECURRENT)
def test_targets_whose_state_keeps_no_history_are_refused(family):
    target = family_target(family)
    drafter = DSpineDraftModel.for_target(target, num_hidden_layers=2, block_size=5)
    refused_before_any_pass(target, drafter, "linear-attention, recurrent or hybrid target .*Generate without")


def test_a_target_of_several_streams_is_refused():
    """The layers of Gemma 3n pass on four hidden states per token."""
    assert list(STACKED) == ["Gemma3nText"]
    target = family_target("Gemma3nText")
    with pytest.raises(ValueError, match=r"one hidden state per token.* 4 \(altup_num_inputs\)"):
        DSpineDraftModel.for_target(target)
    other = family_target("Llama")
    refused_before_any_pass(target, oracle_for(other), "one hidden state per token")


def table() -> dict[str, set[str]]:
    """The README's table of targets: {verdict: families, by the names of their configs}."""
    rows = re.findall(r"^\| (works|works with limits|refused) \| (.+?) \|", README.read_text(), re.MULTILINE)
    found: dict[str, set[str]] = {}
    for verdict, names in rows:
        found.setdefault(verdict, set()).update(re.findall(r"`(\w+)`", names))
    return found


def test_the_table_in_the_readme_lists_what_is_tested_here():
    found = table()
    assert found["works"] | found["works with limits"] == set(FAMILIES)
    assert not found["works"] & found["works with limits"]
    assert found["refused"] == {*RECURRENT, *STACKED}
