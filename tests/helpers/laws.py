"""Exact output laws of a speculative step, a naive sampler to compare with, and a chi-square test."""

import math
from collections import defaultdict

import torch
from transformers import LogitsProcessorList


def naive_row(block, slot: int, previous: int | None, full: bool = False) -> torch.Tensor:
    """Full-vocabulary logits `[V]` of a slot (from 1) of an oracle block, straight from its definition.

    full: as `block.row` has them, which knows every predecessor.
    """
    row = block.rows[slot - 1].double()
    if block.transitions is None or slot == 1:
        return row
    if not full and block.cached is not None and previous not in block.cached[slot - 2]:
        return row
    return row + block.given[previous].double()


def naive_law(scores: dict[int, float], prefix: list[int], options: dict) -> dict[int, float]:
    """The law over candidates `{token: logit}` under the warpers named in `options`, one token at a time."""
    scores = dict(scores)
    penalty = options.get("repetition_penalty", 1.0)
    for token, score in scores.items():
        if token in prefix:
            scores[token] = score * penalty if score < 0 else score / penalty
    scores = {token: score / options.get("temperature", 1.0) for token, score in scores.items()}
    if "top_k" in options:
        keep = sorted(scores, key=scores.get, reverse=True)[: options["top_k"]]
        scores = {token: scores[token] for token in keep}
    if "top_p" in options:
        law, kept, total = _softmax(scores), [], 0.0
        for token in sorted(law, key=law.get, reverse=True):
            if total >= options["top_p"]:
                break
            kept.append(token)
            total += law[token]
        scores = {token: scores[token] for token in kept}
    if "min_p" in options:
        law = _softmax(scores)
        limit = options["min_p"] * max(law.values())
        scores = {token: score for token, score in scores.items() if law[token] >= limit}
    return _softmax(scores)


def _softmax(scores: dict[int, float]) -> dict[int, float]:
    top = max(scores.values())
    weights = {token: math.exp(score - top) for token, score in scores.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def naive_drafts(block, ids: torch.Tensor, options: dict, processors: LogitsProcessorList | None):
    """Every draft that the sampler can return, with its probability: `{(token, ...): probability}`."""
    prompt, K = ids[0].tolist(), block.candidates.shape[-1]
    drafts = {(): 1.0}
    for slot in range(1, block.candidates.shape[1] + 1):
        longer = {}
        for draft, probability in drafts.items():
            row = naive_row(block, slot, draft[-1] if draft else None, processors is not None)
            if processors is None:
                law = naive_law(
                    {int(c): float(row[c]) for c in block.candidates[0, slot - 1]}, prompt + list(draft), options
                )
            else:
                row = processors(torch.tensor([prompt + list(draft)]), row.float()[None])[0].double()
                best = row.topk(K)
                law = _softmax({int(t): float(s) for t, s in zip(best.indices, best.values, strict=True) if s > -1e38})
            for token, share in law.items():
                longer[(*draft, token)] = probability * share
        drafts = longer
    return drafts


def step_law(drafts: dict, q_of, p_of) -> list[dict[tuple, float]]:
    """
    The law of a speculative step's output.

    Args:
        drafts: `{draft: probability that the sampler returns it}`.
        q_of: draft -> returned q, `[slots, V]` probabilities.
        p_of: tokens -> the target's distribution `[V]` after them.

    Returns:
        For each m, `{tokens[:m]: probability that the output has at least m tokens and begins with these}`.
    """
    slots = len(next(iter(drafts)))
    laws = [defaultdict(float) for _ in range(slots + 2)]
    for draft, probability in drafts.items():
        q, reach = q_of(draft), probability
        for n in range(slots + 1):
            p = p_of(draft[:n])
            if n == slots:
                last = p
                ending = reach
            else:
                accept = min(1.0, float(p[draft[n]] / q[n, draft[n]]))
                residual = (p - q[n]).clamp(min=0)
                last = residual / residual.sum() if residual.sum() > 0 else p
                ending = reach * (1 - accept)
            for m in range(n + 1):
                laws[m][draft[:m]] += ending
            for token in range(len(p)):
                laws[n + 1][(*draft[:n], token)] += ending * float(last[token])
            if n < slots:
                reach *= accept
    return laws


def distance_from_target(laws: list[dict], p_of) -> float:
    """The largest deviation of the step's law from the target's, over every prefix and every next token."""
    worst = abs(laws[0][()] - 1.0)
    for m in range(1, len(laws)):
        totals = defaultdict(float)
        for tokens, mass in laws[m].items():
            totals[tokens[:-1]] += mass
        for tokens, mass in laws[m].items():
            worst = max(worst, abs(mass - totals[tokens[:-1]] * float(p_of(tokens[:-1])[tokens[-1]])))
    return worst


def chi_square_p(counts: dict, expected: dict, draws: int) -> float:
    """p-value of observed counts against expected probabilities; cells expected below 5 times are pooled."""
    if any(cell not in expected for cell in counts):
        return 0.0
    statistic, cells, rest, rest_expected = 0.0, 0, draws, float(draws)
    for cell, probability in expected.items():
        mean = probability * draws
        if mean >= 5:
            statistic += (counts.get(cell, 0) - mean) ** 2 / mean
            cells += 1
            rest -= counts.get(cell, 0)
            rest_expected -= mean
    if rest_expected >= 1:
        statistic += (rest - rest_expected) ** 2 / rest_expected
        cells += 1
    if cells < 2:
        return 1.0  # a single outcome, which was checked above
    freedom = torch.tensor((cells - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
