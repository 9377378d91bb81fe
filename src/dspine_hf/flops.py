"""How many floating-point operations a training step needs by its shapes, and what share of the peak that is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .losses import LossWeights

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}  # dense bf16, from the data sheets (SXM)


@dataclass
class StepFlops:
    """Operations of one step, a multiply-add counted as two. Norms, softmax, gates and the optimiser are left out.

    target: the frozen target's forward pass, without its head. drafter: forward and backward of the drafter's
    matrices. head: both streams through the frozen head, forward and by hidden state, and the teacher's logits.
    attention: scores and values of target and drafter, each row to half its sequence and to its block: what the mask
    lets through on average, not what a kernel that ignores the mask computes. The target's heads count as wide as the
    drafter's, which follow them.
    """

    target: float
    drafter: float
    head: float
    attention: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.target + self.drafter + self.head + self.attention


def step_flops(target: Any, config: Any, weights: LossWeights, sequences: int, length: int, anchors: int) -> StepFlops:
    """
    The operations of one step of a DSpine or DFlash drafter over `sequences` sequences of `length` tokens (padding
    included) with `anchors` blocks each.

    Args:
        target: its dense causal LM; of a mixture of experts only the shared matrices are counted.
        config: the drafter's [`DSpineConfig`]. weights: the loss's, which say whether it reads the target's softmax.
    """
    tokens, rows = sequences * length, sequences * anchors * config.block_size
    drafted = sequences * anchors * config.num_draft_slots
    d, r, width = config.hidden_size, config.transfer_rank, config.num_attention_heads * config.head_dim
    kv, mlp = 2 * d * config.num_key_value_heads * config.head_dim, 3 * d * config.intermediate_size
    layers, injected = config.num_hidden_layers, sum(map(config.injects, range(config.num_hidden_layers)))
    conditional, told = config.selection == "transition", config.rewrite_layers
    # Of every product x W: forward, by x, by W. What the frozen target gave has no gradient by x.
    drafter = 2 * (2 * tokens * len(config.target_layer_ids) * d * d + 3 * tokens * layers * kv)
    drafter += 6 * (rows * layers * (2 * d * width + kv + mlp) + drafted * injected * (3 * d * r + r * r))
    phis = rows + (drafted if injected and weights.layer else 0)
    keys = length / 2 + config.block_size
    attention = 6 * rows * layers * 2 * keys * width
    if conditional:
        drafter += drafted * (told + 1) * (12 * d * r + 4 * r * r) + 6 * drafted * told * (2 * d * width + mlp)
        drafter += 6 * drafted * mlp if config.injection_placement == "mlp" else 0
        attention += 6 * drafted * told * 2 * keys * width
        drafter += 6 * drafted * told * kv if config.chain_passes else 0  # a chain's own keys and values
    teacher = bool(weights.distill or weights.total_variation)
    head = drafted * d * config.vocab_size * (4 * (1 + conditional) + 2 * teacher)
    return StepFlops(
        target=2.0 * tokens * matrix_weights(target),
        drafter=float(drafter + 2 * phis * d * r),
        head=float(head),
        attention=attention + 2.0 * tokens * config.num_target_layers * length * width,
    )


def matrix_weights(target: Any) -> int:
    """How many numbers the matrices of a causal LM's decoder hold, embeddings and head aside."""
    decoder = target.get_decoder()
    aside = {id(m.weight) for m in decoder.modules() if isinstance(m, nn.Embedding)}
    aside.add(id(target.get_output_embeddings().weight))
    return sum(p.numel() for p in decoder.parameters() if p.ndim == 2 and id(p) not in aside)


def peak_tflops(device: torch.device) -> float | None:
    """The dense bf16 peak of a GPU that `PEAK_TFLOPS` knows by name; None for any other device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)
