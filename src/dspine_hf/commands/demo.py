"""`dspine demo`: the embedded target with and without its drafter, first to watch, then measured."""

import json
import sys
import textwrap
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..embedded import TARGET_NAME
from .common import Answer, Dtype, Pair, answer, encode, load_pair

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "A train travels 60 km in 45 minutes. What is its average speed in km/h? Think step by step.",
    "List five habits that help people sleep better.",
    "Write a short e-mail asking a colleague to review a report by Friday.",
    "What is photosynthesis, and why does it matter?",
    "Write a SQL query that counts the orders of each customer.",
    "Give me a simple recipe for vegetable soup.",
)


@dataclass
class Comparison:
    """One prompt answered both ways."""

    prompt: str
    plain: Answer
    drafted: Answer

    @property
    def first_difference(self) -> int | None:
        """Index of the first new token that differs; None when both answers are the same tokens."""
        ours, theirs = self.drafted.token_ids, self.plain.token_ids
        if ours == theirs:
            return None
        shared = min(len(ours), len(theirs))
        return next((i for i in range(shared) if ours[i] != theirs[i]), shared)

    @property
    def speedup(self) -> float:
        return self.drafted.tokens_per_second / self.plain.tokens_per_second


def run(
    drafter: Annotated[
        str | None, typer.Option(help="Folder or Hub name of the drafter; default: the one trained for this target.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, max=len(PROMPTS), help="How many prompts to measure.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Length limit of each answer, in tokens.")] = 128,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of target and drafter.")] = Dtype.bfloat16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Answer the same prompts plain and drafted, on a small chat model that needs no download, and compare."""
    console = Console(file=sys.stderr if as_json else sys.stdout, quiet=as_json)
    with console.status(f"Loading {TARGET_NAME} and its drafter"):
        pair = load_pair(None, drafter, dtype.torch)
    for drafted in (False, True):  # the first call of each kind pays for allocations and kernel choice
        answer(pair, encode(pair.tokenizer, PROMPTS[0], pair.target.device), drafted=drafted, max_new_tokens=12)
    if not as_json:
        watch(console, pair, PROMPTS[0], max_new_tokens)
    with console.status("Measuring") as status:
        comparisons = []
        for index, prompt in enumerate(PROMPTS[:prompts]):
            status.update(f"Measuring prompt {index + 1} of {prompts}, plain and drafted")
            comparisons.append(compare(pair, prompt, max_new_tokens, drafted_first=index % 2 == 1))
    result = summarise(pair, comparisons, max_new_tokens)
    if as_json:
        print(json.dumps(result))
    else:
        show(console, comparisons, result)


def compare(pair: Pair, prompt: str, max_new_tokens: int, drafted_first: bool) -> Comparison:
    """Answer one prompt greedily both ways. Callers alternate the order, so that a drift of the clock cancels."""
    inputs = encode(pair.tokenizer, prompt, pair.target.device)
    answers = {
        drafted: answer(pair, inputs, drafted=drafted, max_new_tokens=max_new_tokens)
        for drafted in (drafted_first, not drafted_first)
    }
    return Comparison(prompt, answers[False], answers[True])


def summarise(pair: Pair, comparisons: list[Comparison], max_new_tokens: int) -> dict[str, Any]:
    """Everything measured, as JSON: medians over the prompts; acceptance length over all rounds of all prompts."""
    rounds = sum(c.drafted.stats.rounds for c in comparisons)
    return {
        "identical": all(c.first_difference is None for c in comparisons),
        "speedup": round(median(c.speedup for c in comparisons), 4),
        "acceptance_length": round(sum(len(c.drafted.token_ids) - 1 for c in comparisons) / max(rounds, 1), 4),
        "tokens_per_second_plain": round(median(c.plain.tokens_per_second for c in comparisons), 4),
        "tokens_per_second_drafted": round(median(c.drafted.tokens_per_second for c in comparisons), 4),
        "target": pair.target_name,
        "drafter": pair.drafter_name,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": pair.target.device.type,
        "threads": torch.get_num_threads(),
        "max_new_tokens": max_new_tokens,
        "prompts": [
            {
                "prompt": c.prompt,
                "new_tokens": len(c.drafted.token_ids),
                "first_difference": c.first_difference,
                "speedup": round(c.speedup, 4),
                "acceptance_length": round(c.drafted.stats.acceptance_length, 4),
                "tokens_per_second_plain": round(c.plain.tokens_per_second, 4),
                "tokens_per_second_drafted": round(c.drafted.tokens_per_second, 4),
            }
            for c in comparisons
        ],
    }


def watch(console: Console, pair: Pair, prompt: str, max_new_tokens: int) -> None:
    """Stream one answer plain, then drafted, into two columns, each under its own clock."""
    inputs = encode(pair.tokenizer, prompt, pair.target.device)
    titles = {False: "generate()", True: "generate(assistant_model=drafter)"}
    texts = {False: Text(), True: Text()}
    footers = {False: "", True: ""}

    def frame() -> Group:
        width = max(30, min(console.width, 140) // 2 - 1)
        panels = [
            Panel(texts[way], title=titles[way], subtitle=footers[way] or None, width=width, style=style)
            for way, style in ((False, "none"), (True, "green"))
        ]
        return Group(Text(f"> {prompt}", style="bold"), Columns(panels, padding=(0, 1)))

    with Live(frame(), console=console, refresh_per_second=8, vertical_overflow="visible") as live:
        for drafted in (False, True):

            def on_text(piece: str, text: Text = texts[drafted]) -> None:
                text.append(piece)
                live.update(frame())

            done = answer(pair, inputs, drafted=drafted, max_new_tokens=max_new_tokens, on_text=on_text)
            footers[drafted] = f"{len(done.token_ids)} tokens in {done.seconds:.1f} s"
            live.update(frame())
    if not console.is_terminal:  # Live ends the line on terminals only
        console.line()
    console.line()


def show(console: Console, comparisons: list[Comparison], result: dict[str, Any]) -> None:
    """Print the table of the measured prompts and what it adds up to."""
    table = Table(title=f"{result['target']}, {result['dtype']} on {result['device']}, greedy", title_justify="left")
    table.add_column("prompt")
    for column in ("tokens", "plain\ntok/s", "drafted\ntok/s", "speed-\nup", "acc.\nlength"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True)
    width = min(60, max(12, console.width - 66))
    for c in comparisons:
        label = textwrap.shorten(c.prompt, width, placeholder=" …")
        table.add_row(*_cells(label, len(c.drafted.token_ids), _numbers(c), c.first_difference))
    table.add_section()
    tokens = sum(len(c.drafted.token_ids) for c in comparisons)
    same = None if result["identical"] else -1
    table.add_row(*_cells("overall", tokens, result, same), style="bold")
    table.caption = "overall: median speeds, acceptance length of all rounds together"
    console.print(table)
    if not result["identical"]:
        console.print(
            "A pass over several tokens rounds differently from a pass over one, so where two tokens are nearly tied "
            "in 16 bits, either may win. '--dtype float32' leaves no such ties.",
            style="dim",
        )


def _numbers(c: Comparison) -> dict[str, float]:
    return {
        "tokens_per_second_plain": c.plain.tokens_per_second,
        "tokens_per_second_drafted": c.drafted.tokens_per_second,
        "speedup": c.speedup,
        "acceptance_length": c.drafted.stats.acceptance_length,
    }


def _cells(label: str, tokens: int, numbers: dict[str, Any], difference: int | None) -> list[str]:
    """One row of the table. `difference`: None for the same text, -1 for some other text, else the token's index."""
    same = "identical" if difference is None else "differs" if difference < 0 else f"differs at {difference}"
    return [
        label,
        str(tokens),
        f"{numbers['tokens_per_second_plain']:.1f}",
        f"{numbers['tokens_per_second_drafted']:.1f}",
        f"{numbers['speedup']:.2f}x",
        f"{numbers['acceptance_length']:.2f}",
        same,
    ]
