"""The transfer space whitens the output embedding, and stays fp32 whatever the model is cast to."""

import pytest
import torch

from drafter_cases import tiny_target
from dspine_hf import DSpineDraftModel, transfer_dspine
from dspine_hf.transfer_dspine import TransferSpace, TransitionCache, fit_whitening

V, D = 400, 20


def embedding(seed: int = 0, spread: float = 30.0) -> torch.Tensor:
    """Correlated rows with a mean far from zero: [V, D] fp32."""
    torch.manual_seed(seed)
    return torch.randn(V, D) @ torch.randn(D, D) * torch.logspace(0, -1, D) + torch.randn(D) * spread


def moments(features: torch.Tensor, weights: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    w = torch.ones(len(features), dtype=torch.float64) if weights is None else weights.double()
    w = w / w.sum()
    mean = w @ features
    centred = features - mean
    return mean, centred.T @ (centred * w[:, None])


@pytest.mark.parametrize("rank", [1, 8, D])
def test_features_have_zero_mean_and_unit_covariance_on_the_kept_directions(rank):
    E = embedding()
    W, c = fit_whitening(E, rank)
    assert W.shape == (rank, D) and c.shape == (rank,) and W.dtype == c.dtype == torch.float32
    mean, covariance = moments(E.double() @ W.double().T + c.double())
    torch.testing.assert_close(covariance, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(mean, torch.zeros(rank, dtype=torch.float64), rtol=0, atol=1e-4)


def test_the_kept_directions_are_those_of_largest_variance():
    E = embedding()
    W, _ = fit_whitening(E, 6)
    centred = E.double() - E.double().mean(0)
    _, singular, right = torch.linalg.svd(centred, full_matrices=False)
    variances = singular.square() / V
    torch.testing.assert_close((W.double().norm(dim=1) ** -2), variances[:6], rtol=1e-5, atol=0)
    alignment = (torch.nn.functional.normalize(W.double(), dim=1) * right[:6]).sum(1).abs()
    torch.testing.assert_close(alignment, torch.ones_like(alignment), rtol=0, atol=1e-6)


def test_the_sign_of_each_direction_makes_its_largest_component_positive():
    W, _ = fit_whitening(embedding(), 8)
    assert bool((W.gather(1, W.abs().argmax(1, keepdim=True)) > 0).all())


def test_the_fit_does_not_depend_on_the_order_of_the_tokens():
    E = embedding()
    permutation = torch.randperm(V, generator=torch.Generator().manual_seed(1))
    for found, wanted in zip(fit_whitening(E[permutation], 8), fit_whitening(E, 8), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_fit_is_computed_in_double_precision():
    """With a mean a million times the spread, fp32 sums would leave nothing of the covariance."""
    torch.manual_seed(0)
    E = torch.randn(V, D, dtype=torch.float64) + 1e6
    W, _ = fit_whitening(E, D)
    _, covariance = moments(E @ W.double().T)
    torch.testing.assert_close(covariance, torch.eye(D, dtype=torch.float64), rtol=0, atol=1e-4)


def test_weights_count_a_token_as_often_as_it_occurs():
    E = embedding()
    counts = torch.randint(0, 4, (V,), generator=torch.Generator().manual_seed(2))
    W, c = fit_whitening(E, 8, counts)
    mean, covariance = moments(E.double() @ W.double().T + c.double(), counts)
    torch.testing.assert_close(covariance, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(mean, torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-4)
    for found, wanted in zip((W, c), fit_whitening(E.repeat_interleave(counts, dim=0), 8), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert (W - fit_whitening(E, 8)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("weights", [torch.zeros(V), -torch.ones(V), torch.ones(V - 1)])
def test_weights_that_are_no_frequencies_are_refused(weights):
    with pytest.raises(ValueError, match="token_weights"):
        fit_whitening(embedding(), 8, weights)


def test_a_rank_above_the_width_is_refused():
    with pytest.raises(ValueError, match="rank"):
        fit_whitening(embedding(), D + 1)


def test_an_embedding_of_lower_rank_gives_finite_features():
    E = torch.randn(V, 3) @ torch.randn(3, D)
    space = TransferSpace(8, D, 1e-6)
    space.fit(E)
    assert bool(space(E).isfinite().all()) and bool(space.W.isfinite().all())
    mean, covariance = moments(E.double() @ space.W[:3].double().T + space.c[:3].double())
    torch.testing.assert_close(covariance, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-4)


def test_phi_is_the_normed_whitened_row():
    E = embedding()
    space = TransferSpace(8, D, 1e-6)
    space.fit(E)
    feature = E.double() @ space.W.double().T + space.c.double()
    wanted = feature / (feature.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(space(E).double(), wanted, rtol=0, atol=2e-4)
    torch.testing.assert_close(space(E).square().mean(-1), torch.ones(V), rtol=0, atol=1e-4)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64])
def test_phi_stays_fp32_under_any_cast(cast):
    target = tiny_target()
    drafter = DSpineDraftModel.for_target(target, num_hidden_layers=2, transfer_rank=6, target_layer_ids=[1, 3])
    before = {name: value.clone() for name, value in drafter.transfer.state_dict().items()}
    rows = target.get_output_embeddings().weight[:9].to(torch.bfloat16)
    wanted = drafter.transfer(rows)
    drafter.to(cast)
    assert drafter.fc.weight.dtype == cast
    for name, value in drafter.transfer.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])
    assert drafter.transfer(rows).dtype == torch.float32
    assert torch.equal(drafter.transfer(rows), wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(drafter.transfer(rows), wanted)


def test_a_fresh_drafter_has_the_space_of_its_target_fitted():
    target = tiny_target()
    drafter = DSpineDraftModel.for_target(target, num_hidden_layers=2, transfer_rank=6, target_layer_ids=[1, 3])
    W, c = fit_whitening(target.get_output_embeddings().weight, 6)
    assert torch.equal(drafter.transfer.W, W) and torch.equal(drafter.transfer.c, c)
    assert c.abs().max() > 0.1
    counts = torch.arange(target.config.vocab_size)
    weighted = DSpineDraftModel.for_target(
        target, counts, num_hidden_layers=2, transfer_rank=6, target_layer_ids=[1, 3]
    )
    assert torch.equal(weighted.transfer.W, fit_whitening(target.get_output_embeddings().weight, 6, counts)[0])


def test_phi_of_a_bound_target_uses_its_output_embedding():
    target = tiny_target()
    drafter = DSpineDraftModel.for_target(target, num_hidden_layers=2, transfer_rank=6, target_layer_ids=[1, 3])
    ids = torch.tensor([[3, 60], [0, 7]])
    wanted = drafter.transfer(target.get_output_embeddings().weight[ids])
    assert torch.equal(drafter.bind_target(target).phi(ids), wanted)


def test_the_transition_cache_looks_up_the_row_of_the_chosen_predecessor():
    cache = TransitionCache(torch.randn(2, 4), torch.randn(2, 3, 4, 4))
    assert torch.equal(cache.scores(1, None), cache.first)
    previous = torch.tensor([2, 0])
    for slot in (2, 3, 4):
        wanted = torch.stack([cache.pairs[0, slot - 2, 2], cache.pairs[1, slot - 2, 0]])
        assert torch.equal(cache.scores(slot, previous), wanted)


def test_the_fit_does_not_depend_on_how_many_rows_it_reads_at_once(monkeypatch):
    E, counts = embedding(), torch.arange(V)
    whole = fit_whitening(E, 8, counts)
    monkeypatch.setattr(transfer_dspine, "ROWS_AT_ONCE", 37)
    for found, wanted in zip(fit_whitening(E, 8, counts), whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
