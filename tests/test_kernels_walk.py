"""The walk in one launch: its choices and its q are those of `walk_dspine.walk` with transformers' warpers."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from dspine_hf import kernels, ops_dspine, walk_dspine
from helpers.borders import bordered
from helpers.guards import allocations  # noqa: F401

DEVICE = "cuda" if torch.cuda.is_available() and kernels.available("cuda") else "cpu"
if not kernels.available(DEVICE):
    pytest.skip(kernels.why_not(DEVICE), allow_module_level=True)

from dspine_hf.kernels.walk import walk_chain  # noqa: E402

from dspine_hf.transfer_dspine import TransitionCache  # noqa: E402

V = 60
SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_k_1": {"top_k": 1},
    "top_k_beyond_K": {"top_k": 50},
    "top_p": {"top_p": 0.8},
    "top_p_0": {"top_p": 0.0},
    "min_p": {"min_p": 0.1},
    "penalty": {"repetition_penalty": 1.7},
    "all": {"temperature": 0.6, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
}


def case(rows=3, slots=5, K=9, independent=False, seed=0, size=2.0):
    """candidates, first, pairs and noise, with poison around them; one token is a candidate of every slot."""
    torch.manual_seed(seed)
    candidates = torch.stack([torch.randperm(V - 1)[:K] for _ in range(rows * slots)]).view(rows, slots, K)
    candidates[..., -1] = V - 1
    first, pairs = size * torch.randn(rows, K), size * torch.randn(rows, slots - 1, 1 if independent else K, K)
    first[:, -1] += 2 * size
    pairs[..., -1] += 2 * size
    noise = torch.empty(rows, slots, K).exponential_()
    first, pairs, noise = (bordered(t.to(DEVICE)) for t in (first, pairs, noise))
    return bordered(candidates.to(DEVICE), V + 9), first, pairs, noise


def texts(rows, seed=1):
    """Token ids decided before, [rows, 8], and the table of seen tokens [rows, V]."""
    torch.manual_seed(seed)
    ids = torch.randint(0, V - 1, (rows, 8), device=DEVICE)
    return ids, torch.zeros(rows, V, dtype=torch.bool, device=DEVICE).scatter_(1, ids, True)


def processors(settings):
    """What transformers makes of the settings for a sampled call, in its order."""
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **settings})
    config._eos_token_tensor = None
    maker = GenerationMixin()
    maker.config = SimpleNamespace(is_encoder_decoder=False)
    return list(maker._get_logits_processor(config, logits_processor=[]))


def walked(row, candidates, first, pairs, noise, ids, made):
    """`walk_dspine.walk` on one batch row, with the given noise."""
    only, own = (None if pairs.shape[2] > 1 else torch.zeros_like(candidates[:1, 1:])), slice(row, row + 1)
    block = SimpleNamespace(
        candidates=candidates[own],
        transitions=TransitionCache(first[own], pairs[own], only),
        noise=None if noise is None else noise[own],
    )
    return walk_dspine.walk(block, ids[row : row + 1], made, noise is not None, V)


@pytest.mark.parametrize("independent", [False, True], ids=["pairs", "independent"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_sampled_walk_is_the_one_of_walk(settings, independent, allocations):  # noqa: F811
    settings = SETTINGS[settings]
    for seed in range(3):
        candidates, first, pairs, noise = case(independent=independent, seed=seed)
        ids, seen = texts(3, seed)
        tokens, path, log_q, _ = walk_chain(candidates, first, pairs, noise, seen, **settings)
        allocations.check(tokens, path, log_q)
        for row in range(3):
            draft = walked(row, candidates, first, pairs, noise, ids, processors(settings))
            assert torch.equal(tokens[row], draft.tokens[0])
            expected = draft.log_q[0].gather(1, candidates[row])
            torch.testing.assert_close(log_q[row], expected, rtol=0, atol=1e-5)
        assert torch.equal(candidates.gather(2, path[..., None])[..., 0], tokens)


@pytest.mark.parametrize("penalty", [1.0, 1.6, 0.8])
@pytest.mark.parametrize("independent", [False, True], ids=["pairs", "independent"])
def test_a_greedy_walk_is_the_one_of_walk(independent, penalty, allocations):  # noqa: F811
    candidates, first, pairs, _ = case(independent=independent)
    ids, seen = texts(3)
    tokens, path, log_q, chain = walk_chain(candidates, first, pairs, None, seen, repetition_penalty=penalty)
    allocations.check(tokens, path, log_q, chain)
    made = [] if penalty == 1.0 else [RepetitionPenaltyLogitsProcessor(penalty)]
    for row in range(3):
        assert torch.equal(tokens[row], walked(row, candidates, first, pairs, None, ids, made).tokens[0])
    assert torch.equal(log_q.exp().argmax(-1), path) and torch.equal(log_q.exp().sum(-1), torch.ones_like(chain))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 4), (1, 31, 32), (2, 4, 16), (1, 3, 17)], ids=str)
@pytest.mark.parametrize("settings", ["plain", "all"])
def test_every_shape_gives_what_the_eager_operation_gives(shape, settings, allocations):  # noqa: F811
    candidates, first, pairs, noise = case(*shape)
    seen = texts(shape[0])[1]
    found = walk_chain(candidates, first, pairs, noise, bordered(seen, True), **SETTINGS[settings])
    allocations.check(*found)
    expected = ops_dspine.walk_chain(candidates, first, pairs, noise, seen, **SETTINGS[settings])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_token_chosen_on_the_way_counts_as_seen():
    candidates, first, pairs, _ = case(slots=4)
    first[:, -1], pairs[..., -1] = 9.0, 9.0
    nothing = torch.zeros(3, V, dtype=torch.bool, device=DEVICE)
    tokens = walk_chain(candidates, first, pairs, None, nothing, repetition_penalty=1e3)[0]
    free = walk_chain(candidates, first, pairs)[0]
    assert (free == V - 1).sum(1).min() > 1, "without a penalty the common token repeats"
    assert (tokens == V - 1).sum(1).max() == 1


def test_the_chain_holds_the_log_probabilities_before_penalty_and_warpers():
    candidates, first, pairs, noise = case()
    seen = texts(3)[1]
    _, path, _, chain = walk_chain(candidates, first, pairs, noise, seen, **SETTINGS["all"])
    for row in range(3):
        scores = first[row]
        for slot in range(5):
            torch.testing.assert_close(chain[row, slot], scores.log_softmax(-1)[path[row, slot]], rtol=0, atol=1e-5)
            scores = pairs[row, slot, path[row, slot]] if slot < 4 else scores


@pytest.mark.parametrize("settings", ["plain", "top_p", "all"])
def test_scores_that_are_not_finite_are_never_chosen_over_finite_ones(settings):
    candidates, first, pairs, noise = case()
    first[0, 0], first[0, 1], pairs[1, :, :, 2], pairs[2, 1] = float("nan"), float("-inf"), float("nan"), float("inf")
    ids, seen = texts(3)
    found = walk_chain(candidates, first, pairs, noise, seen, **SETTINGS[settings])
    assert not any(t.isnan().any() for t in found)
    for row in range(3):
        made = processors(SETTINGS[settings])
        draft = walked(row, candidates, first, pairs, noise, ids, made)
        assert torch.equal(found[0][row], draft.tokens[0])
        expected = draft.log_q[0].gather(1, candidates[row])
        torch.testing.assert_close(found[2][row].exp(), expected.exp(), rtol=0, atol=1e-5)


def test_equal_scores_are_kept_or_removed_together_by_top_k():
    candidates, first, pairs, noise = case(slots=1, K=6)
    first.copy_(torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0, 0.0]))
    kept = walk_chain(candidates, first, pairs, noise, None, top_k=2)[2] > float("-inf")
    assert kept.tolist() == [[[True, True, True, True, False, False]]] * 3


def test_half_precision_scores_are_taken_as_they_are():
    candidates, first, pairs, noise = case()
    found = walk_chain(candidates, first.half(), pairs.half(), noise)
    expected = ops_dspine.walk_chain(candidates, first.half(), pairs.half(), noise)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", ["first", "pairs", "noise", "seen", "temperature", "top_p"])
def test_inputs_that_do_not_belong_together_are_refused(wrong):
    candidates, first, pairs, noise = case()
    bad = {"first": (first[:2], pairs), "pairs": (first, pairs[:, :, :4])}.get(wrong, (first, pairs))
    options = {
        "noise": {"noise": noise.double()},
        "seen": {"seen": torch.zeros(2, V, dtype=torch.bool, device=DEVICE)},
        "temperature": {"temperature": 0.0},
        "top_p": {"top_p": 1.5},
    }.get(wrong, {})
    with pytest.raises(ValueError, match="expected"):
        walk_chain(candidates, *bad, **options)


def test_the_operation_can_be_traced():
    candidates, first, pairs, noise = case(slots=3)
    seen = texts(3)[1]
    torch.library.opcheck(kernels._ops.ops.walk_chain, (candidates, first, pairs, noise, seen, 0.7, 5, 0.9, 0.1, 1.2))
