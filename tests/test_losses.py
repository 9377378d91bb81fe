"""The chunked token loss has the value and gradients of autograd over whole logits, for every kind of head."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drafter_cases import random_context, tiny_drafter, tiny_target
from dspine_hf.losses import LossWeights, token_loss
from dspine_hf.objective import SequenceBatch, block_loss
from dspine_hf.seeds import hashed_uniform

ROWS, WIDTH, VOCABULARY = 23, 12, 37
HEADS = {
    "plain": (1.0, None, False),
    "scaled": (0.25, None, False),
    "capped": (1.0, 3.0, False),
    "biased": (1.0, None, True),
    "scaled, capped and biased": (1.7, 2.0, True),
}
TERMS = {
    "tokens": LossWeights(),
    "distillation": LossWeights(distill=0.4, teacher_temperature=1.3),
    "total variation": LossWeights(distill=1.0, total_variation=0.6),
}


def logits_of(hidden, weight, shape):
    scale, cap, bias = shape
    raw = scale * (hidden @ weight.T + (0 if bias is None else bias))
    return raw if cap is None else cap * torch.tanh(raw / cap)


def plain_loss(hidden, weight, shape, labels, row_weights, teacher, terms):
    """The same loss, written over whole logits for autograd."""
    log_q = logits_of(hidden, weight, shape).log_softmax(-1)
    p = torch.softmax(logits_of(teacher, weight, shape) / terms.teacher_temperature, -1)
    token = F.nll_loss(log_q, labels, reduction="none")
    rows = (1 - terms.distill) * token - terms.distill * (p * log_q).sum(-1)
    rows = rows + terms.total_variation * 0.5 * (log_q.exp() - p).abs().sum(-1)
    return (rows * row_weights).sum()


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("head", HEADS)
def test_value_and_gradients_are_those_of_autograd(head, terms):
    torch.manual_seed(0)
    scale, cap, biased = HEADS[head]
    weight, bias = torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY) if biased else None
    shape = None if head == "plain" else (scale, cap, bias)
    unary, conditional = (torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(2))
    labels, teacher = torch.randint(VOCABULARY, (ROWS,)), torch.randn(ROWS, WIDTH)
    row_weights = torch.rand(2, ROWS)
    loss, hits = token_loss(
        unary, conditional, weight, labels, *row_weights, teacher, TERMS[terms], chunk=7, shape=shape
    )
    (loss * 2.5).backward()
    found = unary.grad.clone(), conditional.grad.clone()
    unary.grad = conditional.grad = None
    full = (scale, cap, bias)
    expected = sum(
        plain_loss(x, weight, full, labels, w, teacher, TERMS[terms])
        for x, w in zip((unary, conditional), row_weights, strict=True)
    )
    (expected * 2.5).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, (unary.grad, conditional.grad), rtol=1e-4, atol=1e-6)
    assert torch.equal(hits[0], logits_of(unary, weight, full).argmax(-1) == labels)


def head_of(target, biased):
    """The target with another head: a bias, drawn afresh."""
    if biased:
        head = nn.Linear(target.config.hidden_size, target.config.vocab_size)
        with torch.no_grad():
            head.weight.copy_(target.get_output_embeddings().weight)
            head.bias.normal_(0, 2.0)
        target.set_output_embeddings(head)
    return target


@pytest.mark.parametrize("head", HEADS)
def test_training_sees_the_scores_that_drafting_uses(head):
    scale, cap, biased = HEADS[head]
    target = head_of(tiny_target(), biased)
    drafter = tiny_drafter(target, logit_scale=scale, logit_softcap=cap)
    view = drafter.bind_target(target)
    length, slots = 14, drafter.config.num_draft_slots
    features, _ = random_context(length, drafter.config)
    tokens = torch.randint(0, 61, (1, length))
    batch = SequenceBatch(
        tokens, torch.tensor([length]), torch.tensor([3]), features[None], anchors=torch.tensor([[6]])
    )
    weights = LossWeights(unary=0.0, conditional=1.0, layer=0.0, gamma=1e9)
    loss, _ = block_loss(drafter, view, batch, weights)
    cache = drafter.new_cache()
    drafter.extend_context(cache, features[None, :6], torch.arange(6)[None])
    block = drafter.draft_block(view, cache, tokens[:, 6], torch.tensor([6]))
    rows = [
        block.row(slot, tokens[:, 5 + slot]).log_softmax(-1)[0, tokens[0, 6 + slot]] for slot in range(1, slots + 1)
    ]
    torch.testing.assert_close(loss, -torch.stack(rows).mean(), rtol=1e-4, atol=1e-5)
    assert (view.logit_shape is None) == (head == "plain")


def test_given_forcing_is_used_and_changes_the_unary_loss():
    target = tiny_target()
    drafter = tiny_drafter(target)
    view = drafter.bind_target(target)
    features, _ = random_context(14, drafter.config)
    batch = SequenceBatch(
        torch.randint(0, 61, (1, 14)), torch.tensor([14]), torch.tensor([3]), features[None], torch.tensor([[4, 8]])
    )
    weights = LossWeights(layer=0.0)
    free, _ = block_loss(drafter, view, batch, weights)
    slots = drafter.config.num_draft_slots
    batch.forcing = hashed_uniform(1, 2, torch.tensor([0]), 2 * slots).view(1, 2, slots) < 0.0
    torch.testing.assert_close(block_loss(drafter, view, batch, weights)[0], free)
    batch.forcing = torch.ones(1, 2, slots, dtype=torch.bool)
    forced, _ = block_loss(drafter, view, batch, weights)
    batch.forcing = None
    torch.testing.assert_close(block_loss(drafter, view, batch, weights, forcing_probability=1.0)[0], forced)
    assert abs(float(forced - free)) > 1e-3
