"""A drafter's folder as the engines read it: the same weights, and the fields that their config parsers look for."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from ..checkpoint import INDEX, check_weights, read_config
from ..configuration_dspine import DSpineConfig
from ..journal import write_atomically

CONFIG = "config.json"


def serving_fields(config: DSpineConfig, engine_walk: int | None = None) -> dict[str, Any]:
    """What vLLM and SGLang read from a drafter's config.json beyond DSpine's own fields.

    A learned mask has no token: the engines get an id to fill the slots with, whose embedding is never used.
    With `engine_walk` a second architecture makes vLLM walk the candidates as it does those of a DFlash2 drafter.
    """
    if engine_walk is not None and config.selection != "transition":
        raise ValueError(
            f'only a drafter with selection="transition" has candidates to walk; this one has "{config.selection}". '
            "Export it without engine_walk."
        )
    if engine_walk is not None and not config.num_candidates <= engine_walk <= config.vocab_size:
        raise ValueError(
            f"engine_walk={engine_walk}: expected as many candidates as the drafter scores predecessors, "
            f"num_candidates={config.num_candidates}, or more, up to the vocabulary, {config.vocab_size}."
        )
    mask = config.mask_token_id
    fields: dict[str, Any] = {
        "mask_token_id": _any_token(config) if mask is None else mask,
        "target_layer_ids": config.target_layer_ids,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "output_multiplier": config.logit_scale,
        "final_logit_softcapping": config.logit_softcap,
    }
    if config.selection == "transition":
        fields |= {"selector_rank": config.transfer_rank, "selector_top_k": engine_walk or config.num_candidates}
    names = ["DSpineDraftModel", *([] if engine_walk is None else ["DFlash2DraftModel"])]
    return {"architectures": names, "dflash_config": fields}


def export(folder: Path, output: Path | None = None, copy: bool = False, engine_walk: int | None = None) -> list[str]:
    """Write a folder that vLLM, SGLang and Transformers read alike.

    Args:
        folder: a drafter's folder, whole and unpickled.
        output: a new or empty folder; None: the fields are added to the config.json of `folder` itself.
        copy: copy the weights instead of linking them. Links share the file: writing one folder's weights anew
            in place would change the other's.
        engine_walk: vLLM, not the drafter, walks this many candidates a slot, so that it can sample drafts; its model
            runner V2 alone does. At T = 0 `num_candidates` are enough, at T = 1 more are accepted from, say, 64.

    Returns:
        What was done, line by line.

    Raises:
        FileExistsError: `output` holds something.
        ValueError, FileNotFoundError: the folder is no whole drafter, or has no candidates to walk.
    """
    files = check_weights(folder)
    content = read_config(folder)
    content |= serving_fields(DSpineConfig.from_dict(content), engine_walk)
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    if output is None or output.absolute() == folder.absolute():
        write_atomically(folder / CONFIG, text)
        return [f"{folder / CONFIG}: added dflash_config"]
    if output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"expected a new or empty folder; found files in '{output}'. Name another one.")
    output.mkdir(parents=True, exist_ok=True)
    lines = [_place(file, output / file.name, copy) for file in files]
    if (folder / INDEX).is_file():
        shutil.copyfile(folder / INDEX, output / INDEX)
    write_atomically(output / CONFIG, text)
    return [*lines, f"{output / CONFIG}: written"]


def _any_token(config: DSpineConfig) -> int:
    return config.pad_token_id if config.pad_token_id is not None else 0


def _place(source: Path, goal: Path, copy: bool) -> str:
    """Link a file, or copy it where links cannot reach."""
    if not copy:
        try:
            os.link(source.resolve(), goal)
            return f"{goal}: linked, no second copy"
        except OSError:
            pass
    shutil.copyfile(source, goal)
    return f"{goal}: copied"
