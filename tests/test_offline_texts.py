"""Many texts measured together give the records that each gives alone, whatever the drafter and the passes' size."""

import numpy as np
import pytest
import torch

from drafter_cases import redraw, tiny_target
from dspine_hf import DSpineDraftModel, offline_texts
from dspine_hf.baselines import BASELINES
from dspine_hf.lab import FeatureStore, evaluate_offline
from dspine_hf.offline import greedy_record, offline_drafts
from dspine_hf.offline_sampled import expected_record, sampled_walk, walk_noise
from dspine_hf.offline_texts import texts_drafts, texts_log_q

SHAPES = {"num_hidden_layers": 2, "block_size": 5, "transfer_rank": 6, "num_candidates": 4, "target_layer_ids": [1, 3]}
KINDS = {
    "dspine": {},
    "rewritten": {"rewrite_layers": 1, "injection_placement": "mlp", "num_sampled_candidates": None},
    "noisy": {"rewrite_layers": 1, "num_candidates": 2, "num_sampled_candidates": 12},
    "independent": {"injection": "none", "selection": "independent"},
    "window": {"context_window": 6},
    "one slot": {"block_size": 2},
    **dict.fromkeys(BASELINES, {}),
}
LENGTHS = [(3, 40), (9, 12), (20, 75), (2, 4), (30, 51)]  # prompt and text; 4: a single anchor


def build(name, target):
    values = {**SHAPES, **KINDS[name]}
    torch.manual_seed(2)
    if name in BASELINES:
        drafter = redraw(BASELINES[name](target, None, **values, pair_rank=8), 7)
        if hasattr(drafter, "pair"):
            drafter.pair.B.mul_(8.0)
        return drafter
    return redraw(DSpineDraftModel.for_target(target, **values), 5)


def texts_of(target, drafter):
    """A store of texts that follow the drafter's own drafts here and there, so that walks take several slots."""
    generator, view = torch.Generator().manual_seed(1), drafter.bind_target(target)
    texts = [torch.randint(0, target.config.vocab_size, (n,), generator=generator) for _, n in LENGTHS]
    for _ in range(2):
        store = FeatureStore(
            target,
            SHAPES["target_layer_ids"],
            [(text.numpy(), prompt) for text, (prompt, _) in zip(texts, LENGTHS, strict=True)],
            max_length=80,
        )
        for i, (prompt, length) in enumerate(LENGTHS):
            tokens, features, _ = store.sequence(i)
            drafts = offline_drafts(drafter, view, features, tokens, prompt)
            for place in range(0, length - prompt - 1, 6):
                new = drafts[place, : min(4, length - 1 - prompt - place)]
                texts[i][prompt + place + 1 : prompt + place + 1 + len(new)] = new
    return store


def alone(drafter, target, store, sampled, end):
    """The records by passes over one text at a time."""
    view, rows = drafter.bind_target(target), []
    for i, (prompt, _) in enumerate(LENGTHS):
        tokens, features, final = store.sequence(i)
        text = tokens[prompt:].tolist()
        if sampled:
            rows.append(expected_record(sampled_walk(drafter, view, features, final, tokens, prompt, text[-1] == end)))
        else:
            drafts = offline_drafts(drafter, view, features, tokens, prompt, chunk=7)
            rows.append(greedy_record(drafts, text, text[-1] == end))
    return rows


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("most_slots", [1, 4096])
def test_texts_measured_together_have_the_records_of_each_alone(name, most_slots, monkeypatch):
    monkeypatch.setattr(offline_texts, "FEW_SLOTS", most_slots)
    target = tiny_target()
    drafter = build(name, target)
    store = texts_of(target, drafter)
    end = int(store.tokens[-1])
    for sampled in (False, True):
        found = evaluate_offline(drafter, target, store, list("aabab"), sampled, end)
        assert [(row["benchmark"], row["index"]) for row in found] == list(zip("aabab", (0, 1, 0, 2, 1), strict=True))
        hits = 0
        for row, wanted in zip(found, alone(drafter, target, store, sampled, end), strict=True):
            for key, value in wanted.items():
                assert row[key] == (value if not sampled or value is None else pytest.approx(value, rel=1e-4)), key
            hits += sum(row["hits"])
        assert hits > 1


def test_one_pass_takes_several_texts_and_never_more_slots_than_asked_for():
    target = tiny_target()
    drafter = build("dspine", target)
    store = texts_of(target, drafter)
    groups = list(offline_texts.groups_of(store, 5, 4 * offline_texts.GROUP * 2))
    assert [len(part.anchors) for part in groups] == [2] * (len(groups) - 1) + [len(groups[-1].anchors)]
    assert {part.features.shape[1] for part in groups} == {64, 128}
    view = drafter.bind_target(target)
    assert [len(rows) for rows in texts_drafts(drafter, view, store)] == [n - 1 - p for p, n in LENGTHS]
    assert [len(rows) for rows in texts_log_q(drafter, view, store)] == [n - 1 - p for p, n in LENGTHS]


def test_every_text_has_its_own_name():
    target = tiny_target()
    drafter = build("dspine", target)
    with pytest.raises(ValueError, match="a name for each of the store's"):
        evaluate_offline(drafter, target, texts_of(target, drafter), ["a"] * 4)


def test_a_longer_text_has_the_noise_of_a_shorter_one_at_the_same_places():
    drafter = build("noisy", tiny_target())
    short, long = walk_noise(drafter, 9, "cpu"), walk_noise(drafter, 300, "cpu")
    assert len(long) >= 300 and torch.equal(long[: len(short)], short)
    assert np.isclose(float(long.mean()), 1.0, atol=0.05)
