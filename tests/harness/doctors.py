"""`atoll doctor` as a user runs it, also on machines that lack something: in namespaces where a
file of /proc, a disk or a network is another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.processes import DAEMON, WAIT_S

__all__ = ["Examined", "examine", "instead_of", "networked", "on_a_disk", "torch_that"]

NO_GPU = """
class cuda:
    is_available = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 0)
"""


class Examined(NamedTuple):
    """Hold what the command answered with --json, its exit code, and its errors."""

    code: int
    document: dict[str, Any]
    errors: str

    def __getitem__(self, line: Any) -> Any:
        """The line with this id."""
        return next(check for check in self.document["checks"] if check["id"] == line)

    def with_status(self, status: str) -> list[str]:
        return [check["id"] for check in self.document["checks"] if check["status"] == status]


def examine(
    folder: Path, *arguments: str, prefix: Sequence[str] = (), torch: str = "", **env: str
) -> Examined:
    """Run the command; its home is in ``folder`` and not there yet, unless arguments name another.

    torch is a stand-in that loads in a moment and sees no GPU, unless ``torch`` is the folder of
    another one, or "real".
    """
    if "--home" not in arguments:
        arguments = (*arguments, "--home", str(folder / "home"))
    if "--listen" not in arguments:
        arguments = (*arguments, "--listen", "127.0.0.1:0")
    environment = os.environ | env
    if torch != "real":
        environment["PYTHONPATH"] = torch or torch_that(folder, NO_GPU)
    command = [*prefix, sys.executable, *DAEMON, "doctor", "--json", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, env=environment, cwd=folder
    )
    assert done.stdout, done.stderr
    return Examined(done.returncode, json.loads(done.stdout), done.stderr)


def torch_that(folder: Path, source: str) -> str:
    """Return a folder from which ``import torch`` loads this."""
    path = folder / "stand-in"
    path.mkdir(exist_ok=True)
    (path / "torch.py").write_text(f'__version__ = "2.0"\n{source}\n')
    return str(path)


def instead_of(path: str, file: Path, *, networked: bool = True) -> list[str]:
    """Return a prefix for a command that finds ``file`` in the place of ``path``, it alone.

    It has no network unless ``networked``."""
    return _private('mount --bind "$0" "$1"; shift', str(file), path, networked=networked)


def on_a_disk(path: Path, options: str) -> list[str]:
    """Return a prefix for a command that finds an empty disk at ``path``: a tmpfs of its own."""
    return _private(f'mount -t tmpfs -o {options} tmpfs "$0"', str(path), networked=True)


def networked(*addresses: str) -> list[str]:
    """Return a prefix for a command on a host with these addresses, through which routes lead."""
    lines = ["ip link set lo up"]
    if addresses:
        lines += ["ip link add up0 type veth peer name far0", "ip link set up0 up"]
        lines += ["ip link set far0 up"]
    for address in addresses:
        family = "-6" if ":" in address else "-4"
        lines.append(f"ip {family} addr add {address} dev up0 {'nodad' * (':' in address)}")
        lines.append(f"ip {family} route add default dev up0")
    return _private("; ".join(lines), "network", networked=False)


def _private(setup: str, zero: str, *others: str, networked: bool) -> list[str]:
    own = "-m" if networked else "-mn"
    return ["unshare", own, "sh", "-ec", f'{setup}; exec "$@"', zero, *others]
