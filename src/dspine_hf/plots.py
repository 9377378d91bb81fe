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
    pyplot = _pyplot()
    written = [_bars(pyplot, results, folder / "acceptance_length.png"), _slots(pyplot, results, folder / "slots.png")]
    curve = training_curve(training_state) if training_state else []
    if curve:
        written.append(_curve(pyplot, curve, folder / "training.png"))
    return written


def plot_analysis(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the content of `analysis.json` (see [`DrafterAnalysis.result`]) as PNG files in `folder`; their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot, k, layers = _pyplot(), result["num_candidates"], result["layers"]
    written = []
    if layers:
        maps = {f"true token among the {n} nearest of z": result["nearest"][n] for n in ("1", "16")}
        written.append(_heat_maps(pyplot, maps, layers, folder / "nearest.png"))
        none = result["forced"]["none"]["1"]
        told = {"only": "x_{t-1} told at this layer", "from": "x_{t-1} told from this layer on"}
        told["prefix"] = "x_1 .. x_{t-1} told from this layer on"
        gains = {
            f"gain in accuracy: {label}": [
                [a - b for a, b in zip(row, none, strict=True)] for row in result["forced"][kind]["1"]
            ]
            for kind, label in told.items()
        }
        written.append(_heat_maps(pyplot, gains, layers, folder / "messages.png"))
    recalls = {f"unary, true token in top {n}": row for n, row in result["unary"].items()}
    if "conditional" in result:
        recalls["given the true predecessor, top 1"] = result["conditional"]["1"]
    written.append(_lines(pyplot, recalls, folder / "coverage.png"))
    names = {
        "accepted_of_survivors": "accepted",
        "covered_of_survivors": f"true token in top {k}",
        "chosen_of_covered_survivors": "accepted where it is",
    }
    survivors = {f"{label}, all before accepted": result[name] for name, label in names.items()}
    return [*written, _lines(pyplot, survivors, folder / "survivors.png")]


def training_curve(state_file: Path) -> list[tuple[int, float]]:
    """(step, acceptance length) of every evaluation during training."""
    history = json.loads(Path(state_file).read_text())["log_history"]
    name = "eval_acceptance_length"
    return [(entry["step"], entry[name]) for entry in history if name in entry]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures are drawn with 'matplotlib': pip install 'dspine-hf[plot]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})
    return pyplot


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
    return _finish_slots(pyplot, figure, axes, path)


def _lines(pyplot: Any, rows: dict[str, list[float]], path: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(5.4, 3.6))
    for label, values in rows.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", markersize=3, label=label)
    return _finish_slots(pyplot, figure, axes, path)


def _heat_maps(pyplot: Any, maps: dict[str, list[list[float]]], layers: list[int], path: Path) -> Path:
    """One map under another, drafter layer by slot, with its numbers in per cent."""
    slots = len(next(iter(maps.values()))[0])
    size = (1.6 + 0.55 * slots, len(maps) * (1.0 + 0.4 * len(layers)))
    figure, all_axes = pyplot.subplots(len(maps), squeeze=False, figsize=size)
    for axes, (title, rows) in zip(all_axes[:, 0], maps.items(), strict=True):
        axes.imshow(rows, aspect="auto", cmap="viridis")
        low, high = min(map(min, rows)), max(map(max, rows))
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                colour = "black" if value > (low + high) / 2 else "white"
                axes.text(x, y, f"{100 * value:.1f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set_xticks(range(slots), range(1, slots + 1))
        axes.set_yticks(range(len(layers)), layers)
        axes.set_title(f"{title} (%)", fontsize=9)
        axes.set_xlabel("slot")
        axes.set_ylabel("layer")
    return _finish(pyplot, figure, path)


def _finish_slots(pyplot: Any, figure: Any, axes: Any, path: Path) -> Path:
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
