"""The `dspine` command. Each sub-command is the function `run` of its own module in `dspine_hf.commands`."""

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from rich.console import Console

from .commands.common import hide_loading_bars

COMMANDS = ("demo", "generate", "regenerate", "train", "eval", "convert", "export", "card", "push")

app = typer.Typer(
    name="dspine",
    help="Draft blocks of tokens for a causal LM: the same text in fewer target passes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name in COMMANDS:
    _module = importlib.import_module(f"dspine_hf.commands.{_name}")
    _context = getattr(_module, "CONTEXT", None)
    app.command(_name, context_settings=_context, epilog=getattr(_module, "EPILOG", None))(_module.run)


@app.callback()
def _root() -> None:
    """Comes before every command."""
    hide_loading_bars()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. What the user can cure is said in one line on stderr, with exit code 1."""
    try:
        with _plain_warnings():
            app(args=arguments)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("DSPINE_DEBUG"):
            raise
        console = Console(stderr=True)
        console.print("error:", style="bold red", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        console.print("DSPINE_DEBUG=1 shows where it came from.", style="dim")
        sys.exit(1)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Inside, a warning to the user is one line, without the source line that it comes from."""
    before = warnings.formatwarning

    def one_line(message: Any, category: Any, *where: Any, **more: Any) -> str:
        if category is not UserWarning or os.environ.get("DSPINE_DEBUG"):
            return before(message, category, *where, **more)
        return f"warning: {' '.join(str(message).split())}\n"

    warnings.formatwarning = one_line
    try:
        yield
    finally:
        warnings.formatwarning = before


if __name__ == "__main__":
    main()
