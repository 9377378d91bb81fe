"""Exact expected acceptance at T = 1 without decoding, from text that the target sampled itself.

In rejection sampling a token x that is drafted with probability q(x) is emitted as an accepted one with probability
min(p(x), q(x)), and emitted in all with probability p(x). Given that x was emitted, it was accepted with probability
min(1, q(x) / p(x)), whatever came before it. So one sampled text gives the distribution of its rounds.
"""

from dataclasses import dataclass
from typing import Any

import torch

from .blocks import run_blocks
from .modeling_dspine import DSpineDraftModel
from .target_dspine import TargetView
from .transfer_dspine import predecessor_keys


@dataclass
class ExpectedWalk:
    """Expected verification passes of one text, and expected trials and hits by slot [B-1] each."""

    new_tokens: int
    rounds: float
    trials: list[float]
    hits: list[float]


@torch.no_grad()
def draft_log_q(
    drafter: DSpineDraftModel,
    view: TargetView,
    features: torch.Tensor,
    anchors: torch.Tensor,
    tokens: torch.Tensor,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Log-probability of each slot's true token in the walk, given the true tokens before it: [blocks, B-1] fp32.

    -inf where the true token is no candidate. Where fewer predecessors are cached than candidates are sampled from,
    whether a true one is cached depends on the walk's noise: that is drawn here, given that the true tokens came of
    it, so that an expectation over these figures is the loop's. A drafter's own `draft_log_q` goes first.

    Args:
        features: the target's states of the sequence [1, length, len(ids) * d]; anchors: [blocks]; tokens: [length].
        generator: of that noise.
    """
    own = getattr(drafter, "draft_log_q", None)
    if own is not None:
        return own(view, features, anchors, tokens)
    window = true_window(tokens, anchors, drafter.config.block_size)  # [blocks, B]
    out = run_blocks(drafter, view, features, anchors[None], window[None, :, 0])
    width, kept = drafter.config.sampling_width, drafter.config.num_candidates
    unary, candidates = view.logits(drafter.norm(out.hidden[0, :, 1:])).topk(width, dim=-1)  # [blocks, B-1, S]
    if drafter.config.selection == "independent" or window.shape[1] == 2:
        return candidate_log_q(unary, candidates, window[:, 1:])
    messages = view.phi(window[:, 1:-1]).unsqueeze(-2).unsqueeze(0)  # [1, blocks, B-2, 1, r]
    hidden = drafter.rewrite(out.rewrite, messages, first_slot=2)[0].squeeze(-2)
    given = view.logits(hidden).gather(-1, candidates[:, 1:])  # [blocks, B-2, S]
    scores = torch.cat([unary[:, :1], given], dim=1)
    if kept < width:
        scores = _scores_of_the_walk(unary, scores, candidates == window[:, 1:, None], kept, generator)
    return candidate_log_q(scores, candidates, window[:, 1:])


def _scores_of_the_walk(
    unary: torch.Tensor, given: torch.Tensor, true: torch.Tensor, kept: int, generator: torch.Generator | None
) -> torch.Tensor:
    """The rows [blocks, slots, S] that the walk used on its way to the true tokens: `given` after a cached
    predecessor, `unary` after another one.

    A walk chooses the first of exponential arrivals with rates q. Given which was first, its time t is exponential
    with rate 1, and every other arrival is t plus a time of its own: noise, an arrival times its rate, is t q at the
    first and t q + e elsewhere.

    Args:
        true: which candidate is the true token [blocks, slots, S]. kept: K.
    """
    rows, cached = [], torch.ones_like(true[:, 0, :1])
    for slot in range(unary.shape[1]):
        rows.append(torch.where(cached, given[:, slot], unary[:, slot]))
        first = true[:, slot]
        arrival = torch.empty_like(rows[-1][:, :1]).exponential_(generator=generator)
        later = torch.empty_like(rows[-1]).exponential_(generator=generator)
        noise = arrival * rows[-1].softmax(-1) + later.masked_fill(first, 0.0)
        keys = predecessor_keys(unary[:, slot], noise)
        own = keys.masked_fill(~first, float("-inf")).amax(-1, keepdim=True)
        cached = (keys > own).sum(-1, keepdim=True) < kept
    return torch.stack(rows, dim=1)


def true_window(tokens: torch.Tensor, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """The tokens from each anchor on, the last one repeated past the end: [blocks, B]."""
    places = anchors.unsqueeze(1) + torch.arange(block_size, device=tokens.device)
    return tokens[places.clamp_max(tokens.shape[0] - 1)]


def candidate_log_q(scores: torch.Tensor, candidates: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Log-softmax over candidates [.., K] at the true token [..]; -inf where it is not among them."""
    found = candidates == truth.unsqueeze(-1)
    return scores.float().log_softmax(-1).masked_fill(~found, float("-inf")).amax(-1)


def expected_walk(log_q: torch.Tensor, log_p: torch.Tensor, stopped: bool = False) -> ExpectedWalk:
    """The expected rounds of one sampled text.

    Args:
        log_q: [n - 1, B-1], row i: of the tokens i+1.. drafted from anchor i (what lies past the end is not read).
        log_p: [n], the target's log-probability of each token of the text.
        stopped: the last token ended the text, so that it may be drafted; else the length limit did.
    """
    n, slots = log_p.shape[0], log_q.shape[1]
    places = torch.arange(n - 1).unsqueeze(1) + torch.arange(1, slots + 1)
    accept = (log_q.cpu().double() - log_p.cpu().double()[places.clamp_max(n - 1)]).exp().clamp_max(1.0).tolist()
    visits, trials, hits, rounds = [1.0] + [0.0] * n, [0.0] * slots, [0.0] * slots, 0.0
    for place in range(n - 1):
        alive = visits[place]
        rounds += alive
        room = min(slots, n - (1 if stopped else 2) - place)
        for slot in range(room):
            trials[slot] += alive
            passed = alive * accept[place][slot]
            hits[slot] += passed
            visits[place + slot + 1] += alive - passed
            alive = passed
        visits[min(n, place + max(room, 0) + 1)] += alive
    return ExpectedWalk(n, rounds, trials, hits)


@torch.no_grad()
def sampled_walk(
    drafter: DSpineDraftModel,
    view: TargetView,
    features: torch.Tensor,
    final: torch.Tensor,
    tokens: torch.Tensor,
    prompt_length: int,
    stopped: bool = False,
    chunk: int = 256,
) -> ExpectedWalk:
    """The expected rounds of a text that the target sampled at T = 1 without cuts to its distribution.

    Args:
        features, tokens, prompt_length: as in [`offline.offline_drafts`].
        final: the target's normed last states [1, length, d].
        stopped: as in [`expected_walk`].
    """
    anchors = torch.arange(prompt_length, tokens.shape[0] - 1, device=tokens.device)
    noise = torch.Generator(tokens.device).manual_seed(0)
    log_q = torch.cat([draft_log_q(drafter, view, features, part, tokens, noise) for part in anchors.split(chunk)])
    rows = view.logits(final[0, prompt_length - 1 : -1]).log_softmax(-1)
    return expected_walk(log_q, rows.gather(1, tokens[prompt_length:, None]).squeeze(1), stopped)


def expected_record(walk: ExpectedWalk, **more: Any) -> dict[str, Any]:
    """The walk as a record of `evaluation.summarise`; sampled texts are counted whole."""
    figures = {"new_tokens": walk.new_tokens, "rounds": walk.rounds, "trials": walk.trials, "hits": walk.hits}
    return figures | {"loop_start": None, "clean_tokens": walk.new_tokens, "clean_rounds": walk.rounds} | more
