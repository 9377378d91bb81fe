"""`dspine export`: a drafter's folder as vLLM and SGLang read it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..loading import checkpoint_folder
from ..serving.export import export


def run(
    source: Annotated[str, typer.Argument(help="Folder or Hub name of a DSpine drafter.")],
    output_dir: Annotated[
        Path | None,
        typer.Argument(help="New folder; left out: the fields are added to the config.json of the source folder."),
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the weights; otherwise they are linked.")] = False,
    engine_walk: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="For T > 0: vLLM samples each draft itself, from N candidates a slot (say 64). Needs a GPU.",
        ),
    ] = None,
) -> None:
    """Add what the engines' config parsers need. One folder serves vLLM, SGLang and Transformers.

    The launch commands are in the README, section Serving.
    """
    if output_dir is None and not Path(source).expanduser().is_dir():
        raise ValueError(f"'{source}' is no folder here: name one for the result too, dspine export NAME OUTPUT.")
    folder = checkpoint_folder(source)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for line in export(folder, output_dir, copy, engine_walk):
        console.print(line)
