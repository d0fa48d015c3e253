"""Describe what a daemon is started with, and the first event that follows from it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.collectives.errors import ConfigError
from atoll.peer.caps.caps import UNCAPPED, CapOptions
from atoll.peer.durable import OFF
from atoll.peer.membership.events import Found
from atoll.peer.membership.messages import BootstrapConfig
from atoll.peer.membership.view import ANCESTORS_MAX, DEFAULT_RULES, REPLICA, Rules, new_lineage
from atoll.peer.net.identity import RunRecord
from atoll.peer.net.proxy import Proxy
from atoll.peer.streams.congestion import AUTO
from atoll.peer.streams.keys import CIPHERS, CIPHERS_PLAIN

if TYPE_CHECKING:
    from atoll.peer.checkpoint.reader import LoadedCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """Say what a daemon is started with."""

    run: str
    secret: bytes
    listen_host: str
    listen_port: int
    advertise: str  # host to tell others, or host:port; the listening port is added if missing
    found: bool = False
    contacts: tuple[str, ...] = ()  # addresses of peers of the run
    returns: bool = False  # this home was in the run before: it waits for others, who may dial it
    fingerprint: bytes | None = None  # of the peer at contacts[0], from the invite
    role: str = REPLICA
    rules: Rules = DEFAULT_RULES
    founders: tuple[str, ...] = ()  # addresses, this one's too: they wait for each other
    resume: LoadedCheckpoint | None = None  # the checkpoint to go on from
    durable: str = OFF  # what is remembered over restarts: see DURABLE
    checkpoint: Path | None = None
    every: int = 10  # rounds between two checkpoints of this peer
    plain_streams: bool = False  # data without encryption, where the other side wants that too
    congestion: str = AUTO  # the control of what data streams send
    caps: CapOptions = UNCAPPED  # how much may be sent and received
    proxy: Proxy | None = None  # through which this peer dials all others
    advertises: bool = False  # the user has said where this peer can be dialled
    upnp: bool = False  # a router at home is asked to forward the port
    relay_mbit: float = 0.0  # of others' data, between two that cannot dial each other; 0: none
    probes: bool = True  # links are measured by probes, and not by rounds alone
    keeps_place: bool = False  # on SIGTERM, as one that was killed does; else it leaves
    secret_given: bool = False  # by the user: it is not to stand in the log, in an invite
    verbose: bool = False  # say in the log which limits the process has
    per_address: int | None = None  # peers of one IP address; 0: any number; None: as is usual
    page: tuple[str, int] | None = None  # where the status page is served
    authority: bytes = b""  # public key of who decides about admission; none: the secret does
    credential: bytes = b""  # what it has given this peer

    @property
    def ciphers(self) -> tuple[str, ...]:
        """Return the ciphers of the data streams, the preferred one first."""
        return CIPHERS_PLAIN if self.plain_streams else CIPHERS

    @property
    def founds(self) -> bool:
        """Return whether this peer founds its run.

        Then nobody else can judge whether it may come in.
        """
        return self.found or bool(self.founders)

    def record(self, known: tuple[str, ...]) -> RunRecord:
        """Return what the home is to remember of this run."""
        return RunRecord(self.run, self.secret, known, self.authority, self.credential)


def first_event(options: DaemonOptions, address: str) -> Found | BootstrapConfig | None:
    """Decide how a daemon comes into a run: found it, wait for other founders, or join (None).

    Raises ConfigError if others are to know this peer, at ``address``, as a founder, and could not.
    """
    loaded = options.resume
    if options.founders:
        if address not in options.founders:
            raise ConfigError(
                f"this peer's address is {address}, and --peers has {','.join(options.founders)}",
                fix="give it with --advertise as it stands there; or `atoll join` them later",
            )
        return BootstrapConfig(founders=options.founders, rules=options.rules)
    if not options.found:
        return None
    fresh = secrets.token_bytes(32)
    if loaded is None:
        return Found(fresh, options.rules)
    # The position goes on; the lineage is new, so that others who resume or live on are met as
    # forks and never mixed with.
    lineage = new_lineage(loaded.lineage, fresh)
    ancestors = (*loaded.ancestors, loaded.lineage)[-ANCESTORS_MAX:]
    return Found(lineage, options.rules, ancestors)
