"""Commands that start several processes of one script on this machine, and scripts that start an interpreter."""

import os
import socket
import sys
from pathlib import Path


def launcher(processes: int) -> list[str]:
    """The words before a script or `-m module`, with a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    return [*words, "--master_port", str(port)]


def stand_in_python(folder: Path) -> dict[str, str]:
    """An environment whose `python` prints the words that it is started with, and runs those after -c."""
    fake = folder / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "if sys.argv[1] == '-c': os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
        "print(json.dumps(sys.argv[1:]))\n"
    )
    fake.chmod(0o755)
    return {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
