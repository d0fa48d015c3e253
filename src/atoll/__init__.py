"""atoll: train one PyTorch model on machines joined by ordinary internet links.

    import atoll
    from atoll.optim import DiLoCo

    optimizer = DiLoCo(model, inner, sync_every=100, peer=atoll.connect())

The rooms are ``atoll.peer`` (the daemon and its client), ``atoll.collectives`` (all-reduce and
codecs) and ``atoll.optim`` (outer optimizers).
"""

from __future__ import annotations

from atoll.collectives.errors import AtollError
from atoll.peer.session import Outcome, Reduced, Session, connect

__all__ = ["AtollError", "Outcome", "Reduced", "Session", "__version__", "connect"]

__version__ = "0.1.0"
