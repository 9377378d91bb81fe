"""Drafters whose candidate pairs attend to a drafted chain: each slot knows its whole prefix, and texts stay exact."""

from collections import Counter

import pytest
import torch

import dspine_hf
from drafter_cases import redraw, tiny_config, tiny_target
from dspine_hf import DSpineDraftModel
from dspine_hf.blocks import run_blocks
from dspine_hf.fast_walk import walk_batch
from dspine_hf.layers_dspine import Limits
from dspine_hf.objective import block_states
from dspine_hf.offline import draft_rows
from dspine_hf.offline_sampled import draft_log_q
from dspine_hf.ops_dspine import verify_attention
from dspine_hf.rewrite_dspine import chain_states
from dspine_hf.walk_dspine import sampling_options
from helpers.laws import chi_square_p
from helpers.oracle import prompt, small_target
from test_decoding_law import exact_law, processors_of

SHAPES = {"num_hidden_layers": 3, "block_size": 6, "transfer_rank": 6, "num_candidates": 4, "target_layer_ids": [1, 3]}


def chained(target, passes=1, seed=5, **more):
    torch.manual_seed(0)
    settings = {**SHAPES, "rewrite_layers": 2, "injection_placement": "mlp", "num_sampled_candidates": None, **more}
    return redraw(DSpineDraftModel.for_target(target, chain_passes=passes, **settings), seed)


@pytest.fixture(scope="module")
def case():
    """A drafter, its view, features of a text [1, 20, ..] and the text [20]."""
    target = tiny_target()
    torch.manual_seed(1)
    tokens = torch.randint(0, target.config.vocab_size, (20,))
    states = target(tokens[None], output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in SHAPES["target_layer_ids"]], dim=-1).detach()
    drafter = chained(target)
    return target, drafter, drafter.bind_target(target), features, tokens


def window(tokens, anchors, count):
    return tokens[anchors.unsqueeze(-1) + torch.arange(count)]


def test_a_slots_state_depends_on_all_tokens_before_it_and_on_none_after(case):
    _, drafter, view, features, tokens = case
    anchors = torch.tensor([[4, 9]])
    with torch.no_grad():
        out = run_blocks(drafter, view, features, anchors, tokens[anchors])
        before = window(tokens, anchors, 5)
        plain = chain_states(drafter, out.rewrite, view.phi(before)).hidden
        for changed in range(5):
            other = before.clone()
            other[0, 1, changed] = (other[0, 1, changed] + 7) % 61
            moved = chain_states(drafter, out.rewrite, view.phi(other)).hidden
            differs = ((moved - plain).abs().amax(-1) > 1e-5)[0]
            assert differs.tolist() == [[False] * 5, [slot >= changed for slot in range(5)]]


def test_a_pair_whose_prefix_is_the_chain_has_the_chains_own_state(case):
    _, drafter, view, features, tokens = case
    anchors = torch.tensor([[3, 11]])
    with torch.no_grad():
        out = run_blocks(drafter, view, features, anchors, tokens[anchors])
        before = window(tokens, anchors, 5)
        chain = chain_states(drafter, out.rewrite, view.phi(before))
        alternatives = torch.stack([before, (before + 3) % 61], dim=-1)  # [1, blocks, slots, 2]
        again = drafter.rewrite(out.rewrite, view.phi(alternatives), 1, chain)
        torch.testing.assert_close(again[..., 0, :], drafter.norm(chain.hidden), rtol=1e-4, atol=1e-4)
        assert (again[..., 1, :] - again[..., 0, :]).abs().amax(-1).min() > 1e-3
        later = drafter.rewrite(out.rewrite, view.phi(alternatives[:, :, 2:]), 3, chain)
        torch.testing.assert_close(later, again[:, :, 2:], rtol=1e-4, atol=1e-4)


def test_many_blocks_in_one_pass_have_the_states_of_each_alone(case):
    _, drafter, view, features, tokens = case
    anchors = torch.tensor([[2, 6, 13]])
    before = window(tokens, anchors, 5)
    together = block_states(drafter, view, features, anchors, before)
    for i in range(3):
        alone = block_states(drafter, view, features, anchors[:, i : i + 1], before[:, i : i + 1])
        rows = slice(5 * i, 5 * i + 5)
        torch.testing.assert_close(together.conditional[rows], alone.conditional, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(together.unary[rows], alone.unary, rtol=1e-4, atol=1e-4)


def test_training_reaches_every_weight_through_the_chain(case):
    target, drafter, view, features, tokens = case
    drafter = chained(target).requires_grad_(True)
    anchors = torch.tensor([[4, 9]])
    states = block_states(drafter, view, features, anchors, window(tokens, anchors, 5))
    (states.conditional.square().sum() + states.unary.square().sum()).backward()
    assert [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_the_offline_drafts_are_those_of_the_loops_blocks(case, passes):
    target, _, _, features, tokens = case
    drafter = chained(target, passes)
    view, anchors = drafter.bind_target(target), torch.tensor([[3, 8, 15]])
    found = draft_rows(drafter, view, features, anchors, tokens[anchors])[0]
    without = chained(target, 0)
    for anchor, expected in zip(anchors[0].tolist(), found, strict=True):
        cache = drafter.new_cache()
        drafter.extend_context(cache, features[:, :anchor], torch.arange(anchor)[None])
        block = drafter.draft_block(view, cache, tokens[anchor].view(1), torch.tensor([anchor]))
        assert walk_batch(block, [], None, False).tokens[0].tolist() == expected.tolist()
        pairs = without.draft_block(view, cache, tokens[anchor].view(1), torch.tensor([anchor])).transitions.pairs
        assert ((pairs - block.transitions.pairs).abs().amax((0, 2, 3)) > 1e-2).all()
        previous = expected[:-1]
        for slot in range(2, 6):  # a full row of the vocabulary and the cached scores are the same numbers
            place = block.candidates[0, slot - 2].tolist().index(previous[slot - 2])
            row = block.row(slot, previous[slot - 2 : slot - 1])[0, block.candidates[0, slot - 1]]
            torch.testing.assert_close(row, block.transitions.pairs[0, slot - 2, place], rtol=1e-4, atol=1e-4)


def test_more_passes_settle_on_the_draft_that_goes_token_by_token(case):
    """With as many passes as slots the chain is its own fixed point: every state knows the prefix that is drafted."""
    target, _, _, features, tokens = case
    drafter = chained(target, 5, num_candidates=61)
    view, anchors = drafter.bind_target(target), torch.tensor([[3, 8, 15]])
    found = draft_rows(drafter, view, features, anchors, tokens[anchors])
    with torch.no_grad():
        out = run_blocks(drafter, view, features, anchors, tokens[anchors])
        prefix = tokens[anchors].unsqueeze(-1)
        unary = view.logits(drafter.norm(out.hidden[:, :, 1]))
        prefix = torch.cat([prefix, unary.argmax(-1, keepdim=True)], dim=-1)
        while prefix.shape[-1] < 6:
            hidden = chain_states(drafter, out.rewrite, view.phi(prefix)).hidden[:, :, -1]
            prefix = torch.cat([prefix, view.logits(drafter.norm(hidden)).argmax(-1, keepdim=True)], dim=-1)
    assert torch.equal(found, prefix[..., 1:])


def test_limits_and_masks_show_a_padded_batch_the_same(case):
    _, drafter, view, features, tokens = case
    first = torch.tensor([0, 4])
    anchor, slots = 9, 5
    blocks = []
    for how in ("mask", "limits"):
        cache = drafter.new_cache()
        drafter.extend_context(cache, features[:, :anchor].expand(2, -1, -1), torch.arange(anchor).expand(2, -1))
        columns = torch.arange(anchor + 1 + slots)
        seen = columns >= first[:, None]
        limits = Limits(verify_attention, first, torch.full((2,), anchor + slots))
        options = {"attention_mask": seen} if how == "mask" else {"limits": limits}
        blocks.append(
            drafter.draft_block(view, cache, tokens[anchor].expand(2), torch.full((2,), anchor), **options).transitions
        )
    torch.testing.assert_close(blocks[0].pairs, blocks[1].pairs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(blocks[0].pairs[0], blocks[0].pairs[1], atol=1e-3)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}], ids=str)
def test_greedy_texts_equal_plain_generate(passes, options):
    target = tiny_target()
    drafter = chained(target, passes)
    ids = prompt(7, vocabulary=61)
    options = {"max_new_tokens": 30, "do_sample": False, **options}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)
    assert torch.equal(dspine_hf.generate(target, drafter, ids, **options), plain)
    if not options.keys() & {"repetition_penalty", "no_repeat_ngram_size"}:
        assert torch.equal(dspine_hf.generate(target, drafter, ids, tree_nodes=9, **options), plain)


@pytest.mark.parametrize("kept", [1, 5], ids=lambda k: f"{k} cached")
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=str)
def test_draws_have_the_targets_law(setting, kept):
    small = 6
    target = small_target(seed=3, scale=1.0, vocab_size=small, bos_token_id=1)
    layers = [0] if target.config.num_hidden_layers < 5 else [1, 3]
    drafter = chained(
        target,
        2,
        3,
        block_size=4,
        num_candidates=kept,
        num_sampled_candidates=5,
        transfer_rank=4,
        target_layer_ids=layers,
    )
    draws, ids = 6000, prompt(3, vocabulary=small)
    options = {"max_new_tokens": 4, "do_sample": True, "top_k": 0, **setting}
    torch.manual_seed(2)
    out = dspine_hf.generate(target, drafter, ids.expand(draws, -1), **options)
    assert min(drafter.generation_stats.slot_acceptance[:2]) > 0.2
    expected = exact_law(target, ids, processors_of(target, ids, setting), 4)
    assert chi_square_p(Counter(tuple(row) for row in out[:, 3:].tolist()), expected, draws) > 1e-3


@pytest.mark.parametrize("passes, kept", [(1, 2), (1, 12), (2, 2), (3, 12)])
def test_q_offline_is_the_loops_where_the_noise_is_the_one_that_drew_the_text(case, passes, kept):
    """The loop's noise, told as what offline draws: the first arrival of a slot, and what others came after it."""
    target, _, _, features, tokens = case
    drafter = chained(target, passes, num_candidates=kept, num_sampled_candidates=12)
    view, draws, anchor = drafter.bind_target(target), 30, 7
    cache = drafter.new_cache()
    drafter.extend_context(cache, features[:, :anchor].expand(draws, -1, -1), torch.arange(anchor).expand(draws, -1))
    torch.manual_seed(4)
    sampling = sampling_options(drafter.config, [], draws, "cpu")
    at = tokens[anchor].expand(draws), torch.full((draws,), anchor)
    block = drafter.draft_block(view, cache, *at, **sampling)
    loop = walk_batch(block, [], None, True)
    moved = 0
    first = (block.candidates == loop.tokens.unsqueeze(-1)).long().argmax(-1, keepdim=True)
    arrivals = sampling["noise"].gather(2, block.candidates)
    began = (arrivals / loop.q).gather(2, first)
    told = torch.cat([began, sampling["noise"].scatter(2, block.candidates, arrivals - began * loop.q)], dim=-1)
    for i, drafted in enumerate(loop.tokens):
        text = torch.cat([tokens[: anchor + 1], drafted])
        states = torch.cat([features[:, :anchor], torch.zeros_like(features[:, :6])], dim=1)
        found, other = (
            draft_log_q(drafter, view, states, torch.tensor([anchor]), text, noise[None])[0]
            for noise in (told[i], told[i - 1])
        )
        torch.testing.assert_close(found, loop.chosen_q[i].log(), rtol=1e-4, atol=1e-4)
        moved += int(not torch.allclose(other, found, atol=1e-2))
    assert moved > draws / 4


@pytest.mark.parametrize(
    "wrong",
    [{"chain_passes": -1}, {"rewrite_layers": 0}, {"selection": "independent"}, {"chain_passes": 1.5}],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(wrong):
    target = tiny_target()
    values = {"rewrite_layers": 1, "injection_placement": "mlp", "chain_passes": 1, **wrong}
    with pytest.raises(ValueError, match="chain_passes"):
        tiny_config(target, **values)


def test_a_saved_drafter_drafts_the_same(case, tmp_path):
    target, drafter, _, features, tokens = case
    drafter.save_pretrained(tmp_path)
    again = DSpineDraftModel.from_pretrained(tmp_path).eval()
    assert again.config.chain_passes == 1
    anchors = torch.tensor([[3, 8]])
    drafts = [draft_rows(d, d.bind_target(target), features, anchors, tokens[anchors]) for d in (drafter, again)]
    assert torch.equal(*drafts)
