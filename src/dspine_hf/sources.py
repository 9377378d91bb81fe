"""Reads rows from a JSONL or Parquet file, a `datasets` folder, or a `datasets` name."""

import json
from pathlib import Path
from typing import Any


def read_rows(source: str | Path, split: str = "train") -> Any:
    """Rows as a list of dictionaries (JSONL) or as a `datasets.Dataset`.

    Args:
        source: a `.jsonl`, `.json` (lines) or `.parquet` file, a folder written by `save_to_disk` or by
            `dspine regenerate`, or a `datasets` name; `name:config` picks a configuration of it.
        split: the split of a data set that has several.

    Raises:
        FileNotFoundError: a path was given and nothing is there.
        ValueError: a line is no JSON object.
    """
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".json"):
        return read_jsonl(path)
    if path.suffix == ".parquet":
        if not path.is_file():
            raise FileNotFoundError(f"expected a Parquet file at '{path}'; found none. Check the path.")
        return _datasets().Dataset.from_parquet(str(path))
    if path.is_dir():
        found = _datasets().load_from_disk(str(path))
        return found[split] if hasattr(found, "keys") else found
    if str(source).startswith(("/", ".", "~")):
        raise FileNotFoundError(
            f"expected a .jsonl or .parquet file, a data set's folder or its name; found nothing at '{source}'."
        )
    name, _, config = str(source).partition(":")
    return _datasets().load_dataset(name, config or None, split=split)


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


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("data sets are read with the package 'datasets': pip install 'dspine-hf[train]'.") from error
    return datasets
