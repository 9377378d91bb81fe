"""Writes a folder so that a kill at any moment leaves its old state, its new one, or one that does not load."""

import contextlib
import filecmp
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows: writers of one folder do not wait for each other there
    fcntl = None  # type: ignore[assignment]

STAGING = ".saving-"


@contextlib.contextmanager
def replaced_whole(folder: Path, keystone: str, is_stale: Callable[[str], object]) -> Iterator[Path]:
    """
    Yields an empty folder to write to, whose files then take the place of those in `folder`.

    If a single file changes, it is renamed over the old one. Else `keystone` is removed before anything changes and
    comes back last, so that a folder which was left in between is not read as a whole one. Other files stay.
    Processes that write to one folder wait for each other.

    Args:
        folder: made if it does not exist.
        keystone: the file without which `folder` does not load.
        is_stale: whether a file of this name, if it is not among the new ones, belongs to the old state and has to go.

    Raises:
        OSError: a file could not be written; `folder` then holds what it held before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as alone:
        for left in folder.glob(f"{STAGING}*") if alone else ():
            shutil.rmtree(left, ignore_errors=True)
        staging: Path | None = None
        try:
            staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=folder))
            yield staging
        except (OSError, SafetensorError) as error:
            _discard(staging)
            raise OSError(
                f"expected to write to '{folder}'; found: {error}. It holds what it held before. Free some space, or "
                "name another folder."
            ) from error
        except BaseException:
            _discard(staging)
            raise
        _move(staging, folder, keystone, is_stale)
        _discard(staging)


def weights_of(variant: str | None) -> Callable[[str], object]:
    """Whether a file of this name holds weights of a checkpoint, or is their index (of this variant, if any)."""
    part = re.escape(f".{variant}") if variant else ""
    shard = r"(-\d{5}-of-\d{5})?"
    return re.compile(rf"model{part}{shard}\.safetensors|model\.safetensors\.index{part}\.json").fullmatch


def _move(staging: Path, folder: Path, keystone: str, is_stale: Callable[[str], object]) -> None:
    new = sorted(path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file())
    stale = [name for name in os.listdir(folder) if name not in new and is_stale(name)]
    changed = [name for name in new if not _same(staging / name, folder / name)]
    last = [keystone] if keystone in new and len(changed) + len(stale) > 1 else []
    for name in last:
        (folder / name).unlink(missing_ok=True)
    for name in changed:
        if name not in last:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).replace(folder / name)
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    for name in last:
        (staging / name).replace(folder / name)


def _same(new: Path, old: Path) -> bool:
    return old.is_file() and filecmp.cmp(new, old, shallow=False)


def _discard(staging: Path | None) -> None:
    if staging is not None:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Holds the folder against other writers; False where the system or the file system cannot."""
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(handle)
