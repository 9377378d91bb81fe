"""Kills regenerate, train, push and save at random moments, fills the disk, and lets two processes write at once.

python tests/faults.py --runs 50 --seed 0         every fault so often; a table at the end
python tests/faults.py --only train --run 17      one run again
"""

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from helpers.fault_cases import CASES, Case, attempt
from helpers.forked import Child, Ended, Kill, finished

WAYS = ("event", "event", "time", "time", "bytes")


class Faults:
    """The faults of one kind, each run from a random generator of its own."""

    def __init__(self, case: Case, home: Path):
        self.case, self.home = case, home
        self.tally: Counter[str] = Counter()
        self._measured: dict[int, Ended] = {}
        self._largest = 1

    def run(self, kind: str, seed: int, number: int) -> None:
        """One run; AssertionError if what must hold does not."""
        dice, folder = random.Random(f"{seed} {self.case.name} {kind} {number}"), self.home / f"{kind}-{number}"
        variant = dice.randrange(100)
        self.measure(variant)
        getattr(self, kind)(dice, folder, variant)
        shutil.rmtree(folder, ignore_errors=True)

    def measure(self, variant: int) -> None:
        """How long an undisturbed run takes, its events and its largest file."""
        variant %= len(getattr(self.case, "VARIANTS", [0]))
        if variant not in self._measured:
            folder = self.home / f"undisturbed-{variant}"
            self.case.begin(folder, variant)
            self._measured[variant] = finished(lambda: self.case.work(folder))
            finished(lambda: self.case.after_end(folder))
            sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
            self._largest = max([self._largest, *sizes])
        self._usual = self._measured[variant]

    def kill(self, dice: random.Random, folder: Path, variant: int) -> None:
        """Up to three kills, then a run to the end."""
        self.case.begin(folder, variant)
        for _ in range(dice.randint(1, 3)):
            way = dice.choice(WAYS)
            at = {
                "time": dice.uniform(0, self._usual.seconds),
                "event": dice.randint(1, max(1, self._usual.events)),
                "bytes": int(self._largest ** dice.uniform(0.3, 1)),
            }[way]
            ended = attempt(self.case, folder, kill=Kill(way, at))
            assert ended.killed or ended.status == 0, f"{way} {at}: {ended.said[-3000:]}"
            self.tally[f"killed by {way}" if ended.killed else "ended first"] += 1
            finished(lambda: self.case.after_kill(folder))
        self.end(folder)

    def full(self, dice: random.Random, folder: Path, variant: int) -> None:
        """A disk without room: a clear error, the old state, and the same command goes on when there is room."""
        with small_disk(folder) as resize:
            self.case.begin(folder / "out", variant)
            used = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
            room = used + int(dice.uniform(0, 1.3) * self._needed())
            limit = resize(room)
            ended = attempt(self.case, folder / "out", largest=None if limit else max(1, (room - used) // 8))
            assert ended.status == 0 or ended.status == 1 and "expected" in ended.said, ended.said[-3000:]
            assert "Traceback" not in ended.said or self.case.name == "save", ended.said[-3000:]
            self.tally["disk full" if ended.status else "room enough"] += 1
            finished(lambda: self.case.after_kill(folder / "out"))
            resize(10 * self._needed() + used)
            self.end(folder / "out")

    def together(self, dice: random.Random, folder: Path, variant: int) -> None:
        """Two processes at once: one result, and a clear error at most."""
        self.case.begin(folder, variant)
        start = time.monotonic() + 0.05
        delay = dice.uniform(0, self._usual.seconds)
        pair = [Child(lambda: self.case.work(folder), start=start + wait) for wait in (0.0, delay)]
        ended = [child.end() for child in pair]
        for one in ended:
            assert one.status == 0 or one.status == 1 and "found another" in one.said, one.said[-3000:]
        assert any(one.status == 0 for one in ended)
        self.tally["both ended" if not any(one.status for one in ended) else "one refused"] += 1
        finished(lambda: self.case.after_end(folder))

    def end(self, folder: Path) -> None:
        last = attempt(self.case, folder)
        assert last.status == 0, last.said[-3000:]
        finished(lambda: self.case.after_end(folder))

    def _needed(self) -> int:
        whole = next(self.home.glob("undisturbed-*"))
        return sum(path.stat().st_blocks * 512 for path in whole.rglob("*"))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator:
    """A file system of its own where mounting is allowed; yields a function that sets its size, and says if so."""
    folder.mkdir(parents=True)
    mounted = not subprocess.call(["mount", "-t", "tmpfs", "tmpfs", str(folder)], stderr=subprocess.DEVNULL)

    def resize(size: int) -> bool:
        if mounted:
            subprocess.check_call(["mount", "-o", f"remount,size={max(4096, size)}", str(folder)])
        return mounted

    try:
        yield resize
    finally:
        if mounted:
            subprocess.check_call(["umount", str(folder)])


# which faults each command is put to
KINDS = {
    "regenerate": ("kill", "full", "together"),
    "train": ("kill", "full"),
    "push": ("kill",),
    "save": ("kill", "full", "together"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="runs of each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(CASES), nargs="+", default=list(CASES), help="these commands alone")
    parser.add_argument("--kind", choices=("kill", "full", "together"), help="this fault alone")
    parser.add_argument("--run", type=int, help="the run of this number alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, failures = [], 0
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as home:
            faults = Faults(CASES[name](Path(home)), Path(home))
            for kind in [kind for kind in KINDS[name] if arguments.kind in (None, kind)]:
                faults.tally, start, failed = Counter(), time.monotonic(), 0
                numbers = range(arguments.runs) if arguments.run is None else [arguments.run]
                for number in numbers:
                    try:
                        faults.run(kind, arguments.seed, number)
                    except AssertionError:
                        failed += 1
                        traceback.print_exc(limit=3)
                        again = f"--only {name} --kind {kind} --seed {arguments.seed} --run {number}"
                        print(f"Reproduce with: python tests/faults.py {again}", flush=True)
                seconds = time.monotonic() - start
                rows.append(f"{name:<11} {kind:<9} {len(numbers):>4} runs {failed:>3} failed {seconds:>6.0f} s  ")
                rows[-1] += ", ".join(f"{what}: {count}" for what, count in sorted(faults.tally.items()))
                failures += failed
                print(rows[-1], flush=True)
    print("\n" + "\n".join(rows))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
