"""A file of finished pieces of work, one JSON line each, that survives being killed at any moment."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: two processes that share a journal are not noticed there
    fcntl = None  # type: ignore[assignment]


class Journal:
    """Appends entries durably; a line that was cut short by a kill is taken off when the journal is opened again.

    Args:
        path: the file. Its first line holds the settings.
        settings: what the entries depend on; an existing journal must have been written with the same.
        key: what tells entries apart; the entries then stay on disk, to be read back one by one with `read`.

    Attributes:
        entries: all entries, in the order written (empty with `key`).
        places: where the entry of each key begins in the file (empty without `key`).

    Raises:
        ValueError: the file was written with other settings.
        OSError: another journal of the same file is open, here or in another process.
    """

    def __init__(self, path: Path, settings: dict[str, Any], key: Callable[[Any], Any] | None = None):
        self.path, self.key = path, key
        self.entries: list[Any] = []
        self.places: dict[Any, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        _hold(self._file, path)
        self._end = 0
        self._recover(json.loads(json.dumps(settings)))

    def append(self, entry: Any) -> None:
        """Write one entry; when this returns, a kill does not lose it."""
        start = self._end
        self._write(entry)
        self._remember(entry, start)

    def read(self, key: Any) -> Any:
        """The entry of a key."""
        self._file.seek(self.places[key])
        return json.loads(self._file.readline())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _recover(self, settings: dict[str, Any]) -> None:
        first = True
        for line in iter(self._file.readline, b""):
            try:
                value = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                value = None
            if value is None:
                break
            if first:
                _check_settings(self.path, settings, value)
            else:
                self._remember(value, self._end)
            first = False
            self._end += len(line)
        self._file.truncate(self._end)
        if first:
            self._write(settings)

    def _remember(self, entry: Any, start: int) -> None:
        if self.key is None:
            self.entries.append(entry)
        else:
            self.places[self.key(entry)] = start

    def _write(self, value: Any) -> None:
        line = json.dumps(value).encode() + b"\n"
        try:
            self._file.seek(self._end)
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(
                f"expected to write to '{self.path}'; found: {error}. What it holds is whole: make room, and the same "
                "command goes on where it was."
            ) from error
        self._end += len(line)


def _hold(file: Any, path: Path) -> None:
    """Keep the file to this journal until it is closed or the process ends, where the file system can."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise OSError(
            f"expected '{path.parent}' to be written by one process; found another that is at work on it. Wait until "
            "it ends, or use another output folder."
        ) from error
    except OSError:  # a file system without locks
        return


def _check_settings(path: Path, wanted: dict[str, Any], found: dict[str, Any]) -> None:
    names = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if names:
        differences = ", ".join(f"{name}={found.get(name)!r} (now {wanted.get(name)!r})" for name in names)
        raise ValueError(
            f"'{path.parent}' holds work that was begun with {differences}. Use the same options to go on with it, or "
            "another output folder."
        )


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that it holds either its old or its new content, never a part of it."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
