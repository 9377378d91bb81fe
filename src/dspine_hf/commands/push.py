"""`dspine push`: publish a trained drafter on the Hub, with its code, its card and its results."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..hub import push


def run(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the drafter, with results.json ('dspine eval') and training.json.")
    ],
    repo_id: Annotated[str, typer.Argument(help="Where to: org/name.", metavar="ORG/NAME")],
    private: Annotated[bool | None, typer.Option("--private", help="Make a new repository private.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to; default: main.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and show everything, send nothing.")] = False,
) -> None:
    """Send weights, code, card and results in one commit, or nothing at all if anything is missing.

    The token is the one of 'hf auth login', or HF_TOKEN. After a broken connection, the same command goes on.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False)
    push(
        folder,
        repo_id,
        private=private,
        revision=revision,
        create_pr=create_pr,
        dry_run=dry_run,
        echo=console.print,
    )
