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
from .offline import has_own_pass
from .ops_dspine import topk
from .rewrite_dspine import RewriteState, drafted_chain
from .target_dspine import TargetView
from .transfer_dspine import predecessor_keys

NOISE_PLACES = 256  # of a text, whose noise is drawn at a time


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
    noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probability of each slot's true token in the walk, given the true tokens before it: [blocks, B-1] fp32.

    -inf where the true token is no candidate. Where fewer predecessors are cached than candidates are sampled from,
    whether a true one is cached depends on the walk's noise, given that the true tokens came of it: with noise drawn
    afresh, an expectation over these figures is the loop's.

    Args:
        features: the target's states of the sequence [1, length, len(ids) * d]; anchors: [blocks]; tokens: [length].
        noise: exponential variables [blocks, B-1, 1 + S]; None: drawn here. With `chain_passes`: 1 + V.
    """
    window = true_window(tokens, anchors, drafter.config.block_size)  # [blocks, B]
    noise = None if noise is None else noise[None]
    return log_q_rows(drafter, view, features, anchors[None], window[None], tokens[None], noise)[0]


@torch.no_grad()
def log_q_rows(
    drafter: DSpineDraftModel,
    view: TargetView,
    features: torch.Tensor,
    anchors: torch.Tensor,
    window: torch.Tensor,
    tokens: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """As [`draft_log_q`], from many anchors of several sequences: [rows, blocks, B-1] fp32.

    Args:
        features: [rows, length, len(ids) * d]; anchors: [rows, blocks], below `length`.
        window: the true tokens from each anchor on [rows, blocks, B].
        tokens: [rows, length]; only drafters that go token by token (`unroll`) read them.
        noise: [rows, blocks, B-1, 1 + S]; None: drawn here.
    """
    truth = window[..., 1:]
    if hasattr(drafter, "unroll"):
        states, _ = drafter.unroll(view, features, tokens, anchors, window[..., :-1])
        return view.logits(states).log_softmax(-1).gather(-1, truth.unsqueeze(-1)).squeeze(-1)
    out = run_blocks(drafter, view, features, anchors, window[..., 0])
    states = drafter.norm(out.hidden[:, :, 1:])
    if hasattr(drafter, "true_log_q"):
        return drafter.true_log_q(view, states.flatten(0, 1), window.flatten(0, 1)).unflatten(0, anchors.shape)
    width, kept = drafter.config.sampling_width, drafter.config.num_candidates
    unary, candidates = view.best(states, width, topk)  # [rows, blocks, B-1, S]
    if drafter.config.selection == "independent" or window.shape[-1] == 2:
        return candidate_log_q(unary, candidates, truth)
    messages = view.phi(window[..., 1:-1]).unsqueeze(-2)  # [rows, blocks, B-2, 1, r]
    if drafter.config.chain_passes:
        return _chained_log_q(drafter, view, out.rewrite, window, (unary, candidates), messages, noise)
    hidden = drafter.rewrite(out.rewrite, messages, first_slot=2).squeeze(-2)
    given = view.logits(hidden).gather(-1, candidates[:, :, 1:])  # [rows, blocks, B-2, S]
    scores = torch.cat([unary[:, :, :1], given], dim=2)
    if kept < width:
        if noise is None:
            noise = unary.new_empty(*unary.shape[:-1], 1 + width).exponential_()
        found = (candidates == truth.unsqueeze(-1)).flatten(0, 1)
        scores = _scores_of_the_walk(unary.flatten(0, 1), scores.flatten(0, 1), found, kept, noise.flatten(0, 1))
        scores = scores.unflatten(0, anchors.shape)
    return candidate_log_q(scores, candidates, truth)


def _chained_log_q(
    drafter: DSpineDraftModel,
    view: TargetView,
    state: RewriteState,
    window: torch.Tensor,
    best: tuple[torch.Tensor, torch.Tensor],
    messages: torch.Tensor,
    noise: torch.Tensor | None,
) -> torch.Tensor:
    """[`log_q_rows`] of a drafter with `chain_passes`, slot by slot: what a slot's scores depend on is decided by the
    noise of those before it, and that is known as far as they drew the true tokens.

    Args:
        best: unary logits and candidates [rows, blocks, B-1, S]. messages: phi of the true tokens before slots 2..
            [rows, blocks, B-2, 1, r].
        noise: [rows, blocks, B-1, 1 + V].
    """
    unary, candidates = best
    if noise is None:
        noise = unary.new_empty(*unary.shape[:-1], 1 + drafter.config.vocab_size).exponential_()
    anchor_features, arrivals = view.phi(window[..., 0]), noise[..., 1:].clone()
    cached, kept, found = torch.ones_like(unary[:, :, 0, :1], dtype=torch.bool), drafter.config.num_candidates, []
    for slot, true in enumerate(window[..., 1:].unbind(-1)):
        proposal = drafted_chain(drafter, view, state, anchor_features, candidates, unary, arrivals)
        ids, row = proposal.candidates[:, :, slot], proposal.unary[:, :, slot]  # [rows, blocks, S]
        likely = row
        if slot:
            hidden = drafter.rewrite(state, messages[:, :, slot - 1 : slot], slot + 1, proposal.chain)
            row = torch.where(cached, view.logits(hidden[:, :, 0, 0]).gather(-1, ids), row)
        found.append(candidate_log_q(row, ids, true))
        own = torch.cat([noise[:, :, slot, :1], arrivals[:, :, slot].gather(-1, ids)], dim=-1)
        drawn, cached = _arrivals(likely, row, ids == true.unsqueeze(-1), kept, own)
        arrivals[:, :, slot].scatter_(-1, ids, drawn)
    return torch.stack(found, dim=-1)


def _scores_of_the_walk(
    unary: torch.Tensor, given: torch.Tensor, true: torch.Tensor, kept: int, noise: torch.Tensor
) -> torch.Tensor:
    """The rows [blocks, slots, S] that the walk used on its way to the true tokens: `given` after a cached
    predecessor, `unary` after another one.

    A walk chooses the first of exponential arrivals with rates q. Given which was first, its time t is exponential
    with rate 1, and every other arrival is t plus a time of its own: an arrival times its rate is t q at the first and
    t q + e elsewhere.

    Args:
        true: which candidate is the true token [blocks, slots, S]. kept: K.
        noise: exponential variables [blocks, slots, 1 + S]: t, and e of every candidate.
    """
    rows, cached = [], torch.ones_like(true[:, 0, :1])
    for slot in range(unary.shape[1]):
        rows.append(torch.where(cached, given[:, slot], unary[:, slot]))
        cached = _arrivals(unary[:, slot], rows[-1], true[:, slot], kept, noise[:, slot])[1]
    return torch.stack(rows, dim=1)


def _arrivals(
    unary: torch.Tensor, scores: torch.Tensor, true: torch.Tensor, kept: int, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A slot's exponential variables [.., S] given that the walk drew its true token, and whether that is cached
    [.., 1]; arguments as in [`_scores_of_the_walk`], of one slot."""
    arrivals = noise[..., :1] * scores.softmax(-1) + noise[..., 1:].masked_fill(true, 0.0)
    keys = predecessor_keys(unary, arrivals)
    own = keys.masked_fill(~true, float("-inf")).amax(-1, keepdim=True)
    return arrivals, (keys > own).sum(-1, keepdim=True) < kept


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


def walk_noise(drafter: DSpineDraftModel, places: int, device: torch.device | str) -> torch.Tensor | None:
    """The noise of [`draft_log_q`] for every place of a text [at least `places`, B-1, 1 + S or V], always the same.

    None for a drafter that needs none. A longer text has the noise of a shorter one at the same places.
    """
    config, width = drafter.config, drafter.config.sampling_width
    needed = config.num_candidates < width or config.chain_passes
    if has_own_pass(drafter) or config.selection == "independent" or not needed:
        return None
    generator = torch.Generator(device).manual_seed(0)
    shape = (NOISE_PLACES, config.num_draft_slots, 1 + (config.vocab_size if config.chain_passes else width))
    parts = [
        torch.empty(shape, device=device).exponential_(generator=generator)
        for _ in range(-(-max(places, 1) // NOISE_PLACES))
    ]
    return torch.cat(parts)


def text_log_q(
    drafter: DSpineDraftModel,
    view: TargetView,
    features: torch.Tensor,
    tokens: torch.Tensor,
    prompt_length: int,
    chunk: int = 256,
) -> torch.Tensor:
    """[`draft_log_q`] from every token of a continuation but the last: [n - 1, B-1]; arguments as in
    [`offline.offline_drafts`]."""
    anchors = torch.arange(prompt_length, tokens.shape[0] - 1, device=tokens.device)
    noise = walk_noise(drafter, len(anchors), tokens.device)
    parts = []
    for part in anchors.split(chunk):
        own = None if noise is None else noise[part - prompt_length]
        parts.append(draft_log_q(drafter, view, features, part, tokens, own))
    return torch.cat(parts)


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
    log_q = text_log_q(drafter, view, features, tokens, prompt_length, chunk)
    return expected_walk(log_q, true_log_p(view, final[0, prompt_length - 1 : -1], tokens[prompt_length:]), stopped)


def true_log_p(view: TargetView, final: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The target's log-probability of tokens [n] after its normed last states [n, d]: [n] fp32."""
    return view.logits(final).log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)


def expected_record(walk: ExpectedWalk, **more: Any) -> dict[str, Any]:
    """The walk as a record of `evaluation.summarise`; sampled texts are counted whole."""
    figures = {"new_tokens": walk.new_tokens, "rounds": walk.rounds, "trials": walk.trials, "hits": walk.hits}
    return figures | {"loop_start": None, "clean_tokens": walk.new_tokens, "clean_rounds": walk.rounds} | more
