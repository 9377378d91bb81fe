"""A kill, a full disk, two processes at once: regenerate, train and push, one run each; `make faults` does 50."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.training_runs import environment

COMMANDS = ["regenerate", "train", "push"]


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], str]:
    """The harness's summary, from a process of its own: {(command, fault): its line}."""
    script = Path(__file__).with_name("faults.py")
    words = [sys.executable, "-W", "ignore", str(script), "--runs", "1", "--seed", "1", "--only", *COMMANDS]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=280)
    lines = re.findall(r"^((\w+) +(\w+) +\d+ runs .*)$", done.stdout, re.MULTILINE)
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return {(name, kind): line + done.stderr[-3000:] * ("0 failed" not in line) for line, name, kind in lines}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_command_that_is_started_again_ends_as_if_nothing_had_happened(table, command):
    assert "0 failed" in table[command, "kill"]
    assert "killed by" in table[command, "kill"]


@pytest.mark.parametrize("command", ["regenerate", "train"])
def test_a_full_disk_is_a_clear_error_and_the_command_goes_on_when_there_is_room(table, command):
    assert "0 failed" in table[command, "full"]
    assert "disk full" in table[command, "full"]


def test_of_two_processes_that_regenerate_into_one_folder_one_is_refused(table):
    assert "0 failed" in table["regenerate", "together"]
