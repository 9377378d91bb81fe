"""Exact acceptance length at T = 0 without decoding: draft from every position of the target's own greedy text."""

from dataclasses import dataclass
from typing import Any

import torch

from .blocks import run_blocks
from .modeling_dspine import DSpineDraftModel
from .ops_dspine import topk
from .rewrite_dspine import drafted_chain
from .target_dspine import TargetView
from .transfer_dspine import TransitionCache


@torch.no_grad()
def draft_from_anchors(
    drafter: DSpineDraftModel,
    view: TargetView,
    features: torch.Tensor,
    anchors: torch.Tensor,
    anchor_ids: torch.Tensor,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Greedy drafts of one sequence from many anchors at once.

    Args:
        features: [1, length, len(target_layer_ids) * d]; anchors, anchor_ids: [blocks].
        tokens: the sequence [length]; only drafters that read the context's tokens need it.

    Returns:
        Drafted tokens [blocks, B-1].
    """
    rows = None if tokens is None else tokens[None]
    return draft_rows(drafter, view, features, anchors[None], anchor_ids[None], rows)[0]


def has_own_pass(drafter: DSpineDraftModel) -> bool:
    """Whether a drafter scores its candidates itself (`scored_candidates`) or goes token by token (`unroll`)."""
    return hasattr(drafter, "scored_candidates") or hasattr(drafter, "unroll")


@torch.no_grad()
def draft_rows(
    drafter: DSpineDraftModel,
    view: TargetView,
    features: torch.Tensor,
    anchors: torch.Tensor,
    anchor_ids: torch.Tensor,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Greedy drafts from many anchors of several sequences: [rows, blocks, B-1].

    Args:
        features: [rows, length, len(target_layer_ids) * d]; anchors, anchor_ids: [rows, blocks], below `length`.
        tokens: [rows, length]; only drafters that go token by token (`unroll`) read them.
    """
    if hasattr(drafter, "unroll"):
        if tokens is None:
            raise ValueError(f"{type(drafter).__name__} reads the context's tokens: pass tokens=.")
        return drafter.unroll(view, features, tokens, anchors)[1]
    out = run_blocks(drafter, view, features, anchors, anchor_ids)
    hidden = drafter.norm(out.hidden[:, :, 1:])
    if hasattr(drafter, "scored_candidates"):
        candidates, _, cache = drafter.scored_candidates(view, hidden.flatten(0, 1), anchor_ids.flatten())
        return best_chain(candidates, cache).unflatten(0, anchors.shape)
    unary, candidates = view.best(hidden, drafter.config.num_candidates, topk)  # [rows, blocks, B-1, K]
    if drafter.config.selection == "independent" or candidates.shape[2] == 1:
        return candidates[..., 0]
    chain = None
    if drafter.config.chain_passes:
        proposal = drafted_chain(drafter, view, out.rewrite, view.phi(anchor_ids), candidates, unary)
        chain, candidates, unary = proposal.chain, proposal.candidates, proposal.unary
    hidden = drafter.rewrite(out.rewrite, view.phi(candidates[:, :, :-1]), 2, chain)
    cache = TransitionCache(unary[:, :, 0].flatten(0, 1), view.row_logits(hidden, candidates[:, :, 1:]).flatten(0, 1))
    return best_chain(candidates.flatten(0, 1), cache).unflatten(0, anchors.shape)


def best_chain(candidates: torch.Tensor, cache: TransitionCache) -> torch.Tensor:
    """The left-to-right argmax: candidates [batch, slots, K] -> tokens [batch, slots]."""
    chosen, index = [], None
    for slot in range(1, candidates.shape[1] + 1):
        index = cache.scores(slot, index).argmax(-1)
        chosen.append(candidates[:, slot - 1].gather(1, index.unsqueeze(1)))
    return torch.cat(chosen, dim=1)


@dataclass
class Walk:
    """The rounds of one continuation: new tokens, verification passes, and per-slot trials and hits [B-1] each."""

    new_tokens: int
    rounds: int
    trials: list[int]
    hits: list[int]

    @property
    def acceptance_length(self) -> float:
        """(new tokens - 1) / passes: the first token comes from prefill."""
        return (self.new_tokens - 1) / max(1, self.rounds)


def walk_rounds(drafts: torch.Tensor, continuation: torch.Tensor, stopped: bool = False) -> Walk:
    """Replay the rounds that the real loop would run.

    Args:
        drafts: [n - 1, B-1], drafts from anchors continuation[0..n-2]; continuation: [n] greedy tokens.
        stopped: the last token ended the text (end of sequence), so that it may be drafted; else the length limit did,
            which leaves it to the target. The number of rounds is the same.
    """
    n, slots = continuation.shape[0], drafts.shape[1]
    drafts, truth = drafts.tolist(), continuation.tolist()
    trials, hits, rounds, place = [0] * slots, [0] * slots, 0, 0
    while place < n - 1:
        accepted, room = 0, min(slots, n - (1 if stopped else 2) - place)
        while accepted < room:
            trials[accepted] += 1
            if drafts[place][accepted] != truth[place + 1 + accepted]:
                break
            hits[accepted] += 1
            accepted += 1
        rounds += 1
        place += accepted + 1
    return Walk(n, rounds, trials, hits)


def loop_tail_start(tokens: list[int], longest_period: int = 64, repeats: int = 3) -> int | None:
    """Where a continuation begins to repeat itself until its end; None when it does not.

    A tail counts as a loop when it consists of at least `repeats` copies of a period of at most `longest_period`, and
    is at least 24 tokens long.
    """
    best = None
    for period in range(1, min(longest_period, len(tokens) // repeats) + 1):
        start = len(tokens) - period
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if len(tokens) - start >= max(repeats * period, 24) and (best is None or start < best):
            best = start
    return best


def greedy_record(drafts: torch.Tensor, continuation: list[int], stopped: bool) -> dict[str, Any]:
    """The rounds of one greedy continuation as a record of `evaluation.summarise`; arguments as in [`walk_rounds`]."""
    new, tail = torch.tensor(continuation), loop_tail_start(continuation)
    walk = walk_rounds(drafts, new, stopped)
    clean = walk if tail is None else walk_rounds(drafts, new[: max(1, tail)])
    return {
        "new_tokens": walk.new_tokens,
        "rounds": walk.rounds,
        "trials": walk.trials,
        "hits": walk.hits,
        "loop_start": tail,
        "clean_tokens": clean.new_tokens,
        "clean_rounds": clean.rounds,
    }


@torch.no_grad()
def offline_drafts(
    drafter: DSpineDraftModel,
    view: TargetView,
    features: torch.Tensor,
    tokens: torch.Tensor,
    prompt_length: int,
    chunk: int = 128,
) -> torch.Tensor:
    """Greedy drafts from every token of a continuation but the last: [n - 1, B-1].

    Args:
        features: the target's states of the whole sequence [1, length, len(ids) * d]; tokens: [length].
    """
    anchors = torch.arange(prompt_length, tokens.shape[0] - 1, device=tokens.device)
    if not len(anchors):
        return tokens.new_zeros(0, drafter.config.num_draft_slots)
    pieces = anchors.split(chunk)
    return torch.cat([draft_from_anchors(drafter, view, features, part, tokens[part], tokens) for part in pieces])


def offline_walk(
    drafter: DSpineDraftModel,
    view: TargetView,
    features: torch.Tensor,
    tokens: torch.Tensor,
    prompt_length: int,
    chunk: int = 128,
) -> Walk:
    """The exact rounds of one greedy continuation; arguments as in [`offline_drafts`]."""
    drafts = offline_drafts(drafter, view, features, tokens, prompt_length, chunk)
    return walk_rounds(drafts, tokens[prompt_length:])
