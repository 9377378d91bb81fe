"""The operations that the formula counts are those that PyTorch runs in a step."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dspine_hf.blocks import sample_anchors
from dspine_hf.features import TargetReader
from dspine_hf.flops import matrix_weights, peak_tflops, step_flops
from dspine_hf.losses import LossWeights
from dspine_hf.objective import SequenceBatch, block_loss
from helpers.oracle import small_target
from helpers.training_runs import fresh_drafter

SEQUENCES, LENGTH, ANCHORS = 3, 20, 4
DFLASH = {"injection": "none", "selection": "independent"}


@pytest.mark.parametrize(
    ("fields", "loss"),
    [
        ({}, {}),
        ({"rewrite_layers": 1}, {"distill": 0.5}),
        ({"injection_placement": "mlp"}, {"layer": 0.0}),
        ({"injection_placement": "mlp", "rewrite_layers": 1, "block_size": 4}, {}),
        ({"injection_placement": "mlp", "rewrite_layers": 1, "chain_passes": 1}, {}),
        ({"injection": "last", "num_candidates": 3}, {"total_variation": 0.2}),
        (DFLASH, {}),
    ],
)
def test_the_formula_counts_the_products_of_a_step(fields, loss):
    target, weights = small_target(), LossWeights(**loss)
    drafter = fresh_drafter(target, **fields).train()
    reader = TargetReader(target, drafter.config.target_layer_ids)
    tokens = torch.randint(0, 61, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    lengths, prompts = torch.full((SEQUENCES,), LENGTH), torch.full((SEQUENCES,), 3)
    anchors = sample_anchors(prompts, lengths, ANCHORS)
    counter = FlopCounterMode(display=False)
    with counter:
        features, final = reader(tokens)
        batch = SequenceBatch(tokens, lengths, prompts, features, anchors, final)
        block_loss(drafter, drafter.bind_target(target), batch, weights)[0].backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    found = step_flops(target, drafter.config, weights, SEQUENCES, LENGTH, ANCHORS)
    assert products == pytest.approx(found.total - found.attention, rel=1e-3)


def test_embeddings_and_head_are_no_matrices_of_the_decoder():
    target = small_target()
    layers = sum(p.numel() for p in target.model.layers.parameters() if p.ndim == 2)
    assert matrix_weights(target) == layers


def test_only_a_known_gpu_has_a_peak():
    assert peak_tflops(torch.device("cpu")) is None
