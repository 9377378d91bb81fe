"""The tables of an analysis: covering and choosing by slot, and what each layer knows and gains, by layer and slot."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table


def analysis_tables(result: dict[str, Any]) -> Iterator[Table]:
    """Rich tables of [`DrafterAnalysis.result`], shares in per cent."""
    rows = {f"unary, top {k}": row for k, row in result["unary"].items()}
    if "conditional" in result:
        rows["given the true predecessor"] = result["conditional"]["1"]
        rows["the same, where covered"] = result["chosen_given_truth"]
    rows["survivors: accepted"] = result["accepted_of_survivors"]
    rows["survivors: covered"] = result["covered_of_survivors"]
    rows["survivors: accepted where covered"] = result["chosen_of_covered_survivors"]
    yield _table(f"Covering and choosing, K = {result['num_candidates']}", rows)
    if not result["layers"]:
        return
    names = [f"layer {i}" for i in result["layers"]]
    for depth in ("1", "16"):
        yield _table(
            f"True token among the {depth} nearest of z", dict(zip(names, result["nearest"][depth], strict=True))
        )
        for kind, told in (
            ("only", "at this layer only"),
            ("from", "from this layer on"),
            ("prefix", "from it on, all before too"),
        ):
            rows = {"nothing told": result["forced"]["none"][depth]}
            rows |= zip(names, result["forced"][kind][depth], strict=True)
            yield _table(f"Unary top {depth}, true predecessor told {told}", rows)


def _table(title: str, rows: dict[str, list[float]]) -> Table:
    slots = len(next(iter(rows.values())))
    made = Table("", *map(str, range(1, slots + 1)), title=f"{title}, % by slot", title_justify="left")
    for name, values in rows.items():
        made.add_row(name, *(f"{100 * value:.1f}" for value in values))
    return made
