"""A connection to a daemon: one that is forgotten, whether there is one, whether it has ended."""

from __future__ import annotations

import fcntl
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.peer.client.ipc_client import answers, has_ended
from atoll.peer.daemon.ipc_server import CLIENTS_MAX

HIGH = 1500  # a descriptor that select.select() does not take
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


@pytest.mark.timeout(30)
def test_a_stopped_daemon_whose_queue_is_full_is_there_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "lifeline.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        assert not answers(path)  # as of a killed one
        listener.listen(CLIENTS_MAX)  # and accepts nobody
        assert all(answers(path) for _ in range(CLIENTS_MAX + 36))
    assert not answers(path)
    assert not answers(tmp_path / "none.sock")


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= HIGH, reason="needs descriptor 1500"
)
def test_a_lifeline_with_a_high_descriptor_is_watched_as_any_other() -> None:
    """A script may have opened a thousand files before it connects."""
    low, daemon = socket.socketpair()
    with low, daemon, socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, HIGH)) as high:
        assert high.fileno() >= HIGH
        assert not has_ended(high)
        daemon.sendall(b"!")  # a descriptor comes with a byte as well
        assert not has_ended(high)
        assert high.recv(1) == b"!"
        daemon.close()
        assert has_ended(high)
