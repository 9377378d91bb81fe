"""`dspine card`: write a drafter's README.md and its pictures from what was measured."""

from pathlib import Path
from typing import Annotated

import typer

from ..hub import write_card


def run(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of the drafter, with results.json ('dspine eval') and training.json ('dspine train')."
        ),
    ],
    repo_id: Annotated[
        str, typer.Argument(help="Where it will be published; the snippets name it.", metavar="ORG/NAME")
    ],
) -> None:
    """Write README.md from config.json, results.json and training.json; a missing number is an error."""
    print(f"Written: {write_card(folder, repo_id)}")
