"""What `dspine demo` shows on a terminal: two answers as they grow, and the table of what was measured."""

import textwrap
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .common import Pair, answer, encode


def drafted_by(loop: dict[str, Any] | None) -> str:
    """The call that drafts. `loop`: see [`answer`]."""
    if loop is None:
        return "generate(assistant_model=drafter)"
    return f"dspine_hf.generate({', '.join(f'{name}={value}' for name, value in loop.items())})"


def watch(
    console: Console,
    pair: Pair,
    prompt: str,
    max_new_tokens: int,
    timed_in: str,
    loop: dict[str, Any] | None = None,
) -> None:
    """Stream one answer plain, then drafted, into two columns; their seconds are shown where their dtype is timed."""
    titles = {False: "generate()", True: drafted_by(loop)}
    dtype = str(pair.target.dtype).removeprefix("torch.")
    if dtype != timed_in:
        note = f"To watch, in {dtype}, where both texts must be the same. The table below is timed, in {timed_in}."
        console.print(note, style="dim", highlight=False)
    inputs = encode(pair.tokenizer, prompt, pair.target.device)
    texts = {False: Text(), True: Text()}
    times = {False: "", True: ""}

    def frame() -> Group:
        width = max(30, min(console.width, 140) // 2 - 1)
        panels = [
            Panel(texts[way], title=titles[way], subtitle=times[way] or None, width=width, border_style=style)
            for way, style in ((False, "none"), (True, "green"))
        ]
        return Group(Text(f"> {prompt}", style="bold"), Columns(panels, padding=(0, 1)))

    with Live(frame(), console=console, refresh_per_second=8, vertical_overflow="visible") as live:
        for drafted in (False, True):

            def on_text(piece: str, text: Text = texts[drafted]) -> None:
                text.append(piece)
                live.update(frame())

            way = loop if drafted else None
            done = answer(pair, inputs, drafted=drafted, max_new_tokens=max_new_tokens, on_text=on_text, loop=way)
            took = f" in {done.seconds:.1f} s, {dtype}" if dtype == timed_in else f", {dtype}, not timed"
            times[drafted] = f"{len(done.token_ids)} tokens{took}"
            live.update(frame())
    if not console.is_terminal:  # Live ends its last line on terminals only
        console.line()
    console.line()


def show(console: Console, result: dict[str, Any]) -> None:
    """Print what `summarise` returned as a table: one row a prompt, and what they add up to."""
    timed_in, count = result["timed_in"], len(result["prompts"])
    title = f"{result['target']} on {result['device']}, greedy, timed in {timed_in}"
    table = Table(title=title, title_justify="left")
    table.add_column("prompt")
    for column in ("tokens", "plain\ntok/s", "drafted\ntok/s", "speed-\nup", "acc.\nlength"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column(f"text\n({result['text_compared_in']})", no_wrap=True)
    width = min(60, max(12, console.width - 66))
    for row in result["prompts"]:
        same = "identical" if row["identical"] else f"differs at {row['first_difference']}"
        label = textwrap.shorten(row["prompt"], width, placeholder=" …")
        table.add_row(*_cells(label, str(row["new_tokens"]), row), same)
    table.add_section()
    tokens = str(sum(row["new_tokens"] for row in result["prompts"]))
    same = "identical" if result["identical"] else "differs"
    table.add_row(*_cells("overall", tokens, result), same, style="bold")
    table.caption = "overall: median speeds, acceptance length of all rounds together"
    console.print(table)
    differing = count - result["identical_answers_when_timed"]
    if timed_in != result["text_compared_in"] and differing:
        console.print(
            f"In {timed_in}, {differing} of {count} texts part at some token: a pass over several tokens rounds "
            f"differently from a pass over one, which decides between tokens tied to the last bit.",
            style="dim",
            highlight=False,
        )


def _cells(label: str, tokens: str, numbers: dict[str, Any]) -> list[str]:
    """The first six cells of a row; `numbers` is a prompt's entry or the whole result, which share their keys."""
    return [
        label,
        tokens,
        f"{numbers['tokens_per_second_plain']:.1f}",
        f"{numbers['tokens_per_second_drafted']:.1f}",
        f"{numbers['speedup']:.2f}x",
        f"{numbers['acceptance_length']:.2f}",
    ]
