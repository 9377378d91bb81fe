"""Sampling in the fast loop keeps the target's law: exact laws from what it draws with, and draws of batches."""

from collections import Counter, defaultdict
from itertools import product

import pytest
import torch

import dspine_hf
from drafter_cases import redraw
from dspine_hf import DSpineDraftModel, fast_round, fast_walk
from dspine_hf.fast_round import Rounds, Rows
from dspine_hf.fast_walk import SeenTokens, is_fast, walk_batch
from dspine_hf.policy import Policy
from helpers.batch_oracle import batch_block
from helpers.laws import chi_square_p, distance_from_target, naive_drafts, step_law
from helpers.oracle import oracle_block, prompt, small_target
from test_generate_law import BLOCKS, FULL_ROWS, processors_of
from test_generate_law import SETTINGS as ALL_SETTINGS

V, K, SLOTS, BATCH = 12, 4, 3, 2
SETTINGS = {name: options for name, options in ALL_SETTINGS.items() if name not in FULL_ROWS}


@pytest.fixture(scope="module")
def target():
    return small_target(seed=3, scale=1.0, vocab_size=V, bos_token_id=1)


def blocks_of(kind: str):
    """Two single blocks, and both as a batch."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(BATCH)]
    rows = [torch.randn(SLOTS, V, generator=generator) for generator in generators]
    given = [torch.randn(V, V, generator=generator) for generator in generators]
    single = [oracle_block(r, g, K, **BLOCKS[kind]) for r, g in zip(rows, given, strict=True)]
    return single, batch_block(torch.stack(rows), torch.stack(given), K, **BLOCKS[kind])


def loaded_noise(wanted):
    """Noise that makes the walk choose the places `wanted` `[batch, slots]`."""
    return lambda x: torch.ones(x.shape).scatter_(2, wanted.unsqueeze(-1), 1e-30)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_rows_step_has_the_targets_law_whatever_the_batch(target, setting, kind, monkeypatch):
    options = SETTINGS[setting]
    ids = torch.cat([prompt(4, seed=s, vocabulary=V) for s in range(BATCH)])
    processors = processors_of(target, ids, options)
    assert is_fast(list(processors), ids.shape[1])
    single, batch = blocks_of(kind)
    for row in (BATCH - 1,):
        drafts = naive_drafts(single[row], ids[row : row + 1], options, None)
        chains = {
            draft: chain_on_the_way_to(draft, row, batch, ids, processors, monkeypatch)
            for draft, mass in drafts.items()
            if mass
        }
        laws = step_law(
            {draft: drafts[draft] for draft in chains},
            lambda draft, row=row, chains=chains: spread(chains[draft], row),
            target_law(target, ids[row : row + 1], processors),
        )
        assert distance_from_target(laws, target_law(target, ids[row : row + 1], processors)) < 1e-4


def chain_on_the_way_to(draft, row, batch, ids, processors, monkeypatch):
    places = torch.zeros(BATCH, SLOTS, dtype=torch.long)
    places[row] = torch.tensor([batch.candidates[row, slot].tolist().index(t) for slot, t in enumerate(draft)])
    penalties = [p for p in processors if hasattr(p, "penalty")]
    seen = SeenTokens(penalties[0].penalty, BATCH, V, "cpu") if penalties else None
    if seen is not None:
        seen.begin(penalties[0], ids)
    with monkeypatch.context() as patch:
        patch.setattr(fast_walk, "noise_like", loaded_noise(places))
        chain = walk_batch(batch, list(processors), seen, True)
    assert tuple(chain.tokens[row].tolist()) == draft
    torch.testing.assert_close(chain.chosen_q[row], chain.q[row].gather(1, places[row][:, None])[:, 0])
    return chain


def spread(chain, row):
    q = torch.zeros(SLOTS, V, dtype=torch.double)
    return q.scatter_(1, chain.candidates[row], chain.q[row].double())


def target_law(target, ids, processors):
    known = {}

    def law(tokens):
        if tokens not in known:
            text = torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], dim=1) if tokens else ids
            scores = processors(text, target(text).logits[:, -1].float())
            known[tokens] = scores[0].double().softmax(-1)
        return known[tokens]

    return law


def experienced_policy():
    """A policy that cuts some drafts and not others: drafts of low confidence were rejected, and passes cost."""
    now = [0.0]
    policy = Policy([1, 2, 3], clock=lambda: now[0])

    def round_of(drafted, verified, seconds, outcomes):
        policy.begin()
        now[0] += seconds
        policy.end(drafted, verified, outcomes)

    for _ in range(4):
        round_of(False, 0, 1.0, [([], 0, 1)])
    for kept in (3, 2, 1, 3, 2, 1, 3, 3):
        round_of(True, kept, 1.0 + (0.0, 0.1, 0.17, 0.205)[kept], [([0.9] * 3, 1, 2), ([0.1] * 3, 0, 1)])
    return policy


@pytest.mark.parametrize("setting", ["T=1", "T=0.7", "repetition penalty"])
def test_drafts_that_a_policy_cuts_keep_the_targets_law(target, setting, monkeypatch):
    ids = torch.cat([prompt(4, seed=s, vocabulary=V) for s in range(BATCH)])
    processors = processors_of(target, ids, SETTINGS[setting])
    single, batch = blocks_of("transition")
    policy, law = experienced_policy(), target_law(target, ids[:1], processors)
    kept, chains = [{}, {}, {}, {}], {}
    for draft, mass in naive_drafts(single[0], ids[:1], SETTINGS[setting], None).items():
        chain = chain_on_the_way_to(draft, 0, batch, ids, processors, monkeypatch)
        cut = policy.cut([chain.confidence[0].tolist()], SLOTS)
        chains[draft[:cut]] = spread(chain, 0)
        kept[cut][draft[:cut]] = kept[cut].get(draft[:cut], 0.0) + mass
    assert sum(bool(group) for group in kept) > 1  # otherwise nothing depends on the draft
    laws = [defaultdict(float) for _ in range(SLOTS + 2)]
    for group in filter(None, kept):
        for total, part in zip(laws, step_law(group, chains.__getitem__, law), strict=False):
            for tokens, mass in part.items():
                total[tokens] += mass
    assert distance_from_target(laws, law) < 1e-4


@pytest.mark.parametrize("tokens", list(product(range(4), repeat=2)), ids=str)
def test_a_draft_stands_with_probability_p_over_q_and_else_the_rest_is_drawn(tokens, monkeypatch):
    torch.manual_seed(0)
    law = torch.randn(1, 3, 6).softmax(-1)
    q = torch.randn(1, 2, 4).softmax(-1)
    chain = fast_walk.Chain(torch.tensor([tokens]), q, torch.arange(4).repeat(1, 2, 1), q, None)
    chain.chosen_q = q.gather(2, chain.tokens.unsqueeze(-1))[..., 0]
    for accepted in range(3):
        ratios = [float(law[0, i, t] / q[0, i, t]) for i, t in enumerate(tokens)]
        if any(ratio >= 1 for ratio in ratios[accepted : accepted + 1]):
            continue
        dice = [min(1.0, r) * 0.999 if i < accepted else r * 1.001 for i, r in enumerate(ratios)]
        drawn_from = []
        with monkeypatch.context() as patch:
            patch.setattr(fast_round.torch, "rand_like", lambda x, dice=dice: torch.tensor([dice]))
            patch.setattr(fast_round, "noise_like", lambda x, seen=drawn_from: seen.append(x) or torch.ones_like(x))
            rounds = bare_rounds()
            count, _, agreed, *_ = rounds.accept(law.log(), chain.tokens, chain, None)[0].tolist()
        assert (agreed, count) == (accepted, accepted + 1)
        rest = law[0, accepted].clone()
        if accepted < 2:
            rest[:4] -= q[0, accepted]
            rest.clamp_(min=0)
        torch.testing.assert_close(drawn_from[0][0], rest)


def bare_rounds():
    zero = torch.zeros(1, dtype=torch.long)
    rows = Rows(
        torch.zeros(1, 20, dtype=torch.long), zero + 4, zero, zero, zero.bool(), zero[0] + 16, None, None, False
    )
    return Rounds(None, rows, None, 2, True)


class LawOracle(DSpineDraftModel):
    """Drafts the same random rows for every batch row; the anchor's position seeds them."""

    @torch.no_grad()
    def draft_block(self, view, cache, anchor_ids, anchor_positions, num_slots=None, attention_mask=None, **more):
        super().draft_block(view, cache, anchor_ids, anchor_positions, num_slots, attention_mask, **more)
        generator = torch.Generator().manual_seed(int(anchor_positions.max()))
        slots = self.config.num_draft_slots
        batch = anchor_ids.shape[0]
        rows = torch.randn(1, slots, V, generator=generator) * 0.7
        block = batch_block(rows, torch.randn(1, V, V, generator=generator), self.config.num_candidates)
        block.candidates = block.candidates.expand(batch, -1, -1)
        block.unary = block.unary.expand(batch, -1, -1)
        block.rows, block.given = block.rows.expand(batch, -1, -1), block.given.expand(batch, -1, -1)
        block.transitions.first = block.transitions.first.expand(batch, -1)
        block.transitions.pairs = block.transitions.pairs.expand(batch, -1, -1, -1)
        return block


def exact_law(target, ids, processors, length):
    """`{text: probability}` of all texts of `length` tokens; versions differ in whether a penalty counts padding."""
    texts, mass = torch.zeros(1, 0, dtype=torch.long), torch.ones(1, dtype=torch.double)
    for _ in range(length):
        prefix = torch.cat([ids.expand(len(texts), -1), texts], dim=1)
        scores = processors(prefix, target(prefix).logits[:, -1].float())
        mass = (mass[:, None] * scores.double().softmax(-1)).flatten()
        V = scores.shape[1]
        texts = torch.cat([texts.repeat_interleave(V, 0), torch.arange(V).repeat(len(texts))[:, None]], dim=1)
        texts, mass = texts[mass > 0], mass[mass > 0]
    return dict(zip(map(tuple, texts.tolist()), mass.tolist(), strict=True))


@pytest.mark.parametrize("setting", [{}, {"temperature": 0.7, "top_k": 6}, {"repetition_penalty": 1.5}], ids=str)
def test_draws_of_a_padded_batch_have_the_targets_law(target, setting):
    torch.manual_seed(7)
    drafter = LawOracle.for_target(target, num_hidden_layers=1, block_size=4, transfer_rank=4, num_candidates=K).eval()
    draws, ids = 3000, prompt(3, vocabulary=V)
    batch = torch.cat([ids[:, :1].expand(draws, 2), ids.expand(draws, -1)], dim=1)
    mask = (torch.arange(5) >= 2).long().expand(draws, -1)
    options = {"max_new_tokens": 4, "do_sample": True, "top_k": 0, **setting}
    out = dspine_hf.generate(target, drafter, batch, attention_mask=mask, **options)
    assert drafter.generation_stats.accepted > draws / 3
    expected = exact_law(target, ids, processors_of(target, ids, setting), 4)
    counts = Counter(tuple(row) for row in out[:, 5:].tolist())
    assert chi_square_p(counts, expected, draws) > 1e-3


@pytest.mark.parametrize("setting", [{"temperature": 0.7, "top_p": 0.9}, {"repetition_penalty": 1.5}], ids=str)
def test_draws_have_the_targets_law_where_the_noise_chooses_the_cached_predecessors(setting):
    small = 6
    target = small_target(seed=3, scale=1.0, vocab_size=small, bos_token_id=1)
    torch.manual_seed(8)
    shapes = {"num_hidden_layers": 2, "block_size": 4, "transfer_rank": 4, "num_candidates": 1}
    drafter = redraw(DSpineDraftModel.for_target(target, **shapes, num_sampled_candidates=5), 3)
    draws, ids = 6000, prompt(3, vocabulary=small)
    batch = torch.cat([ids[:, :1].expand(draws, 2), ids.expand(draws, -1)], dim=1)
    mask = (torch.arange(5) >= 2).long().expand(draws, -1)
    options = {"max_new_tokens": 4, "do_sample": True, "top_k": 0, **setting}
    blocks = spied_blocks(drafter)
    out = dspine_hf.generate(target, drafter, batch, attention_mask=mask, **options)
    assert min(drafter.generation_stats.slot_acceptance[:2]) > 0.3
    rows = blocks[0].transitions.rows
    assert rows.shape == (draws, 2, 5) and (rows == 1).sum(-1).eq(4).all()
    assert rows[:, 0].argmin(-1).unique().numel() > 3  # the noise decides
    expected = exact_law(target, ids, processors_of(target, ids, setting), 4)
    assert chi_square_p(Counter(tuple(row) for row in out[:, 5:].tolist()), expected, draws) > 1e-3


def spied_blocks(drafter):
    """The blocks that the drafter will return."""
    blocks, genuine = [], drafter.draft_block

    def noted(*args, **options):
        blocks.append(genuine(*args, **options))
        return blocks[-1]

    drafter.draft_block = noted
    return blocks
