"""Find out whether `atoll run` looks after this process."""

from __future__ import annotations

import ctypes
import os

# In the environment of its daemon and its script: the process id of `atoll run`.
SUPERVISOR_VARIABLE = "ATOLL_SUPERVISOR"
PR_SET_PDEATHSIG = 1  # prctl(2)


def is_supervised() -> bool:
    """Return whether an `atoll run` has started this process, or one that has started it."""
    return bool(os.environ.get(SUPERVISOR_VARIABLE))


def is_kept_by_parent() -> bool:
    """Return whether this process is the daemon of an `atoll run` that is still there."""
    return os.environ.get(SUPERVISOR_VARIABLE) == str(os.getppid())


def signal_when_parent_ends(number: int) -> None:
    """Have the kernel send this process a signal when the process that has started it is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
