"""The drafter computes what the method says (arXiv 2609.36173): it equals the formulas, written out in plain loops."""

import pytest
import torch

from drafter_cases import filled_cache, plain_config, random_context, target_weights, tiny_drafter, tiny_target
from reference_loop import DETAILS, TERMS, LoopDraft

TOLERANCE = 2e-5  # of the largest value: fp32 against fp64
VISIBLE = 1e-2
ANCHOR = 7


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def draft_both(target, drafter, rows=6, first_position=0, anchor_position=None, pieces=None, without=None, slots=None):
    """One draft by the model and one by the transcription: ((output, block), plain draft)."""
    features, positions = random_context(rows, drafter.config, first_position=first_position)
    anchor_position = first_position + rows if anchor_position is None else anchor_position
    model = draft_by_model(target, drafter, features, positions, anchor_position, pieces, slots)
    config = plain_config(drafter.config, **({} if slots is None else {"block_size": slots + 1}))
    loop = LoopDraft(drafter.state_dict(), config, target_weights(target), without)
    return model, loop(features, positions, ANCHOR, anchor_position)


def draft_by_model(target, drafter, features, positions, anchor_position, pieces=None, slots=None):
    view, cache = drafter.bind_target(target), filled_cache(drafter, features, positions, pieces)
    slots = drafter.config.num_draft_slots if slots is None else slots
    anchor = torch.tensor([ANCHOR])
    block = drafter.draft_block(view, cache, anchor, torch.tensor([anchor_position]), num_slots=slots)
    places = torch.arange(anchor_position, anchor_position + slots + 1).view(1, 1, -1)
    embeds = drafter.block_embeds(view, anchor.view(1, 1), slots)
    return drafter(embeds, view.phi(anchor.view(1, 1)), places, cache), block


def deviation(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1.0))


def score_deviation(drafter, target, model, plain) -> float:
    """Largest difference in what decoding reads: full unary rows, and full rows given every candidate."""
    output, block = model
    view = drafter.bind_target(target)
    worst = deviation(view.logits(drafter.norm(output.hidden[0, 0, 1:])), plain.unary)
    if block.transitions is None:
        return worst
    candidates = block.candidates[0]
    same = bool((candidates == plain.candidates).all())
    for slot, rows in enumerate(plain.scores, start=1):
        known = [ANCHOR] if slot == 1 else candidates[slot - 2].tolist()
        found = torch.cat([block.row(slot, torch.tensor([token])) for token in known])
        if same:  # rows of other predecessors say nothing; the unary rows already differ then
            worst = max(worst, deviation(found, rows))
    return worst


def model_walk(block) -> list[int]:
    if block.transitions is None:
        return block.candidates[0, :, 0].tolist()
    walk, index = [], None
    for slot in range(1, block.candidates.shape[1] + 1):
        index = block.transitions.scores(slot, index).argmax(dim=-1)
        walk.append(int(block.candidates[0, slot - 1, index]))
    return walk


def assert_equal_drafts(drafter, target, model, plain):
    output, block = model
    assert deviation(output.hidden[0, 0], torch.stack(plain.layer_outputs[-1])) < TOLERANCE
    assert deviation(drafter.norm(output.hidden[0, 0]), plain.hidden) < TOLERANCE
    written = [torch.stack(z[1:]) for z in plain.z if z is not None]
    assert len(output.features) == len(written)
    for found, wanted in zip(output.features, written, strict=True):
        assert found.dtype == torch.float32
        assert deviation(found[0, 0], wanted) < TOLERANCE
    assert block.candidates[0].tolist() == plain.candidates.tolist()
    assert deviation(block.unary[0], plain.unary.gather(-1, plain.candidates)) < TOLERANCE
    assert score_deviation(drafter, target, model, plain) < TOLERANCE
    if block.transitions is not None:
        assert deviation(block.transitions.first, plain.pairs(1)) < TOLERANCE
        for slot in range(2, len(plain.scores) + 1):
            assert deviation(block.transitions.pairs[0, slot - 2], plain.pairs(slot)) < TOLERANCE
        assert model_walk(block) == plain.walk


CASES = {
    "all, after the layer": {},
    "all, before the MLP": {"injection_placement": "mlp"},
    "last, after the layer": {"injection": "last"},
    "last, before the MLP": {"injection": "last", "injection_placement": "mlp"},
    "all, slots chosen alone": {"selection": "independent"},
    "last, slots chosen alone": {"injection": "last", "selection": "independent"},
    "no injection": {"injection": "none", "selection": "independent"},
    "one write more done again": {"rewrite_layers": 1},
    "every write done again, before the MLP": {"rewrite_layers": 2, "injection_placement": "mlp"},
    "one head per key head": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 10},
    "mask token": {"mask_token_id": 3},
    "one layer, one tap": {"num_hidden_layers": 1, "target_layer_ids": [2]},
    "two slots": {"block_size": 2},
    "full rank": {"transfer_rank": 24},
    "scaled and capped logits": {"logit_scale": 0.7, "logit_softcap": 3.0, "embedding_scale": 1.7},
    "context window": {"context_window": 4},
    "scaled rotary": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    "large epsilon": {"rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES.keys())
def test_the_model_equals_the_loop_transcription(target, overrides):
    drafter = tiny_drafter(target, **overrides)
    model, plain = draft_both(target, drafter)
    assert_equal_drafts(drafter, target, model, plain)


@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize("placement", ["layer", "mlp"])
def test_the_model_equals_the_transcription_for_any_draw_of_the_weights(placement, seed):
    target = tiny_target(seed)
    drafter = tiny_drafter(target, seed=seed, injection_placement=placement)
    model, plain = draft_both(target, drafter)
    assert_equal_drafts(drafter, target, model, plain)


@pytest.mark.parametrize("rows", [0, 1, 2, 9])
def test_the_model_equals_the_transcription_at_any_context_length(target, rows):
    drafter = tiny_drafter(target)
    model, plain = draft_both(target, drafter, rows=rows)
    assert_equal_drafts(drafter, target, model, plain)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_shorter_block_is_a_draft_of_its_own(target, slots):
    drafter = tiny_drafter(target)
    model, plain = draft_both(target, drafter, slots=slots)
    assert_equal_drafts(drafter, target, model, plain)


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 4], [9]])
def test_context_in_pieces_equals_context_at_once(target, pieces):
    drafter = tiny_drafter(target)
    model, plain = draft_both(target, drafter, rows=9, pieces=pieces)
    assert_equal_drafts(drafter, target, model, plain)


def test_context_grows_between_drafts_without_a_trace_of_the_drafted_blocks(target):
    drafter = tiny_drafter(target)
    features, positions = random_context(300, drafter.config)
    cache = drafter.new_cache()
    view, anchor = drafter.bind_target(target), torch.tensor([ANCHOR])
    start = 0
    for length in (5, 1, 3, 289, 2):  # more rows than a cache is first made for
        rows = slice(start, start + length)
        drafter.extend_context(cache, features[rows].unsqueeze(0), torch.tensor([positions[rows]]))
        start += length
        for _ in range(2):
            block = drafter.draft_block(view, cache, anchor, torch.tensor([start]))
        assert cache.context_length == start
        _, fresh = draft_by_model(target, drafter, features[:start], positions[:start], start)
        torch.testing.assert_close(block.unary, fresh.unary, rtol=0, atol=1e-4)
        torch.testing.assert_close(block.transitions.pairs, fresh.transitions.pairs, rtol=0, atol=1e-4)
    plain = LoopDraft(drafter.state_dict(), plain_config(drafter.config), target_weights(target))
    wanted = plain(features, positions, ANCHOR, start)
    assert deviation(block.unary[0], wanted.unary.gather(-1, wanted.candidates)) < TOLERANCE


def test_a_cropped_context_is_the_shorter_context(target):
    drafter = tiny_drafter(target)
    features, positions = random_context(9, drafter.config)
    cache = filled_cache(drafter, features, positions)
    cache.crop(4)
    block = drafter.draft_block(drafter.bind_target(target), cache, torch.tensor([ANCHOR]), torch.tensor([4]))
    _, fresh = draft_by_model(target, drafter, features[:4], positions[:4], 4)
    assert deviation(block.unary, fresh.unary) < TOLERANCE
    with pytest.raises(ValueError, match="crop"):
        cache.crop(5)


@pytest.mark.parametrize("first_position, anchor_position", [(0, 9), (3, 12), (200, 206)])
def test_positions_are_those_that_the_caller_gives(target, first_position, anchor_position):
    """An anchor right after the context or with a gap before it, and contexts that do not begin at 0."""
    drafter = tiny_drafter(target)
    model, plain = draft_both(target, drafter, first_position=first_position, anchor_position=anchor_position)
    assert_equal_drafts(drafter, target, model, plain)


def test_only_distances_between_positions_matter(target):
    drafter = tiny_drafter(target)
    (near, _), _ = draft_both(target, drafter, first_position=0)
    (shifted, _), _ = draft_both(target, drafter, first_position=150)
    (gap, _), _ = draft_both(target, drafter, first_position=0, anchor_position=9)
    assert deviation(shifted.hidden, near.hidden.double()) < 1e-4
    assert deviation(gap.hidden, near.hidden.double()) > VISIBLE


@pytest.mark.parametrize("rewrite_layers", [0, 1])
def test_blocks_of_one_pass_equal_blocks_drafted_one_by_one(target, rewrite_layers):
    """Training runs many blocks over one context: each may see only the rows before its anchor, and itself."""
    drafter = tiny_drafter(target, rewrite_layers=rewrite_layers)
    features, positions = random_context(8, drafter.config)
    anchors, starts = torch.tensor([[5, 9, 2]]), [2, 5, 8]
    view, cache, size = drafter.bind_target(target), filled_cache(drafter, features, positions), 5
    places = torch.tensor(starts).view(1, 3, 1) + torch.arange(size)
    sees = torch.zeros(1, 3 * size, 8 + 3 * size, dtype=torch.bool)
    for i, start in enumerate(starts):
        sees[:, i * size : (i + 1) * size, :start] = True
        sees[:, i * size : (i + 1) * size, 8 + i * size : 8 + (i + 1) * size] = True
    phi = view.phi(anchors)
    output = drafter(drafter.block_embeds(view, anchors, size - 1), phi, places, cache, sees)
    messages = view.phi(torch.arange(3 * 4 * 2).view(1, 3, 4, 2))
    again = drafter.rewrite(output.rewrite, messages)
    for i, start in enumerate(starts):
        alone = filled_cache(drafter, features[:start], positions[:start])
        anchor = anchors[:, i : i + 1]
        embeds = drafter.block_embeds(view, anchor, size - 1)
        single = drafter(embeds, phi[:, i : i + 1], places[:, i : i + 1], alone)
        assert deviation(output.hidden[:, i], single.hidden[:, 0].double()) < TOLERANCE
        single_again = drafter.rewrite(single.rewrite, messages[:, i : i + 1])
        assert deviation(again[:, i], single_again[:, 0].double()) < TOLERANCE


@pytest.mark.parametrize("rewrite_layers", [0, 1])
def test_padded_rows_of_a_batch_draft_like_single_prompts(target, rewrite_layers):
    drafter = tiny_drafter(target, rewrite_layers=rewrite_layers)
    view, lengths, slots = drafter.bind_target(target), [4, 7], drafter.config.num_draft_slots
    features = torch.stack([random_context(7, drafter.config, seed)[0] for seed in (1, 2)])
    positions = torch.stack([(torch.arange(7) - (7 - length)).clamp_min(0) for length in lengths])
    seen = torch.stack([torch.arange(7 + 1 + slots) >= 7 - length for length in lengths])
    cache = drafter.new_cache()
    drafter.extend_context(cache, features, positions)
    anchors, starts = torch.tensor([7, 9]), torch.tensor(lengths)
    block = drafter.draft_block(view, cache, anchors, starts, attention_mask=seen)
    for i, length in enumerate(lengths):
        alone = filled_cache(drafter, features[i, 7 - length :], list(range(length)))
        single = drafter.draft_block(view, alone, anchors[i : i + 1], starts[i : i + 1])
        assert block.candidates[i].tolist() == single.candidates[0].tolist()
        assert deviation(block.unary[i], single.unary[0].double()) < TOLERANCE
        assert deviation(block.transitions.first[i], single.transitions.first[0].double()) < TOLERANCE
        assert deviation(block.transitions.pairs[i], single.transitions.pairs[0].double()) < TOLERANCE
    for slot in range(1, slots + 1):
        assert block.row(slot, anchors).shape == (2, target.config.vocab_size)


def test_the_score_of_slot_1_is_its_unary_logit(target):
    """The first slot's predecessor is always decided, so writing again changes nothing."""
    drafter = tiny_drafter(target)
    (output, block), plain = draft_both(target, drafter)
    assert deviation(block.row(1, torch.tensor([ANCHOR]))[0], plain.unary[0]) < TOLERANCE
    assert torch.equal(block.transitions.first, block.unary[:, 0])


@pytest.mark.parametrize("term", TERMS + DETAILS)
@pytest.mark.parametrize("placement", ["layer", "mlp"])
def test_the_comparison_fails_when_any_one_term_is_left_out(target, placement, term):
    drafter = tiny_drafter(target, injection_placement=placement)
    model, plain = draft_both(target, drafter)
    assert score_deviation(drafter, target, model, plain) < TOLERANCE
    model, plain = draft_both(target, drafter, without=term)
    assert score_deviation(drafter, target, model, plain) > VISIBLE
