"""Reads rows from a JSONL or Parquet file, a `datasets` folder, or a `datasets` name."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

LINES = (".jsonl", ".json")
OTHER_FILES = (".arrow", ".bin", ".csv", ".gguf", ".gz", ".npz", ".pt", ".safetensors", ".tsv", ".txt", ".xz", ".zip")
SAVED = ("state.json", "dataset_dict.json")  # one of them is in every folder of save_to_disk
HUB_SECONDS = 10.0  # how long the Hub may take to say whether it has a data set


def read_rows(source: str | Path, split: str = "train", reachable: bool | None = None) -> Any:
    """Rows as a list of dictionaries (JSONL) or as a `datasets.Dataset`.

    Args:
        source: a `.jsonl`, `.json` (lines) or `.parquet` file, a folder written by `save_to_disk` or by
            `dspine regenerate`, or a `datasets` name; `name:config` picks a configuration of it.
        split: the split of a data set that has several.
        reachable: what [`check_source`] has said of this source, which is then not asked for again.

    Raises:
        FileNotFoundError: nothing is there, neither here nor on the Hub.
        ValueError: a line is no JSON object, or a file is of another kind.
    """
    if reachable is None:
        reachable = check_source(source)
    path = Path(source).expanduser()
    if path.suffix in LINES:
        return read_jsonl(path)
    if path.suffix == ".parquet":
        return _datasets().Dataset.from_parquet(str(path))
    if path.is_dir():
        found = _datasets().load_from_disk(str(path))
        return found[split] if hasattr(found, "keys") else found
    name, _, config = str(source).partition(":")
    with contextlib.nullcontext() if reachable else _offline():
        return _datasets().load_dataset(name, config or None, split=split)


def check_source(source: str | Path) -> bool:
    """Make sure that `source` is there, unread. False: the Hub is out of reach, but what an earlier call read is kept.

    What can only be a path is looked for on this machine alone; any other name that is not there, once on the Hub.

    Raises:
        FileNotFoundError: nothing is there, neither here nor on the Hub.
        ValueError: a file is of a kind that is not read, a folder holds no data set, or what is kept is another
            configuration.
    """
    path = Path(source).expanduser()
    if path.suffix in (*LINES, ".parquet"):
        if not path.is_file():
            kind = "Parquet" if path.suffix == ".parquet" else "JSON-lines"
            raise FileNotFoundError(f"expected a {kind} file at '{path}'; found none. Check the path.")
        return True
    if path.is_dir():
        if not any((path / name).is_file() for name in SAVED):
            raise ValueError(
                f"expected a data set's folder, as save_to_disk or 'dspine regenerate' write it; found neither "
                f"{' nor '.join(SAVED)} in '{path}'. Name that folder, or a file in it."
            )
        return True
    if path.is_file():
        raise ValueError(f"expected a .jsonl or .parquet file, or a data set's folder; found the file '{path}'.")
    name, _, config = str(source).partition(":")
    if str(source).startswith(("/", ".", "~")) or path.suffix in OTHER_FILES:
        raise FileNotFoundError(_nothing(source))
    try:
        validate_repo_id(name)
        HfApi().dataset_info(name, timeout=HUB_SECONDS)
    except HFValidationError:
        raise FileNotFoundError(_nothing(source)) from None
    except GatedRepoError:
        return True  # reading it says how to get access
    except RepositoryNotFoundError:
        raise FileNotFoundError(_nothing(source, "the Hub has no data set of this name")) from None
    except Exception as error:  # of the HTTP client that huggingface_hub has, which is not always the same
        with _offline():
            try:
                _datasets().load_dataset_builder(name, config or None)
            except OSError:
                reason = f"the Hub could not be asked for a data set of this name ({type(error).__name__})"
                raise FileNotFoundError(_nothing(source, reason)) from error
        return False
    return True


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every line's JSON object; empty lines are skipped."""
    if not path.is_file():
        raise FileNotFoundError(f"expected a JSON-lines file at '{path}'; found none. Check the path.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: expected one JSON object per line; {error}.") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: expected one JSON object per line; found a {type(row).__name__}.")
        rows.append(row)
    return rows


def _nothing(source: str | Path, hub: str = "") -> str:
    return (
        "expected a .jsonl or .parquet file, a data set's folder or the name of one on the Hub; found nothing at "
        f"'{source}'{', and ' if hub else ''}{hub}. Check the path; 'dspine regenerate' writes data to train on."
    )


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Inside, `datasets` takes what it has kept and does not try the Hub again and again."""
    config = _datasets().config
    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("data sets are read with the package 'datasets': pip install 'dspine-hf[train]'.") from error
    return datasets
