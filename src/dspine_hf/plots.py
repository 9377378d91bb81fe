"""Pictures of an evaluation: bars per benchmark, acceptance by slot, and acceptance length over training."""

import json
from pathlib import Path
from typing import Any


def plot_results(results: dict[str, Any], folder: Path, training_state: Path | None = None) -> list[Path]:
    """Write the pictures as PNG files into `folder`, and return their paths.

    Args:
        results: the content of `results.json`.
        training_state: `trainer_state.json` of the drafter's training, for the curve over steps.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures are drawn with 'matplotlib': pip install 'dspine-hf[plot]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})
    written = [_bars(pyplot, results, folder / "acceptance_length.png"), _slots(pyplot, results, folder / "slots.png")]
    curve = training_curve(training_state) if training_state else []
    if curve:
        written.append(_curve(pyplot, curve, folder / "training.png"))
    return written


def training_curve(state_file: Path) -> list[tuple[int, float]]:
    """(step, acceptance length) of every evaluation during training."""
    history = json.loads(Path(state_file).read_text())["log_history"]
    name = "eval_acceptance_length"
    return [(entry["step"], entry[name]) for entry in history if name in entry]


def _bars(pyplot: Any, results: dict[str, Any], path: Path) -> Path:
    temperatures = results["temperatures"]
    names = list(next(iter(temperatures.values()))["benchmarks"])
    figure, axes = pyplot.subplots(figsize=(1.2 + 1.1 * len(names), 3.6))
    width = 0.8 / len(temperatures)
    for i, (temperature, figures) in enumerate(temperatures.items()):
        rows = [figures["benchmarks"][name] for name in names]
        values = [row["acceptance_length"] for row in rows]
        low, high = zip(*(row["acceptance_length_interval"] for row in rows), strict=True)
        errors = [
            [max(0.0, v - a) for v, a in zip(values, low, strict=True)],
            [max(0.0, b - v) for v, b in zip(values, high, strict=True)],
        ]
        places = [n + (i - (len(temperatures) - 1) / 2) * width for n in range(len(names))]
        axes.bar(places, values, width * 0.92, yerr=errors, capsize=2, label=f"T = {temperature}")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right")
    axes.set_ylabel("acceptance length (tokens per target pass)")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    return _finish(pyplot, figure, path)


def _slots(pyplot: Any, results: dict[str, Any], path: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(5.4, 3.6))
    kinds = (
        ("slot_acceptance", "accepted, given all before it", "-"),
        ("slot_accuracy_teacher_forced", "right, given the true predecessor", "--"),
    )
    for temperature, figures in results["temperatures"].items():
        for name, label, style in kinds:
            values = figures.get(name)
            if values:
                places = range(1, len(values) + 1)
                axes.plot(places, values, style, marker="o", markersize=3, label=f"{label}, T = {temperature}")
    axes.set_xlabel("slot")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("share")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return _finish(pyplot, figure, path)


def _curve(pyplot: Any, curve: list[tuple[int, float]], path: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(5.4, 3.6))
    steps, values = zip(*curve, strict=True)
    axes.plot(steps, values, marker="o", markersize=3)
    axes.set_xlabel("training step")
    axes.set_ylabel("acceptance length, T = 0")
    axes.grid(alpha=0.3)
    return _finish(pyplot, figure, path)


def _finish(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
