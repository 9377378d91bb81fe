"""Is a folder a whole drafter? Its config, its weights file by file, and nothing that needs unpickling."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .configuration_dspine import DSpineConfig
from .modeling_dspine import DSpineDraftModel

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib"}
TRAINER_STATE = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")


def refuse_pickles(folder: Path) -> None:
    """Raise ValueError if `folder` holds weights in a format that runs code when it is read.

    The states that a Trainer leaves beside its checkpoints are passed over: nothing reads or sends them.
    """
    found = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in PICKLE_SUFFIXES and not path.name.startswith(TRAINER_STATE)
    )
    if found:
        raise ValueError(
            f"expected weights as *.safetensors in '{folder}'; found pickled files, which run code when they are "
            f"read: {', '.join(found)}. Convert them with safetensors where you trust them, and remove them."
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a drafter's config.json.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a DSpine drafter's, or is not valid.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a drafter's folder (config.json and *.safetensors) at '{folder}'; found no config.json. "
            "Check the path, or train a drafter with 'dspine train'."
        )
    content = read_json(path)
    if content.get("model_type") != DSpineConfig.model_type:
        raise ValueError(
            f"expected model_type 'dspine' in '{path}'; found {content.get('model_type')!r}. Name a drafter's "
            "folder, or make one of another kind of checkpoint with 'dspine convert'."
        )
    return content


def read_json(path: Path) -> Any:
    """A JSON file's content; ValueError names the file if it is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"expected JSON in '{path}'; found {error}. Write the file again.") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or those that its index names.

    Raises:
        FileNotFoundError: there are none, or a shard is missing.
        ValueError: both one file and an index.
    """
    refuse_pickles(folder)
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file() and index.is_file():
        raise ValueError(f"expected either {WEIGHTS} or {INDEX} in '{folder}'; found both. Remove the stale one.")
    if single.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(f"expected {WEIGHTS} or {INDEX} in '{folder}'; found neither. Save the drafter again.")
    names = sorted(set(read_json(index)["weight_map"].values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"expected the {len(names)} shards that {INDEX} names in '{folder}'; missing: {', '.join(missing)}. "
            "Save the drafter again, or download the rest."
        )
    return [folder / name for name in names]


def read_tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of these safetensors files, with its name.

    Raises:
        ValueError: a file is cut short or no safetensors file.
    """
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"expected a whole safetensors file at '{file}'; found: {error}. Write or download it again."
            ) from error


def check_weights(folder: Path) -> list[Path]:
    """The weight files of a drafter, every tensor looked at.

    Raises:
        ValueError: a tensor is missing, superfluous, of another shape than the config says, or not finite.
    """
    files = weight_files(folder)
    config = DSpineConfig.from_dict(read_config(folder))
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in DSpineDraftModel(config).state_dict().items()}
    found: dict[str, tuple[int, ...]] = {}
    broken = []
    for name, tensor in read_tensors(files):
        found[name] = tuple(tensor.shape)
        if not bool(tensor.isfinite().all()):
            broken.append(name)
    wrong = sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name])
    for kind, names in (
        ("missing", sorted(wanted.keys() - found.keys())),
        ("superfluous", sorted(found.keys() - wanted.keys())),
        ("of another shape than config.json says", wrong),
        ("with numbers that are not finite", broken),
    ):
        if names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(
                f"expected the {len(wanted)} tensors of this drafter in '{folder}'; {len(names)} are {kind}: {shown}. "
                "Save the drafter again."
            )
    return files


def checkpoint_step(folder: str | Path) -> int:
    """After how many steps the Trainer wrote a checkpoint."""
    return int(Path(folder).name.rpartition("-")[2])
