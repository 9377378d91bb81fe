"""Exact acceptance of many texts in few passes: anchors in groups, and every group a row of a batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .modeling_dspine import DSpineDraftModel
from .offline import draft_rows
from .offline_sampled import log_q_rows, true_log_p, walk_noise
from .target_dspine import TargetView

GROUP = 16  # anchors a row: more of them attend past more of each other's slots, fewer read the context more often
WIDTH_STEP = 64  # contexts are padded to a multiple, so that few shapes occur
SLOTS = {"cuda": 16384}  # of a pass, by device
FEW_SLOTS = 128  # larger tensors cost a CPU more than passes do


@dataclass
class Groups:
    """Anchors of several texts, of one text a row.

    features: [rows, width, len(target_layer_ids) * d]; tokens: [rows, width], those from the text's beginning on.
    anchors: [rows, GROUP]; window: the true tokens from each anchor on [rows, GROUP, B].
    places: of the anchors in their continuations [rows, GROUP].
    slots: where their figures belong among those of all anchors [rows, GROUP]; the last row of all for padding.
    """

    features: torch.Tensor
    tokens: torch.Tensor
    anchors: torch.Tensor
    window: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor


def groups_of(store: Any, block_size: int, most_slots: int) -> Iterator[Groups]:
    """Every token of every continuation but the last as an anchor, the longest contexts first.

    Args:
        store: a [`lab.FeatureStore`]. most_slots: of a pass, at most, or as many as one row has.
    """
    device, offsets = store.tokens.device, store.offsets.tolist()
    rows, total = [], 0
    for text, (prompt, length) in enumerate(zip(store.prompt_lengths.tolist(), store.lengths.tolist(), strict=True)):
        for first in range(prompt, length - 1, GROUP):
            count = min(GROUP, length - 1 - first)
            rows.append((first + count, offsets[text], length, prompt, first, count, total))
            total += count
    rows.sort(key=lambda row: -row[0])
    per_pass = max(1, most_slots // (GROUP * (block_size - 1)))
    table = torch.tensor(rows, device=device).view(-1, 7)
    steps = torch.arange(GROUP, device=device)
    for begin in range(0, len(rows), per_pass):
        width = -(-rows[begin][0] // WIDTH_STEP) * WIDTH_STEP
        _, offset, length, prompt, first, count, number = table[begin : begin + per_pass, :, None].unbind(1)
        anchors = first + torch.minimum(steps, count - 1)
        ahead = anchors.unsqueeze(-1) + torch.arange(block_size, device=device)
        window = store.tokens[offset.unsqueeze(-1) + torch.minimum(ahead, length.unsqueeze(-1) - 1)]
        at = (offset + torch.arange(width, device=device)).clamp_max(store.tokens.shape[0] - 1)
        slots = torch.where(steps < count, number + steps, total)
        yield Groups(store.features[at], store.tokens[at], anchors, window, anchors - prompt, slots)


def _of_all(
    store: Any, drafter: DSpineDraftModel, dtype: torch.dtype, most_slots: int | None, run: Callable
) -> tuple[torch.Tensor, ...]:
    """`run(groups)` [rows, GROUP, B-1] of every group, sorted by text: one [n - 1, B-1] each, on the CPU."""
    slots = drafter.config.num_draft_slots
    counts = (store.lengths - 1 - store.prompt_lengths).tolist()
    found = torch.empty(sum(counts) + 1, slots, dtype=dtype, device=store.tokens.device)
    if most_slots is None:
        most_slots = SLOTS.get(store.tokens.device.type, FEW_SLOTS)
    for groups in groups_of(store, slots + 1, most_slots):
        found[groups.slots.flatten()] = run(groups).flatten(0, 1).to(dtype)
    return found[:-1].cpu().split(counts)


@torch.no_grad()
def texts_drafts(
    drafter: DSpineDraftModel, view: TargetView, store: Any, most_slots: int | None = None
) -> tuple[torch.Tensor, ...]:
    """[`offline.offline_drafts`] of every text of the store, on the CPU.

    Args:
        store: a [`lab.FeatureStore`].
        most_slots: of a pass. With V = 49,152 and d = 576, 16,384 take 1.6 GB for the logits (bf16), up to 8 GB for
            pairs of 16 candidates where layers are rewritten. None: 16,384 on a GPU, else 128.
    """

    def run(groups: Groups) -> torch.Tensor:
        return draft_rows(drafter, view, groups.features, groups.anchors, groups.window[..., 0], groups.tokens)

    return _of_all(store, drafter, torch.long, most_slots, run)


@torch.no_grad()
def texts_log_q(
    drafter: DSpineDraftModel, view: TargetView, store: Any, most_slots: int | None = None
) -> tuple[torch.Tensor, ...]:
    """[`offline_sampled.text_log_q`] of every text of the store, on the CPU; arguments as in [`texts_drafts`].

    16,384 slots take 3.2 GB for each copy of their logits (fp32): two of them at a time, four for drafters that sample
    from the whole vocabulary.
    """
    longest = max((store.lengths - store.prompt_lengths).tolist(), default=0)
    noise = walk_noise(drafter, longest, store.tokens.device)

    def run(groups: Groups) -> torch.Tensor:
        own = None if noise is None else noise[groups.places]
        parts = (groups.features, groups.anchors, groups.window, groups.tokens)
        return log_q_rows(drafter, view, *parts, noise=own)

    return _of_all(store, drafter, torch.float32, most_slots, run)


@torch.no_grad()
def texts_log_p(view: TargetView, store: Any, most_rows: int | None = None) -> tuple[torch.Tensor, ...]:
    """The target's log-probability of every token of every continuation, [n] fp32 each, on the CPU."""
    device = store.tokens.device
    rows = torch.arange(store.tokens.shape[0], device=device)
    ends = store.offsets + store.lengths
    text = torch.bucketize(rows, ends, right=True)
    rows = rows[rows >= (store.offsets + store.prompt_lengths)[text]]
    if most_rows is None:
        most_rows = SLOTS.get(device.type, FEW_SLOTS)
    parts = [true_log_p(view, store.final[part - 1], store.tokens[part]) for part in rows.split(most_rows)]
    return torch.cat(parts).cpu().split((store.lengths - store.prompt_lengths).tolist())
