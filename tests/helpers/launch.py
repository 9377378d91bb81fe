"""Commands that start several processes of one script on this machine."""

import socket
import sys


def launcher(processes: int) -> list[str]:
    """The words before a script or `-m module`, with a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    return [*words, "--master_port", str(port)]
