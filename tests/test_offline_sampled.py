"""Expected acceptance at T = 1 from one sampled text: its q is the walk's, its rounds are those of the lottery."""

import itertools

import pytest
import torch

from drafter_cases import redraw, tiny_target
from dspine_hf import offline_sampled
from dspine_hf.baselines import BASELINES
from dspine_hf.fast_walk import walk_batch
from dspine_hf.modeling_dspine import DSpineDraftModel
from dspine_hf.offline_sampled import draft_log_q, expected_walk, sampled_walk
from dspine_hf.walk_dspine import sampling_options, walk

SHAPES = {"num_hidden_layers": 2, "block_size": 5, "transfer_rank": 6, "num_candidates": 4, "target_layer_ids": [1, 3]}


def hidden_states(target, tokens):
    states = target(tokens, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in SHAPES["target_layer_ids"]], dim=-1).detach()


def brute_rounds(accept, n, slots, stopped, place=0):
    """Expected rounds from anchor `place`, by all outcomes of one round."""
    if place >= n - 1:
        return 0.0
    room = min(slots, n - (1 if stopped else 2) - place)
    total, alive = 1.0, 1.0
    for slot in range(room):
        total += alive * (1 - accept[place][slot]) * brute_rounds(accept, n, slots, stopped, place + slot + 1)
        alive *= accept[place][slot]
    return total + alive * brute_rounds(accept, n, slots, stopped, place + max(room, 0) + 1)


@pytest.mark.parametrize("stopped", [False, True])
def test_expected_rounds_are_those_of_every_outcome_weighed_by_its_probability(stopped):
    torch.manual_seed(3)
    n, slots = 8, 3
    log_q, log_p = torch.randn(n - 1, slots) - 1, torch.randn(n) - 1
    accept = [
        [min(1.0, float((log_q[i, t] - log_p[min(n - 1, i + t + 1)]).exp())) for t in range(slots)]
        for i in range(n - 1)
    ]
    found = expected_walk(log_q, log_p, stopped)
    assert found.rounds == pytest.approx(brute_rounds(accept, n, slots, stopped))
    assert n - 1 == pytest.approx(found.rounds + sum(found.hits) - (stopped and found_surplus(accept, n, slots)))


def found_surplus(accept, n, slots, place=0):
    """Chance that the last token was drafted: that round yields no token of the target's."""
    if place >= n - 1:
        return 0.0
    room = min(slots, n - 1 - place)
    total, alive = 0.0, 1.0
    for slot in range(room):
        total += alive * (1 - accept[place][slot]) * found_surplus(accept, n, slots, place + slot + 1)
        alive *= accept[place][slot]
    end = place + room
    return total + alive * (1.0 if end == n - 1 else found_surplus(accept, n, slots, end + 1))


@pytest.mark.parametrize("m, selection", [(0, "transition"), (1, "transition"), (0, "independent")])
def test_q_of_the_true_tokens_is_what_the_walk_samples_from(m, selection):
    torch.manual_seed(m)
    target = tiny_target()
    settings = {} if m == 0 else {"rewrite_layers": m, "injection_placement": "mlp"}
    settings |= {"selection": selection, "num_sampled_candidates": None}
    drafter = redraw(DSpineDraftModel.for_target(target, **{**SHAPES, **settings}), 5)
    view = drafter.bind_target(target)
    tokens = torch.randint(0, target.config.vocab_size, (14,))
    features = hidden_states(target, tokens[None])
    compared = 0
    for anchor, _ in itertools.product(range(3, 9), range(4)):
        cache = drafter.new_cache()
        drafter.extend_context(cache, features[:, :anchor], torch.arange(anchor)[None])
        block = drafter.draft_block(view, cache, tokens[anchor].view(1), torch.tensor([anchor]))
        draft = walk(block, tokens[None, : anchor + 1], [], True, target.config.vocab_size)
        count = draft.tokens.shape[1]
        text = torch.cat([tokens[: anchor + 1], draft.tokens[0]])
        states = torch.cat([features[:, :anchor], torch.zeros_like(features[:, : 1 + count])], dim=1)
        found = draft_log_q(drafter, view, states, torch.tensor([anchor]), text)[0]
        torch.testing.assert_close(found, draft.log_q[0].gather(1, draft.tokens.T).squeeze(1), rtol=1e-4, atol=1e-4)
        compared += count
    assert compared > 40


@pytest.mark.parametrize("right", [True, False])
def test_predecessors_are_as_often_cached_offline_as_in_the_loop(right, monkeypatch):
    torch.manual_seed(0)
    target, draws, anchor = tiny_target(), 1500, 7
    shapes = {**SHAPES, "num_candidates": 2, "num_sampled_candidates": 12}
    drafter = redraw(DSpineDraftModel.for_target(target, **shapes), 5)
    if not right:
        monkeypatch.setattr(offline_sampled, "_scores_of_the_walk", lambda unary, given, *more: given)
    view, tokens = drafter.bind_target(target), torch.randint(0, target.config.vocab_size, (anchor + 1,))
    features, cache = hidden_states(target, tokens[None]), drafter.new_cache()
    drafter.extend_context(cache, features[:, :anchor].expand(draws, -1, -1), torch.arange(anchor).expand(draws, -1))
    sampling = sampling_options(drafter.config, [], draws, "cpu")
    block = drafter.draft_block(view, cache, tokens[-1].expand(draws), torch.full((draws,), anchor), **sampling)
    chain = walk_batch(block, [], None, True)
    loop = chain.q[:, 2, 0].log()  # of slot 3's best candidate, after what slots 1 and 2 drew
    offline, generator = [], torch.Generator().manual_seed(1)
    noise = torch.empty(draws, 1, drafter.config.num_draft_slots, 13).exponential_(generator=generator)
    for drafted, own in zip(chain.tokens, noise, strict=True):
        text = torch.cat([tokens, drafted[:2], block.candidates[0, 2, :1]])
        states = torch.cat([features[:, :anchor], torch.zeros_like(features[:, : len(text) - anchor])], dim=1)
        offline.append(draft_log_q(drafter, view, states, torch.tensor([anchor]), text, own)[0, 2])
    difference = torch.stack(offline) - loop
    off = float(difference.mean().abs() / difference.std() * draws**0.5)
    assert off < 4 if right else off > 8


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_has_probabilities_that_sum_to_one_over_the_next_token(name):
    torch.manual_seed(1)
    target = tiny_target()
    drafter = redraw(BASELINES[name](target, None, **SHAPES), 7).eval()
    view, vocabulary = drafter.bind_target(target), target.config.vocab_size
    tokens = torch.randint(0, vocabulary, (10,))
    features = hidden_states(target, tokens[None])
    total = torch.zeros(2)
    for token in range(vocabulary):
        for slot in (1, 2):
            text = tokens.clone()
            text[5 + slot] = token
            total[slot - 1] += draft_log_q(drafter, view, features, torch.tensor([5]), text)[0, slot - 1].exp()
    torch.testing.assert_close(total, torch.ones(2), rtol=1e-4, atol=1e-4)
    walk_ = sampled_walk(drafter, view, features, torch.randn(1, 10, target.config.hidden_size), tokens, 4)
    assert walk_.new_tokens == 6 and 1 <= walk_.rounds <= 5
