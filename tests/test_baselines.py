"""The baselines start as DFlash, learn, draft what a slow loop drafts, and share the chunked loss."""

import pytest
import torch
import torch.nn.functional as F

from drafter_cases import redraw, tiny_target
from dspine_hf import DSpineDraftModel
from dspine_hf.baselines import BASELINES, PUBLISHED_WEIGHTS, top_tokens, with_label
from dspine_hf.losses import LossWeights, token_loss
from dspine_hf.objective import SequenceBatch, training_loss
from dspine_hf.offline import best_chain, draft_from_anchors, offline_walk

SHAPES = {"num_hidden_layers": 2, "block_size": 5, "transfer_rank": 6, "num_candidates": 4, "target_layer_ids": [1, 3]}
PAIRS = ("dspark", "dflash2")


def build(name, target, seed=3, **overrides):
    torch.manual_seed(seed)
    values = {**SHAPES, "pair_rank": 8, **overrides}
    if name == "dflash":
        return DSpineDraftModel.for_target(target, injection="none", selection="independent", **values)
    return BASELINES[name](target, **values)


def hidden_states(target, tokens, layer_ids):
    output = target(tokens, output_hidden_states=True)
    return torch.cat([output.hidden_states[i + 1] for i in layer_ids], dim=-1)


def learnable_batch(target, drafter, rows=3, length=24):
    """Sequences that repeat a permutation of the vocabulary, with a few anchors each."""
    torch.manual_seed(4)
    order = torch.randperm(target.config.vocab_size)
    tokens = torch.stack([order.roll(-i)[:length] for i in range(rows)])
    features = hidden_states(target, tokens, drafter.config.target_layer_ids)
    anchors = torch.tensor([[5, 9, 14, 18]]).expand(rows, -1)
    lengths, prompts = torch.full((rows,), length), torch.full((rows,), 3)
    return SequenceBatch(tokens, lengths, prompts, features, anchors)


@pytest.mark.parametrize("name", BASELINES)
def test_the_loss_falls_and_every_trained_part_gets_a_gradient(name):
    target = tiny_target()
    drafter = build(name, target)
    view, batch = drafter.bind_target(target), learnable_batch(target, drafter)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    losses, moved = [], {}
    for _ in range(40):
        loss, parts = training_loss(drafter, view, batch, PUBLISHED_WEIGHTS[name], forcing_probability=0.0)
        optimizer.zero_grad()
        loss.backward()
        for key, weight in drafter.named_parameters():
            moved[key] = moved.get(key, False) or (weight.grad is not None and bool(weight.grad.any()))
        optimizer.step()
        losses.append(loss.item())
    assert all(moved.values()), [key for key, value in moved.items() if not value]
    assert losses[-1] < 0.5 * losses[0]
    assert parts["conditional_accuracy"].shape == (drafter.config.num_draft_slots,)


@pytest.mark.parametrize("name", PAIRS)
def test_a_fresh_pair_drafter_drafts_what_dflash_drafts(name):
    target = tiny_target()
    drafters = [build(kind, target) for kind in ("dflash", name)]
    tokens = torch.randint(0, target.config.vocab_size, (20,))
    features = hidden_states(target, tokens[None], SHAPES["target_layer_ids"])
    anchors = torch.arange(2, 19)
    plain, fresh = (draft_from_anchors(d, d.bind_target(target), features, anchors, tokens[anchors]) for d in drafters)
    assert torch.equal(plain, fresh)
    same = dict(drafters[0].named_parameters())
    assert all(torch.equal(w, same[k]) for k, w in drafters[1].named_parameters() if not k.startswith("pair."))


def slow_pair_draft(name, drafter, view, target, features, tokens, anchor):
    """One block drafted slot by slot from its own cache, with the formulas written out."""
    cache = drafter.new_cache()
    drafter.extend_context(cache, features[:, :anchor], torch.arange(anchor)[None])
    block = DSpineDraftModel.draft_block(drafter, view, cache, tokens[anchor].view(1), torch.tensor([anchor]))
    E, pair = target.get_output_embeddings().weight, drafter.pair
    previous, drafted = int(tokens[anchor]), []
    for slot in range(1, drafter.config.block_size):
        h = drafter.norm(block._output.hidden[0, 0, slot])
        left = pair.A[previous] if name == "dspark" else pair.A[previous] * (pair.H.weight @ h)
        scores = E @ h + pair.B @ left
        allowed = range(len(E)) if name == "dspark" else block.candidates[0, slot - 1].tolist()
        previous = max(allowed, key=lambda b: float(scores[b]))
        drafted.append(previous)
    return drafted


@pytest.mark.parametrize("name", PAIRS)
def test_offline_drafts_and_drafted_blocks_equal_a_slow_loop(name):
    target = tiny_target()
    drafter = redraw(build(name, target), 7)
    drafter.pair.B.mul_(8.0)  # strong enough to change what is drafted
    view = drafter.bind_target(target)
    tokens = torch.randint(0, target.config.vocab_size, (16,))
    features = hidden_states(target, tokens[None], SHAPES["target_layer_ids"])
    anchors = torch.arange(3, 15)
    drafts = draft_from_anchors(drafter, view, features, anchors, tokens[anchors])
    unconditioned = 0
    for anchor, drafted in zip(anchors.tolist(), drafts.tolist(), strict=True):
        assert drafted == slow_pair_draft(name, drafter, view, target, features, tokens, anchor)
        cache = drafter.new_cache()
        drafter.extend_context(cache, features[:, :anchor], torch.arange(anchor)[None])
        block = drafter.draft_block(view, cache, tokens[anchor].view(1), torch.tensor([anchor]))
        assert best_chain(block.candidates, block.transitions)[0].tolist() == drafted
        row = block.row(2, torch.tensor(drafted[:1]))
        index = block.candidates[0, 0].tolist().index(drafted[0])
        torch.testing.assert_close(row[0, block.candidates[0, 1]], block.transitions.pairs[0, 0, index])
        unconditioned += drafted == view.logits(drafter.norm(block._output.hidden[0, 0, 1:])).argmax(-1).tolist()
    assert unconditioned < len(anchors)


def test_eagle_drafts_equal_a_loop_that_runs_the_layer_over_the_whole_text_at_every_step():
    target = tiny_target()
    drafter = redraw(build("eagle3", target), 7)
    view, layer = drafter.bind_target(target), drafter.layers[0]
    tokens = torch.randint(0, target.config.vocab_size, (12,))
    features = hidden_states(target, tokens[None], SHAPES["target_layer_ids"])
    anchors = torch.arange(1, 11)
    drafts = draft_from_anchors(drafter, view, features, anchors, tokens[anchors], tokens)
    with pytest.raises(ValueError, match="pass tokens="):
        draft_from_anchors(drafter, view, features, anchors, tokens[anchors])
    for anchor, drafted in zip(anchors.tolist(), drafts.tolist(), strict=True):
        text = tokens[: anchor + 1].tolist()
        known = drafter.hidden_norm(drafter.fc(features[0, :anchor]))
        rows = [torch.zeros(drafter.config.hidden_size), *known]
        for _ in range(drafter.config.num_draft_slots):
            h = torch.stack(rows)[None]
            x = layer.joined(view.embed(torch.tensor([text])), h)
            cos, sin = drafter.rotary_emb(x, torch.arange(len(text))[None])
            attention, causal = layer.self_attn, torch.ones(len(text), len(text), dtype=torch.bool).tril()[None, None]
            out = attention(attention.queries(x, cos, sin), *attention.keys_values(x, cos, sin), causal)
            state = layer.feed_forward(h + out)[0, -1]
            text.append(int(view.logits(drafter.norm(state)).argmax()))
            rows.append(state)
        assert drafted == text[anchor + 1 :]


def test_eagle_training_states_are_those_it_drafts_from():
    target = tiny_target()
    drafter = redraw(build("eagle3", target), 7)
    view, batch = drafter.bind_target(target), learnable_batch(target, drafter)
    states, chosen = drafter.unroll(view, batch.features, batch.tokens, batch.anchors)
    start = batch.tokens.gather(1, batch.anchors).unsqueeze(-1)
    again, _ = drafter.unroll(
        view, batch.features, batch.tokens, batch.anchors, torch.cat([start, chosen[..., :-1]], dim=-1)
    )
    torch.testing.assert_close(again, states)


@pytest.mark.parametrize("name", BASELINES)
def test_the_offline_walk_covers_the_continuation_and_a_reload_keeps_it(name, tmp_path):
    target = tiny_target()
    drafter = redraw(build(name, target), 7)
    tokens = torch.randint(0, target.config.vocab_size, (20,))
    features = hidden_states(target, tokens[None], SHAPES["target_layer_ids"])
    walk = offline_walk(drafter, drafter.bind_target(target), features, tokens, 5)
    drafter.save_pretrained(tmp_path)
    again = type(drafter).from_pretrained(tmp_path).eval()
    assert offline_walk(again, again.bind_target(target), features, tokens, 5) == walk
    assert walk.new_tokens == 15 and walk.rounds > 0


@pytest.mark.parametrize("settings", [{}, {"distill": 0.4, "total_variation": 0.7}], ids=["tokens", "teacher"])
def test_extra_columns_of_the_chunked_loss_get_the_gradients_of_autograd(settings):
    torch.manual_seed(5)
    n, d, r, vocabulary, weights = 23, 7, 3, 31, LossWeights(**settings)
    head, teacher = torch.randn(vocabulary, d), torch.randn(n, d)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((n, d), (n, r), (vocabulary, r))]
    labels, rows = torch.randint(vocabulary, (n,)), torch.rand(n)
    hidden, codes, columns = leaves
    loss, hits = token_loss(
        hidden, hidden, head, labels, rows, 2 * rows, teacher, weights, chunk=5, extra=(codes, columns)
    )
    found = torch.autograd.grad(3 * loss, leaves)
    truth = torch.softmax(teacher @ head.T, -1)
    expected = 0.0
    streams = (hidden @ head.T, hidden @ head.T + codes @ columns.T)
    for logits, share in zip(streams, (1.0, 2.0), strict=True):
        target = weights.distill * truth + (1 - weights.distill) * F.one_hot(labels, vocabulary)
        terms = -(target * logits.log_softmax(-1)).sum(-1)
        terms = terms + weights.total_variation * 0.5 * (logits.softmax(-1) - truth).abs().sum(-1)
        expected = expected + share * (terms * rows).sum()
    torch.testing.assert_close(loss, expected)
    for a, b in zip(found, torch.autograd.grad(3 * expected, leaves), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(hits, torch.stack([x.argmax(-1) == labels for x in streams]))


def test_a_missing_label_takes_the_last_place_among_the_candidates():
    hidden, head = torch.randn(6, 5), torch.randn(9, 5)
    best = (hidden @ head.T).argsort(-1, descending=True)
    labels = torch.stack([best[0, 0], best[1, 1], best[2, 2], best[3, 3], best[4, 7], best[5, 8]])
    candidates, place, covered = with_label(top_tokens(hidden, head, 3, chunk=4), labels)
    assert place.tolist() == [0, 1, 2, 2, 2, 2]
    assert covered.tolist() == [True, True, True, False, False, False]
    assert torch.equal(candidates.gather(1, place.unsqueeze(1)).squeeze(1), labels)
    assert torch.equal(candidates[:, :2], best[:, :2])


def test_a_detached_selector_leaves_the_unary_logits_to_their_own_loss():
    target = tiny_target()
    gradients = []
    for detach in (False, True):
        drafter = build("dflash2", target, detach_unary=detach)
        view, batch = drafter.bind_target(target), learnable_batch(target, drafter)
        loss, _ = training_loss(drafter, view, batch, LossWeights(unary=0.0, conditional=1.0))
        gradients.append(torch.autograd.grad(loss, drafter.norm.weight)[0])
    assert gradients[0].any() and not gradients[1].any()
