"""The fast loop with operations of another make: it hands them what the eager ones need, and takes their results."""

from dataclasses import replace

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import dspine_hf
from drafter_cases import tiny_drafter, tiny_target
from dspine_hf import fast_call, fast_walk, ops_dspine
from dspine_hf.fast_walk import SeenTokens, chain_settings, walk_batch
from dspine_hf.ops_dspine import EAGER
from dspine_hf.walk_dspine import walk
from helpers.batch_oracle import BatchOracle, batch_block, batch_oracle, padded
from helpers.families import family_target
from helpers.oracle import prompt

V, K, SLOTS, BATCH = 30, 6, 4, 3
WARPERS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "all": [TemperatureLogitsWarper(1.3), TopKLogitsWarper(5), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(0.8)],
}


def counted(calls):
    """Eager operations as functions of another identity, which count how often they run."""

    def wrap(name):
        def run(*args, **kwargs):
            calls.append(name)
            return getattr(EAGER, name)(*args, **kwargs)

        return run

    return replace(EAGER, walk_chain=wrap("walk_chain"), verify_attention=wrap("verify_attention"))


def test_whether_attention_is_fused_depends_on_the_target_not_on_its_drafter(monkeypatch):
    target, calls, asked = family_target("Llama").double(), [], []
    monkeypatch.setattr(BatchOracle, "ops", property(lambda self: counted(calls)))
    monkeypatch.setattr(fast_call, "fused_ops", lambda *args: asked.append(args) or EAGER)
    plain = target.generate(prompt(5), max_new_tokens=9)
    drafter = batch_oracle(target, plain).float()
    assert torch.equal(dspine_hf.generate(target, drafter, prompt(5), max_new_tokens=9), plain)
    assert asked == [("cpu", torch.float64, 1, 1)] and "walk_chain" in calls
    layers = drafter.config.num_hidden_layers + drafter.config.rewrite_layers  # those of drafts alone are fused
    assert calls.count("verify_attention") == layers * calls.count("walk_chain")


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Ministral", "Qwen3", "DeepseekV3"])
@pytest.mark.parametrize("how", ["drafter", "argument"])
def test_text_is_plain_text_under_other_operations(family, how, monkeypatch):
    target, calls = family_target(family), []
    ops = counted(calls)
    if how == "drafter":
        monkeypatch.setattr(BatchOracle, "ops", property(lambda self: ops))
    monkeypatch.setattr(fast_call, "fused_ops", lambda *args: ops)
    texts = [prompt(5, seed=20), prompt(2, seed=21)]
    references = [target.generate(text, max_new_tokens=17)[0] for text in texts]
    drafter, (ids, mask) = batch_oracle(target, references), padded(texts)
    options = {} if how == "drafter" else {"fused_attention": True}
    out = dspine_hf.generate(target, drafter, ids, attention_mask=mask, max_new_tokens=17, **options)
    for row, reference in zip(out, references, strict=True):
        assert torch.equal(row[-len(reference) :], reference)
    latent = family == "DeepseekV3"  # keys and values of other widths
    assert ("verify_attention" in calls) == (not latent or how == "drafter")
    assert ("walk_chain" in calls) == (how == "drafter")
    calls.clear()
    dspine_hf.generate(target, drafter, ids, attention_mask=mask, max_new_tokens=4, fused_attention=False)
    assert "verify_attention" not in calls


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("name", WARPERS)
def test_both_walks_return_the_same_chain(name, do_sample, independent, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(BATCH, SLOTS, V, generator=generator)
    block = batch_block(rows, torch.randn(BATCH, V, V, generator=generator), K, independent)
    seen = None
    if name == "penalty":
        seen = SeenTokens(1.4, BATCH, V, "cpu")
        seen.begin(WARPERS[name][0], torch.randint(V, (BATCH, 12), generator=generator))
    noise = torch.empty(BATCH, SLOTS, K).exponential_(generator=generator)
    slot = iter(range(SLOTS))
    monkeypatch.setattr(fast_walk, "noise_like", lambda x: noise if x.dim() == 3 else noise[:, next(slot)])
    ours = walk_batch(block, WARPERS[name], seen, do_sample)
    calls = []
    theirs = walk_batch(block, WARPERS[name], seen, do_sample, counted(calls))
    assert calls == ["walk_chain"]
    assert torch.equal(ours.tokens, theirs.tokens)
    if do_sample:
        torch.testing.assert_close(ours.q, theirs.q)
        torch.testing.assert_close(ours.chosen_q, theirs.chosen_q)
    if do_sample or name != "penalty":  # a greedy chain's confidence is that before the penalty
        torch.testing.assert_close(ours.confidence, theirs.confidence)


@pytest.mark.parametrize("name", WARPERS)
def test_both_walks_use_the_blocks_noise_and_the_last_row_after_uncached_predecessors(name):
    generator = torch.Generator().manual_seed(4)
    shape = torch.randn(1, SLOTS, V, generator=generator), torch.randn(1, V, V, generator=generator)
    block, calls = batch_block(*shape, K, kept=2), []
    ids, last = torch.randint(V, (1, 12), generator=generator), 0
    seen = SeenTokens(1.4, 1, V, "cpu") if name == "penalty" else None
    for _ in range(20):
        if seen is not None:
            seen.begin(WARPERS[name][0], ids)
        block.noise = torch.empty(1, SLOTS, K).exponential_(generator=generator)
        ours, draft = (
            walk_batch(block, WARPERS[name], seen, True, counted(calls)),
            walk(block, ids, WARPERS[name], True, V),
        )
        assert torch.equal(ours.tokens, draft.tokens)
        q = torch.zeros(1, SLOTS, V).scatter_(2, ours.candidates, ours.q)
        torch.testing.assert_close(q, draft.log_q.exp())
        index = (block.candidates == ours.tokens.unsqueeze(-1)).int().argmax(-1)[:, :-1]
        last += int((block.transitions.rows.gather(2, index.unsqueeze(-1)) == 2).sum())
    assert last > 10 and not calls  # the fused walk knows no such table


def test_fused_operations_are_left_where_a_slot_has_more_candidates_than_they_take():
    fused = counted([])
    assert fused.at(32) is fused and fused.at(33) is EAGER and EAGER.at(4) is EAGER


def test_pair_scores_are_the_same_when_the_heads_rows_are_copied_piece_by_piece(monkeypatch):
    torch.manual_seed(0)
    hidden, head = torch.randn(5, 3, 2, 8), torch.randn(40, 8)
    inputs = (hidden, torch.rand(8), 1e-6, head, torch.randint(40, (5, 3, 9)), torch.randn(40), 0.5, 3.0)
    whole = ops_dspine.pair_scores(*inputs)
    for piece in (1, 2 * 3 * 9 * 8 * 4):
        monkeypatch.setattr(ops_dspine, "COPIED_BYTES", piece)
        torch.testing.assert_close(ops_dspine.pair_scores(*inputs), whole)


def test_only_usual_processors_in_their_usual_order_are_the_fused_walks():
    assert chain_settings(WARPERS["all"]) == {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05}
    assert chain_settings(WARPERS["penalty"]) == {"repetition_penalty": 1.4, "temperature": 0.8}
    assert chain_settings(WARPERS["all"][::-1]) is None
    assert chain_settings([TypicalLogitsWarper(0.9)]) is None
    assert chain_settings([TemperatureLogitsWarper(0.5)] * 2) is None
    assert chain_settings([TopPLogitsWarper(0.9, min_tokens_to_keep=2)]) is None
    assert chain_settings([TopKLogitsWarper(3, filter_value=-100.0)]) is None


@pytest.mark.parametrize("asked, drafters, seen", [(None, 16, 8), (None, 5, 5), (3, 16, 3), (16, 16, 16)])
def test_a_call_on_a_cpu_keeps_at_most_eight_candidates_unless_asked(asked, drafters, seen, monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target, num_candidates=drafters)
    drafted, genuine = [], type(drafter).draft_block

    def noted(self, *args, **options):
        drafted.append(genuine(self, *args, **options))
        return drafted[-1]

    monkeypatch.setattr(type(drafter), "draft_block", noted)
    prompt = torch.randint(5, 60, (1, 6))
    found = dspine_hf.generate(target, drafter, prompt, max_new_tokens=6, do_sample=False, num_candidates=asked)
    assert {block.candidates.shape[-1] for block in drafted} == {seen}
    assert torch.equal(found, target.generate(prompt, max_new_tokens=6, do_sample=False))


@pytest.mark.parametrize("asked", [0, 17])
def test_candidates_beyond_the_drafters_are_refused(asked):
    target = tiny_target()
    drafter = tiny_drafter(target, num_candidates=16)
    with pytest.raises(ValueError, match="expected 1 to 16"):
        dspine_hf.generate(target, drafter, torch.tensor([[5]]), max_new_tokens=4, num_candidates=asked)


@pytest.mark.parametrize("asked, seen", [(None, 20), (9, 9), (40, 40), (3, 4)])
def test_a_call_samples_from_as_many_candidates_as_asked_and_greedy_drafts_stay(asked, seen, monkeypatch):
    drafter = tiny_drafter(tiny_target(), num_sampled_candidates=20)
    drafted, genuine = [], type(drafter).draft_block

    def noted(self, *args, **options):
        drafted.append(genuine(self, *args, **options))
        return drafted[-1]

    monkeypatch.setattr(type(drafter), "draft_block", noted)
    inputs = {"input_ids": torch.randint(5, 60, (1, 6)), "max_new_tokens": 6}
    dspine_hf.generate(tiny_target(), drafter, do_sample=True, num_sampled_candidates=asked, **inputs)
    assert {block.unary.shape[-1] for block in drafted} == {seen}
    drafted.clear()
    dspine_hf.generate(tiny_target(), drafter, do_sample=False, num_sampled_candidates=asked, **inputs)
    assert {block.unary.shape[-1] for block in drafted} == {4}


@pytest.mark.parametrize("asked", [0, 62])
def test_more_sampled_candidates_than_the_vocabulary_has_are_refused(asked):
    target = tiny_target()
    with pytest.raises(ValueError, match="expected 1 to 61"):
        dspine_hf.generate(target, tiny_drafter(target), torch.tensor([[5]]), num_sampled_candidates=asked)
