"""A connection to a daemon that its owner has forgotten: it keeps no process from ending."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FORGETS = """
import gc, socket, sys
from pathlib import Path
from atoll.peer.client.ipc_client import IpcClient
from atoll.peer.daemon.ipc_server import LIFELINE
from atoll.peer.net.identity import socket_path

home = Path(sys.argv[1])
(home / "run").mkdir(mode=0o700)
path = socket_path(home, LIFELINE)
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
    listener.bind(str(path))
    listener.listen()
    client = IpcClient(home)
client.socket.send(b"to nobody")
client.itself = client
del client
gc.collect()
print("goes on")
"""


def test_a_client_that_is_collected_as_part_of_a_cycle_is_closed(tmp_path: Path) -> None:
    """With its context collected before its socket the process would wait for ever."""
    command = [sys.executable, "-W", "error", "-c", FORGETS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
