"""Find out whether `atoll run` looks after this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

# In the environment of its daemon and its script: the process id of `atoll run`.
SUPERVISOR_VARIABLE = "ATOLL_SUPERVISOR"
PR_SET_PDEATHSIG = 1  # prctl(2)
GONE = ("Z", "X")  # states of processes that have ended, in proc_pid_stat(5)


def is_supervised() -> bool:
    """Return whether an `atoll run` has started this process, or one that has started it."""
    return bool(os.environ.get(SUPERVISOR_VARIABLE))


def is_orphaned() -> bool:
    """Return whether the `atoll run` that has started this process is gone: killed by force.

    One that nobody has waited for yet is gone as well, though its process id is still taken.
    """
    pid = os.environ.get(SUPERVISOR_VARIABLE, "")
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    with contextlib.suppress(OSError):
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
        return state in GONE
    return False


def is_kept_by_parent() -> bool:
    """Return whether this process is the daemon of an `atoll run` that is still there."""
    return os.environ.get(SUPERVISOR_VARIABLE) == str(os.getppid())


def signal_when_parent_ends(number: int) -> None:
    """Have the kernel send this process a signal when the process that has started it is gone.

    There is none if that was gone before.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
