"""`dspine convert`: a DSpine drafter from a DFlash, DFlash2 or DSpark checkpoint."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..convert import convert
from ..loading import checkpoint_folder
from .common import load_quietly, parse_fields


def run(
    source: Annotated[str, typer.Argument(help="Folder or Hub name of the checkpoint, with safetensors weights.")],
    output_dir: Annotated[Path, typer.Argument(help="Where the DSpine drafter goes.")],
    target: Annotated[
        str | None,
        typer.Option(help="Hub name, folder or .gguf file of the target; not needed for DFlash as it is."),
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(help="Field of the DSpineConfig, e.g. injection=all. Repeatable.")
    ] = None,
) -> None:
    """Read another block drafter as a DSpine drafter, and say which tensors were taken, dropped and new.

    DFlash drafts as before. With --config injection=all, or from DFlash2 and DSpark, what is new writes nothing until
    it is trained: dspine train --drafter OUTPUT_DIR --target ...
    """
    folder = checkpoint_folder(source, "the checkpoint (a folder or a Hub name)")
    model = None if target is None else load_quietly(target, torch.float32)[0]
    conversion = convert(folder, model, **parse_fields(config or []))
    conversion.drafter.save_pretrained(output_dir)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for line in conversion.lines():
        console.print(line)
    console.print(f"Written to {output_dir}")
