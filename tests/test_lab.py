"""A variant that starts from a trained drafter has its weights and its own settings; with no steps it is measured."""

import numpy as np
import pytest
import torch

from drafter_cases import redraw, tiny_target
from dspine_hf import DSpineDraftModel
from dspine_hf.lab import FeatureStore, Variant, build_drafter, train_variant

SHAPES = {"num_hidden_layers": 3, "block_size": 5, "transfer_rank": 6, "num_candidates": 4, "target_layer_ids": [1, 3]}
SHAPES |= {"rewrite_layers": 2, "injection_placement": "mlp", "num_sampled_candidates": None}


@pytest.fixture
def trained(tmp_path):
    target = tiny_target()
    drafter = redraw(DSpineDraftModel.for_target(target, **SHAPES), 5)
    drafter.save_pretrained(tmp_path / "trained")
    return target, drafter, str(tmp_path / "trained")


def store_of(target):
    generator = torch.Generator().manual_seed(0)
    texts = [(torch.randint(0, 61, (30,), generator=generator).numpy().astype(np.int64), 5) for _ in range(6)]
    return FeatureStore(target, SHAPES["target_layer_ids"], texts, max_length=30)


def test_a_start_gives_the_weights_and_the_variant_the_settings(trained):
    target, drafter, folder = trained
    found = build_drafter(Variant("more", config={"chain_passes": 2}, start=folder), target, None)
    assert found.config.chain_passes == 2 and found.config.block_size == 5
    for (name, one), other in zip(drafter.named_parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_start_of_another_target_is_refused(trained):
    _, _, folder = trained
    with pytest.raises(ValueError, match="vocab_size=61"):
        build_drafter(Variant("more", start=folder), tiny_target(vocab_size=67), None)


def test_a_start_for_another_kind_of_drafter_is_refused(trained):
    target, _, folder = trained
    with pytest.raises(ValueError, match='found kind="eagle3"'):
        build_drafter(Variant("more", kind="eagle3", start=folder), target, None)


def test_no_steps_leave_it_as_it_was_and_some_train_it(trained):
    target, drafter, folder = trained
    store, counts = store_of(target), torch.ones(61)
    same, record = train_variant(Variant("same", start=folder, steps=0), target, store, counts)
    assert record["steps"] == 0 and record["history"] == []
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), same.parameters(), strict=True))
    settings = {"sequences": 4, "anchors": 3, "learning_rate": 1e-2}
    more, record = train_variant(
        Variant("more", config={"chain_passes": 1}, start=folder, steps=12, **settings), target, store, counts
    )
    assert record["steps"] == 12 and len(record["history"][-1]["conditional_accuracy"]) == 4
    assert not any(torch.equal(a, b) for a, b in zip(drafter.parameters(), more.parameters(), strict=True))
