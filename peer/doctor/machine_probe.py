"""Look at this machine: files in /proc, folders, limits, the port, torch. Decides nothing."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from atoll.collectives.errors import ConfigError, HomeInUseError
from atoll.collectives.native import KERNELS, NUMPY_REASON
from atoll.collectives.version import VERSION
from atoll.peer.doctor.facts import FolderFacts, GpuFacts, MachineFacts
from atoll.peer.durable import CHECKPOINT_FOLDER
from atoll.peer.net.hello import PROTOCOL_MAX
from atoll.peer.net.identity import Home
from atoll.peer.net.listener import check_port
from atoll.peer.net.own_address import own_address
from atoll.peer.streams.congestion import AVAILABLE, BBR, ask

# torch takes seconds to load, minutes from a cold network disk; a driver that hangs takes for ever.
TORCH_TIMEOUT_S: Final = 90.0
# What is read of a file in /proc at most: 1,000 cores take 1.5 MB of cpuinfo.
PROC_BYTES_MAX: Final = 4 << 20
# Written to find out whether a folder takes files: what a daemon writes there first is smaller.
TRIED_BYTES: Final = 4096
_ASK_TORCH: Final = """
import json, torch
cuda = torch.cuda
found = [cuda.get_device_properties(i) for i in range(cuda.device_count())] \
    if cuda.is_available() else []
print(json.dumps([torch.__version__, [[p.name, p.total_memory] for p in found]]))
"""


def look_at_machine(
    home: Path,
    checkpoint: Path | None,
    run: str,
    listen: tuple[str, int],
    gpu: GpuFacts,
) -> MachineFacts:
    """Return the facts about this machine; ``run``: whose checkpoints count as taken room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    problem, fix = _port_problem(*listen)
    limit_bytes, used_bytes = memory_limit(Path("/sys/fs/cgroup"))
    host = f"[{listen[0]}]" if ":" in listen[0] else listen[0]
    return MachineFacts(
        program=VERSION,
        protocol=PROTOCOL_MAX,
        python=platform.python_version(),
        kernels=KERNELS.level() if KERNELS is not None else "",
        numpy_reason=NUMPY_REASON,
        home=look_at_home(home, run),
        checkpoint=look_at_checkpoints(checkpoint, run) if checkpoint is not None else None,
        listen=f"{host}:{listen[1]}",
        port_problem=problem,
        port_fix=fix,
        files_soft=soft,
        files_hard=sys.maxsize if hard == resource.RLIM_INFINITY else hard,
        meminfo=_text(Path("/proc/meminfo")),
        memory_limit_bytes=limit_bytes,
        memory_used_bytes=used_bytes,
        cpuinfo=_text(Path("/proc/cpuinfo")),
        controls=_text(AVAILABLE),
        bbr_refusal=_bbr_refusal(),
        has_memfd=hasattr(os, "memfd_create"),
        address=own_address(),
        gpu=gpu,
    )


# ---------------------------------------------------------------- folders


def look_at_home(path: Path, run: str) -> FolderFacts:
    """Return the facts about a home, which is left as it is, or not there, as before."""
    taken_bytes = _taken_bytes(path / CHECKPOINT_FOLDER, run)
    found = replace(look_at_folder(path), taken_bytes=taken_bytes)
    try:
        if (path / "identity.key").exists():
            Home.open(path).close()
    except HomeInUseError:
        return replace(found, daemon=True)
    except ConfigError as error:
        return replace(found, problem=error.what, fix=error.fix)
    except OSError as error:
        problem = f"{path} cannot be read: {(error.strerror or 'failed').lower()}"
        fix = "run atoll as the user whose home it is, or choose a folder of yours with --home"
        return replace(found, problem=problem, fix=fix)
    return found


def look_at_checkpoints(path: Path, run: str) -> FolderFacts:
    """Return the facts about a folder for checkpoints, and what those of ``run`` take."""
    return replace(look_at_folder(path), taken_bytes=_taken_bytes(path, run))


def _taken_bytes(path: Path, run: str) -> int:
    """Return the bytes that the checkpoints of a run take in a folder, as far as can be seen."""
    from atoll.peer.checkpoint.reader import STATE_FILE, candidates

    taken_bytes = 0
    try:
        checkpoints = candidates(path, run) if run else []
    except OSError:  # it is not there, or another user's
        return taken_bytes
    for checkpoint in checkpoints:
        with contextlib.suppress(OSError):  # not whole
            taken_bytes += (checkpoint / STATE_FILE).stat().st_size
    return taken_bytes


def look_at_folder(path: Path) -> FolderFacts:
    """Return the facts about a folder, by writing a file there, or beside where it would be."""
    disk = path
    try:
        while not disk.exists():
            disk = disk.parent
        space = os.statvfs(disk)
        free_bytes = space.f_bavail * space.f_frsize
    except OSError as error:
        return FolderFacts(str(path), str(disk), 0, f"{disk} cannot be read: {error.strerror}")
    if not disk.is_dir():
        return FolderFacts(str(path), str(disk), free_bytes, f"{disk} is not a folder")
    try:
        with tempfile.NamedTemporaryFile(dir=disk, prefix=".atoll-doctor-") as file:
            file.write(bytes(TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = f"{disk} cannot be written: {(error.strerror or 'failed').lower()}"
        return FolderFacts(str(path), str(disk), free_bytes, problem)
    return FolderFacts(str(path), str(disk), free_bytes)


# ---------------------------------------------------------------- limits and the kernel


def memory_limit(groups: Path) -> tuple[int, int]:
    """Return the limit of this process's memory and what is used of it, in bytes; 0 for no limit.

    ``groups`` is where control groups are mounted. In a container that is its own group. Files
    that the kernel may drop count as used until it does, so their inactive part is taken off.
    """
    for folder, limit, used, stat in (
        (groups, "memory.max", "memory.current", "inactive_file"),
        (
            groups / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        most, now = _text(folder / limit).strip(), _text(folder / used).strip()
        if most.isdigit() and now.isdigit() and int(most) < 1 << 60:  # version 1: no limit is 2^63
            rows = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            return int(most), max(0, int(now) - int(rows.get(stat, "0")))
    return 0, 0


def _bbr_refusal() -> str:
    with socket.socket() as sock:
        return ask(sock, BBR)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(PROC_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""  # another system


# ---------------------------------------------------------------- the network


def _port_problem(host: str, port: int) -> tuple[str, str]:
    try:
        check_port(host, port)
    except ConfigError as error:
        return error.what, error.fix
    return "", ""


# ---------------------------------------------------------------- torch


def ask_torch() -> GpuFacts:
    """Return what torch says of GPUs, asked in a process of its own: it may hang, or crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            capture_output=True,
            timeout=TORCH_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return GpuFacts(problem=f"it has not answered for {TORCH_TIMEOUT_S:.0f} s")
    except OSError as error:
        return GpuFacts(problem=str(error.strerror))
    return gpus_of(done.returncode, done.stdout, done.stderr)


def gpus_of(exit_code: int, output: bytes, errors: bytes) -> GpuFacts:
    """Return what the process that asked torch has said."""
    if exit_code:
        last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
        return GpuFacts(problem=last or f"it ended with exit code {exit_code}")
    version, found = json.loads(output.strip().rpartition(b"\n")[2])
    return GpuFacts(version, tuple(name for name, _ in found), tuple(size for _, size in found))
