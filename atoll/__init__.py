"""Train one PyTorch model on machines joined by ordinary internet links.

    import atoll

    outer = atoll.DiLoCo(model, optimizer, sync_every=100, peer=atoll.attach())

The rooms are ``atoll.peer`` (the daemon and its client), ``atoll.collectives`` (all-reduce and
codecs) and ``atoll.optim`` (methods; all of its names are here, too). Methods need torch, so each
is imported when it is first asked for, and so is ``atoll.data``: ``import atoll`` does not load
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atoll import optim
from atoll.collectives.errors import AtollError
from atoll.collectives.version import VERSION as __version__
from atoll.peer.client.session import Reduced, Session, connect
from atoll.peer.client.trainer_channel import Outcome

if TYPE_CHECKING:
    from atoll import data as data
    from atoll.optim import *  # noqa: F403 (its __all__ says which)

__all__ = ["AtollError", "Outcome", "Reduced", "Session", "__version__", "connect"]
__all__ += optim.__all__


def __getattr__(name: str) -> Any:
    if name == "data":
        return import_module("atoll.data")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(optim, name)
    globals()[name] = value  # so that the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "data"})
