"""`dspine export`: a drafter's folder as vLLM and SGLang read it."""

from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import snapshot_download
from rich.console import Console

from ..serving.export import export
from .convert import CODE_FREE


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
    folder = Path(source).expanduser()
    if not folder.is_dir():
        if output_dir is None:
            raise ValueError(f"'{source}' is no folder here: name one for the result too, dspine export NAME OUTPUT.")
        folder = Path(snapshot_download(source, allow_patterns=CODE_FREE))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for line in export(folder, output_dir, copy, engine_walk):
        console.print(line)
