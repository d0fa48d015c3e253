"""Keep some descriptors for the daemon itself: a flood of connections exhausts them first.

Without one, a daemon can neither dial a member, nor store an incarnation, nor answer `atoll leave`.
"""

from __future__ import annotations

import resource
import socket

# Whoever connects gets descriptors with numbers below this share of the limit ...
SHARE_FOR_CONNECTIONS = 0.8
# ... and never these last: dials, files, and commands at the local socket.
KEPT_FOR_CONTROL = 32
# Nor do dials get the very last: libzmq ends the process when it cannot accept a local connection.
KEPT_FOR_LOCAL = 8


def raise_limit() -> str:
    """Let this process open as many descriptors as it may.

    Returns what came of it, for the log.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return f"up to {soft:,} descriptors"
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:  # macOS calls its limit infinite, and refuses that
        return f"up to {soft:,} descriptors; more are not allowed: {error}"
    return f"up to {hard:,} descriptors, raised from {soft:,}"


def is_scarce(accepted: socket.socket) -> bool:
    """Return whether this new connection must be turned away.

    A new descriptor has the lowest free number, so its number says how many are in use.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(int(SHARE_FOR_CONNECTIONS * soft), soft - KEPT_FOR_CONTROL)
    return soft != resource.RLIM_INFINITY and accepted.fileno() >= limit


def is_last(opened: socket.socket) -> bool:
    """Return whether this new socket must not be used to dial."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and opened.fileno() >= soft - KEPT_FOR_LOCAL
