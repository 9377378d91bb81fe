"""Confidence intervals of acceptance lengths, by resampling prompts; paired when two drafters are compared."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def interval(
    pairs: Sequence[tuple[int, int]], resamples: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of sum(tokens) / sum(rounds) over prompts; pairs: (new tokens - 1, rounds) per prompt."""
    values = np.asarray(pairs, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    ratios = values[drawn, 0].sum(1) / np.maximum(values[drawn, 1].sum(1), 1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return round(float(low), 4), round(float(high), 4)


def compare(
    ours: Iterable[dict[str, Any]],
    theirs: Iterable[dict[str, Any]],
    without_loops: bool = False,
    resamples: int = 10000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Any]:
    """Ratio of two drafters' mean acceptance lengths on the same prompts, with a paired bootstrap interval.

    Prompts are resampled within each benchmark, the same ones for both drafters; the mean is over benchmarks.

    Args:
        ours, theirs: records of [`Evaluator`], of one temperature. Prompts that only one of them has are left out.
        without_loops: compare the answers up to where they begin to repeat themselves.

    Returns:
        {"ratio", "interval": [low, high], "ours", "theirs", "prompts", "benchmarks": {name: {the same}}}

    Raises:
        ValueError: they share no prompt.
    """
    fields = ("clean_tokens", "clean_rounds") if without_loops else ("new_tokens", "rounds")
    tables = [
        {(r["benchmark"], r["index"]): (r[fields[0]] - 1, r[fields[1]]) for r in rows} for rows in (ours, theirs)
    ]
    shared = sorted(tables[0].keys() & tables[1].keys())
    if not shared:
        raise ValueError("expected two evaluations of the same prompts; they share none. Evaluate both on one set.")
    rng = np.random.default_rng(seed)
    benchmarks: dict[str, Any] = {}
    means = np.zeros((2, resamples + 1))
    names = sorted({name for name, _ in shared})
    for name in names:
        keys = [key for key in shared if key[0] == name]
        values = np.array([[table[key] for key in keys] for table in tables], dtype=np.float64)  # [2, n, 2]
        drawn = np.vstack([np.arange(len(keys)), rng.integers(len(keys), size=(resamples, len(keys)))])
        taus = values[:, drawn, 0].sum(-1) / np.maximum(values[:, drawn, 1].sum(-1), 1)  # [2, 1 + resamples]
        means += taus / len(names)
        benchmarks[name] = _figures(taus, len(keys), level)
    return {**_figures(means, len(shared), level), "benchmarks": benchmarks}


def _figures(taus: np.ndarray, prompts: int, level: float) -> dict[str, Any]:
    """Column 0 is the data itself, the others are resamples."""
    ratios = taus[0] / taus[1]
    low, high = np.quantile(ratios[1:], [(1 - level) / 2, (1 + level) / 2])
    return {
        "ratio": round(float(ratios[0]), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "ours": round(float(taus[0, 0]), 4),
        "theirs": round(float(taus[1, 0]), 4),
        "prompts": prompts,
    }
