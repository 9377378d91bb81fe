"""The `dspine` command. Each sub-command is the function `run` of its own module in `dspine_hf.commands`."""

import importlib
import os
import sys
from collections.abc import Sequence

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
        app(args=arguments)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("DSPINE_DEBUG"):
            raise
        console = Console(stderr=True)
        console.print("error:", style="bold red", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        console.print("DSPINE_DEBUG=1 shows where it came from.", style="dim")
        sys.exit(1)


if __name__ == "__main__":
    main()
