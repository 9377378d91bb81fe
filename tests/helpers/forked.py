"""Runs a function in a forked child, where everything is imported already, and ends the child in the midst of it."""

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.copyfile", "socket.connect"}
WRITING = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Kill:
    """When a child dies: SIGKILL after `at` seconds ("time") or before its `at`-th event ("event": a file opened for
    writing, renamed, removed, a folder made, a connection), or while a file grows past `at` bytes ("bytes")."""

    way: str
    at: float


@dataclass
class Ended:
    """How a child ended: exit status (negative: the signal), what it printed, what the function returned (as JSON),
    seconds and events."""

    status: int
    said: str
    value: Any = None
    seconds: float = 0.0
    events: int = 0

    @property
    def killed(self) -> bool:
        return self.status in (-signal.SIGKILL, -signal.SIGXFSZ)


class Child:
    """A child that runs `work`; wait for it with `end`.

    Args:
        work: what to run. It fails the child (status 1, the traceback printed) if it raises.
        kill: when it dies.
        largest: no file may grow beyond so many bytes: writing fails, as on a full disk (but with EFBIG).
        start: the child waits until this time (`time.monotonic`) before it begins.
    """

    def __init__(
        self, work: Callable[[], Any], kill: Kill | None = None, largest: int | None = None, start: float = 0.0
    ):
        self._kill, self._start = kill, time.monotonic()
        self._result, theirs = os.pipe()
        self._said, mouth = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._result)
            os.close(self._said)
            _be_child(work, kill, largest, start, theirs, mouth)
        os.close(theirs)
        os.close(mouth)

    def end(self, timeout: float = 120.0) -> Ended:
        """Wait for the end; AssertionError (and SIGKILL) if there is none."""
        deadline = time.monotonic() + timeout
        death = self._start + self._kill.at if self._kill is not None and self._kill.way == "time" else None
        said, result, late = b"", b"", False
        open_ends = {self._said, self._result}
        while open_ends:
            until = min(deadline, death if death is not None else deadline)
            ready, _, _ = select.select(list(open_ends), [], [], max(0.0, until - time.monotonic()))
            for end in ready:
                if piece := os.read(end, 65536):
                    said, result = (said + piece, result) if end == self._said else (said, result + piece)
                else:
                    open_ends.discard(end)
            now = time.monotonic()
            if death is not None and now >= death or now >= deadline:
                late, death = late or now >= deadline, None
                os.kill(self.pid, signal.SIGKILL)
        os.close(self._said)
        os.close(self._result)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert not late, f"no end after {timeout:.0f} s:\n{said.decode(errors='replace')[-3000:]}"
        found = json.loads(result) if result else {}
        return Ended(status, said.decode(errors="replace"), **found)


def forked(work: Callable[[], Any], kill: Kill | None = None, largest: int | None = None) -> Ended:
    """Run `work` in a child to its end, or to its death."""
    return Child(work, kill, largest).end()


def finished(work: Callable[[], Any]) -> Ended:
    """Run `work` in a child, which must not fail."""
    ended = forked(work)
    assert ended.status == 0, ended.said[-3000:]
    return ended


def _be_child(work, kill, largest, start, result: int, mouth: int) -> None:
    status = 1
    try:
        os.dup2(mouth, 1)
        os.dup2(mouth, 2)
        os.close(mouth)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        time.sleep(max(0.0, start - time.monotonic()))
        begun, count = time.monotonic(), _count_events(kill.at if kill is not None and kill.way == "event" else None)
        _limit_files(kill, largest)
        value = work()
        found = {"value": value, "seconds": time.monotonic() - begun, "events": count[0]}
        os.write(result, json.dumps(found).encode())
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _limit_files(kill: Kill | None, largest: int | None) -> None:
    if kill is not None and kill.way == "bytes":
        largest = int(kill.at)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))


def _count_events(fatal: float | None) -> list[int]:
    """Count this process's events from now on; it kills itself before the one numbered `fatal` (from 1)."""
    count = [0]

    def hook(name: str, arguments: tuple) -> None:
        if name not in EVENTS or name == "open" and not (arguments[2] or 0) & WRITING:
            return
        count[0] += 1
        if count[0] == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return count
