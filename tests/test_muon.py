"""The Muon optimiser: orthogonal updates on matrices, AdamW on vectors."""

from copy import deepcopy as copy_of

import torch

from dspine_hf.muon import MuonAdamW, orthogonalise


def test_orthogonalised_matrices_have_singular_values_near_one():
    for shape in ((3, 16, 40), (2, 40, 16), (1, 24, 24)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)).float())
        assert values.min() > 0.3 and values.max() < 1.5


def test_vectors_follow_adamw_exactly():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 7)) for _ in range(2))
    a = MuonAdamW([("x", ours)], lr=0.1)
    b = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(5):
        ours.grad = torch.randn(7)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs)


def test_matrices_learn_and_the_state_survives_a_reload():
    torch.manual_seed(0)
    target, x = torch.randn(8, 6), torch.randn(64, 6)
    layer = torch.nn.Linear(6, 8)
    optimizer = MuonAdamW(layer.named_parameters(), lr=0.2)

    def step(module, opt):
        loss = (module(x) - x @ target.T).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    losses = [step(layer, optimizer) for _ in range(100)]
    assert losses[-1] < 0.5 * losses[0]
    copy = torch.nn.Linear(6, 8)
    copy.load_state_dict(layer.state_dict())
    other = MuonAdamW(copy.named_parameters(), lr=0.2)
    other.load_state_dict(copy_of(optimizer.state_dict()))
    for _ in range(3):
        step(layer, optimizer)
        step(copy, other)
    torch.testing.assert_close(layer.weight, copy.weight)
