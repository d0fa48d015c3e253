"""A donor or a learner alone in its process, for benchmarks of the transfer: no membership, no run.

    python tests/harness/transfer_site.py donor HOME ADDRESS ELEMENTS
    python tests/harness/transfer_site.py learner HOME ADDRESS ELEMENTS PEER@ADDRESS ...

Both print JSON lines. All donors hold the same state after round 1.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec, blob
from atoll.peer.membership.events import Goal
from atoll.peer.membership.view import Member
from atoll.peer.net.identity import Home
from atoll.peer.net.invite import parse_address
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.state import ReplicatedState
from atoll.peer.state_sync import messages as msg
from atoll.peer.state_sync.chunk_cache import ChunkCache
from atoll.peer.state_sync.client import SyncClient
from atoll.peer.state_sync.server import SyncServer
from atoll.peer.streams.manager import Streams
from atoll.peer.streams.router import Router
from harness.linkhost import link_host
from harness.plainstate import initialise

CHAIN = b"c" * 32


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def state_of(elements: int) -> ReplicatedState:
    spec = RunSpec(sync_every=1)
    state = ReplicatedState(blob(spec, Manifest.of([Parameter("w", (elements,))])))
    initialise(state, np.linspace(-1, 1, elements, dtype=np.float32))
    return state


class Site:
    def __init__(self, home: Home, address: str) -> None:
        self.address = address
        self.state: ReplicatedState | None = None
        self.rounds = RoundLog()
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.host = link_host(
            home,
            address=lambda: address,
            streams=lambda: self.streams,
            on_message=self._on_message,
            log=lambda line: say(log=line),
        )
        router = Router(lambda peer, why: None)
        self.streams = Streams(self.host, router)
        self.donor = SyncServer(
            self.host, self.streams, lambda *_: None, self.rounds, lambda line: say(log=line)
        )
        self.sync = SyncClient(
            host=self.host,
            transfers=router.transfers,
            rounds=self.rounds,
            cache=ChunkCache(home.path / "received", lambda line: say(log=line)),
            owner=self,
        )

    def sync_failed(self, why: str) -> None:
        self.outcome.set_result(why)

    def log(self, line: str) -> None:
        say(log=line, unix_s=time.time())

    def _on_message(self, peer: bytes, message: object) -> None:
        if isinstance(message, msg.ASKED_OF_DONORS):
            self.donor.on_message(peer, message)
        else:
            self.sync.on_message(peer, message)

    def adopt(self, state: ReplicatedState, number: int, chain: bytes) -> None:
        self.state = state
        self.outcome.set_result("")


async def main() -> None:
    role, folder, address, elements = *sys.argv[1:4], int(float(sys.argv[4]))
    home = Home.open(Path(folder))
    site = Site(home, address)
    await site.host.listen(*parse_address(address))
    if role == "donor":
        state = site.donor.state = state_of(elements)
        site.rounds.restart(1, state.digest, CHAIN)
        before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        say(peer=home.peer_id.hex(), ready=True)
        while True:
            await asyncio.sleep(1)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before_bytes
            say(grown_bytes=grown, sent_bytes=site.streams.sent_bytes)
    named = [item.split("@") for item in sys.argv[5:]]
    members = tuple(Member(bytes.fromhex(peer), 1, address=where) for peer, where in named)
    say(ready=True)
    began_s = time.monotonic()
    site.sync.aim(Goal(1, CHAIN, members[0].peer, members))
    why = await site.outcome
    took_s = time.monotonic() - began_s
    right = site.state is not None and site.state.digest == await asyncio.to_thread(
        lambda: state_of(elements).digest
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    say(took_s=took_s, failed=why, right=right, received=site.streams.received_bytes, peak=peak)


if __name__ == "__main__":
    asyncio.run(main())
