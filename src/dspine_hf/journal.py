"""A file of finished pieces of work, one JSON line each, that survives being killed at any moment."""

import json
import os
from pathlib import Path
from typing import Any


class Journal:
    """Appends entries durably; a line that was cut short by a kill is taken off when the journal is opened again.

    Args:
        path: the file. Its first line holds the settings.
        settings: what the entries depend on; an existing journal must have been written with the same.

    Raises:
        ValueError: the file was written with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self.entries: list[Any] = []
        settings = json.loads(json.dumps(settings))
        path.parent.mkdir(parents=True, exist_ok=True)
        whole, lines = self._read()
        if lines:
            _check_settings(path, settings, lines[0])
            self.entries = lines[1:]
        self._file = open(path, "r+b" if path.exists() else "w+b")
        self._file.truncate(whole)
        self._file.seek(whole)
        if not lines:
            self._write(settings)

    def append(self, entry: Any) -> None:
        """Write one entry; when this returns, a kill does not lose it."""
        self._write(entry)
        self.entries.append(entry)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, value: Any) -> None:
        self._file.write(json.dumps(value).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> tuple[int, list[Any]]:
        """The length in bytes of all whole lines, and their values."""
        whole, values = 0, []
        content = self.path.read_bytes() if self.path.exists() else b""
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                values.append(json.loads(line))
            except ValueError:
                break
            whole += len(line)
        return whole, values


def _check_settings(path: Path, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    names = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if names:
        differences = ", ".join(f"{name}={found.get(name)!r} (now {wanted.get(name)!r})" for name in names)
        raise ValueError(
            f"'{path.parent}' holds work that was begun with {differences}. Use the same options to go on with it, or "
            "another output folder."
        )


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it holds either its old or its new content, never a part of it."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
