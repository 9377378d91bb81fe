"""Sampling with a drafter keeps the target's distribution: exact laws from the returned q, and draws against it."""

from collections import Counter

import pytest
import torch
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor, TemperatureLogitsWarper

from dspine_hf import walk_dspine
from dspine_hf.walk_dspine import walk
from helpers.laws import chi_square_p, distance_from_target, naive_drafts, step_law
from helpers.oracle import oracle_block, prompt, small_target

V, K, SLOTS = 12, 5, 3
SETTINGS = {
    "T=1": {},
    "T=0.7": {"temperature": 0.7},
    "top-k": {"top_k": 3, "temperature": 1.2},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.3},
    "repetition penalty": {"repetition_penalty": 1.7, "temperature": 0.8},
    "repetition penalty and top-p": {"repetition_penalty": 0.6, "top_p": 0.9},
    "typical": {"typical_p": 0.7},
    "no repeated bigram": {"no_repeat_ngram_size": 2, "temperature": 0.9},
}
FULL_ROWS = ("typical", "no repeated bigram")


@pytest.fixture(scope="module")
def target():
    return small_target(seed=3, scale=1.0, vocab_size=V, bos_token_id=1)


BLOCKS = {"transition": {}, "independent": {"independent": True}, "few predecessors": {"kept": 2}}


def block_of(kind: str, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    rows, given = torch.randn(SLOTS, V, generator=generator), torch.randn(V, V, generator=generator)
    return oracle_block(rows, given, K, **BLOCKS[kind])


def processors_of(target, ids, options):
    """What generate() makes of the options."""
    config = target._prepare_generation_config(
        None, do_sample=True, top_k=options.get("top_k", 0), **{k: v for k, v in options.items() if k != "top_k"}
    )[0]
    target._prepare_special_tokens(config, False, device="cpu", batch_size=1)
    return target._get_logits_processor(config, input_ids_seq_length=ids.shape[1], encoder_input_ids=ids, device="cpu")


def returned_q(block, ids, processors, draft, monkeypatch):
    """q as the walk returns it on the way to `draft`, whatever the dice say."""
    slots = iter(range(SLOTS))

    def loaded_dice(x):
        noise = torch.ones(x.shape)
        for row in noise:
            slot = next(slots)
            row[wanted[slot]] = 1e-30
        return noise

    if walk_name(processors, ids) == "rows":
        wanted = row_places(block, ids, processors, draft)
    else:
        wanted = [block.candidates[0, slot].tolist().index(token) for slot, token in enumerate(draft)]
    with monkeypatch.context() as patch:
        patch.setattr(walk_dspine, "noise_like", loaded_dice)
        result = walk(block, ids, processors, True, V)
    assert tuple(result.tokens[0].tolist()) == draft
    return result.log_q


def walk_name(processors, ids):
    kinds = [type(p) for p in processors]
    if all(kind in walk_dspine.ROW_WISE for kind in kinds):
        return "table"
    rest = [kind for kind in kinds if kind not in walk_dspine.ROW_WISE]
    return "candidates" if {kind.__name__ for kind in rest} == {"RepetitionPenaltyLogitsProcessor"} else "rows"


def row_places(block, ids, processors, draft):
    places, prefix = [], ids
    for slot, token in enumerate(draft, start=1):
        row = processors(prefix, block.row(slot, prefix[:, -1]).clone())
        places.append(row.topk(K).indices[0].tolist().index(token))
        prefix = torch.cat([prefix, torch.tensor([[token]])], dim=1)
    return places


def target_law(target, ids, processors):
    known = {}

    def p_of(tokens):
        if tokens not in known:
            full = torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], dim=1)
            known[tokens] = processors(full, target(full).logits[:, -1].float()).softmax(-1)[0].double()
        return known[tokens]

    return p_of


def exact_distance(target, options, name, kind, monkeypatch, damage=lambda q, draft: q):
    ids, block = prompt(6, seed=4, vocabulary=V), block_of(kind)
    processors = processors_of(target, ids, options)
    way = "rows" if name in FULL_ROWS else "candidates" if "repetition" in name else "table"
    assert walk_name(processors, ids) == way
    drafts = naive_drafts(block, ids, options, processors if name in FULL_ROWS else None)
    assert sum(drafts.values()) == pytest.approx(1.0)
    p_of = target_law(target, ids, processors)

    def q_of(draft):
        return damage(returned_q(block, ids, processors, draft, monkeypatch), draft).softmax(-1)[0].double()

    return distance_from_target(step_law(drafts, q_of, p_of), p_of)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_exact_law_of_a_step_is_the_targets(target, name, kind, monkeypatch):
    assert exact_distance(target, SETTINGS[name], name, kind, monkeypatch) < 1e-6


@pytest.mark.parametrize("name", ["T=0.7", "repetition penalty", "typical"])
def test_the_exact_law_exposes_a_wrong_q(target, name, monkeypatch):
    flattened = exact_distance(target, SETTINGS[name], name, "transition", monkeypatch, lambda q, draft: q * 0.8)
    assert flattened > 1e-3


def test_the_exact_law_exposes_a_q_that_takes_all_predecessors_for_cached(target, monkeypatch):
    block, damaged = block_of("few predecessors"), []

    def as_if_cached(q, draft):
        for slot in range(1, SLOTS):
            if draft[slot - 1] not in block.cached[slot - 1]:
                damaged.append(slot)
                row = block.row(slot + 1, torch.tensor([draft[slot - 1]]))[0]
                q[0, slot] = torch.where(q[0, slot] > float("-inf"), row, float("-inf"))
        return q

    assert exact_distance(target, {}, "T=1", "few predecessors", monkeypatch, as_if_cached) > 1e-3
    assert set(damaged) == {1, 2}


@pytest.mark.parametrize("name", SETTINGS)
def test_q_is_finite_log_probability_on_at_most_k_tokens(target, name):
    ids, block = prompt(6, seed=4, vocabulary=V), block_of("transition")
    draft = walk(block, ids, processors_of(target, ids, SETTINGS[name]), True, V)
    assert draft.log_q.shape == (1, SLOTS, V) and draft.log_q.dtype == torch.float32
    assert not draft.log_q.isnan().any()
    assert (draft.log_q > float("-inf")).sum(-1).max() <= K
    torch.testing.assert_close(draft.log_q.exp().sum(-1), torch.ones(1, SLOTS))
    assert (draft.log_q.gather(-1, draft.tokens[..., None]) > float("-inf")).all()


DRAWS = 20_000


def sampled(target, options, seed=0):
    """Counts of 20,000 drafts of the first two slots, and the probability that the returned q gives each."""
    ids, block = prompt(6, seed=4, vocabulary=V), block_of("transition")
    block.rows, block.candidates, block.unary = block.rows[:2], block.candidates[:, :2], block.unary[:, :2]
    block.transitions.pairs = block.transitions.pairs[:, :1]
    processors = processors_of(target, ids, options)
    counts, q_first, q_second = Counter(), None, {}
    torch.manual_seed(seed)
    with torch.no_grad():
        for _ in range(DRAWS):
            draft = walk(block, ids, processors, True, V)
            tokens = tuple(draft.tokens[0].tolist())
            counts[tokens] += 1
            if tokens[0] not in q_second:
                q_first, q_second[tokens[0]] = draft.log_q[0, 0], draft.log_q[0, 1]
    return counts, q_first, q_second


def expected_pairs(q_first, q_second):
    return {
        (a, b): float(q_first[a].double().exp() * row[b].double().exp())
        for a, row in q_second.items()
        for b in range(V)
        if row[b] > float("-inf")
    }


@pytest.mark.parametrize("name", ["T=1", "top-p", "repetition penalty", "typical"])
def test_the_sampler_draws_from_the_q_it_returns(target, name):
    counts, q_first, q_second = sampled(target, SETTINGS[name])
    assert chi_square_p(counts, expected_pairs(q_first, q_second), DRAWS) > 1e-4
    wrong_first = (q_first * 0.8).log_softmax(-1)
    wrong_second = {a: (row * 0.8).log_softmax(-1) for a, row in q_second.items()}
    assert chi_square_p(counts, expected_pairs(wrong_first, wrong_second), DRAWS) < 1e-6


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_an_overflow_in_the_drafter_leaves_q_a_distribution(poison):
    block = block_of("transition")
    block.transitions.pairs[:] = poison
    block.transitions.first[0, 1] = poison
    draft = walk(block, prompt(6, vocabulary=V), [], True, V)
    torch.testing.assert_close(draft.log_q.exp().sum(-1), torch.ones(1, SLOTS))


def test_a_minimum_length_forbids_the_end_until_it_is_reached_and_costs_nothing_after(monkeypatch):
    block, ids = block_of("transition"), prompt(6, vocabulary=V)
    best = int(block.candidates[0, 0, 0])
    minimum = [MinNewTokensLengthLogitsProcessor(5, 2, best), TemperatureLogitsWarper(0.01)]
    for _ in range(20):
        assert best not in walk(block, ids, minimum, True, V).tokens[0, :1]
    monkeypatch.delattr(walk_dspine, "_walk_rows")
    longer = torch.cat([ids, ids], dim=1)
    assert best in walk(block, longer, minimum, True, V).tokens[0, :1]
