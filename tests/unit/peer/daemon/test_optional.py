"""The optional packages: a plain run does without them, and whatever shows a need loads them."""

from __future__ import annotations

import ast
import asyncio
import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.convicts import left_behind
from harness.rooms import MODULES as HOUSE

from atoll.collectives.errors import AddressFullError, BannedError, RemoteProtocolError
from atoll.peer.daemon.optional import MODULES, AdmissionChain, LazyVerifier
from atoll.peer.daemon.status import describe_admission
from atoll.peer.membership.view import Banned
from atoll.peer.net.admission_policy import MET_MAX, AdmissionPolicy, PeersMet
from atoll.peer.net.connection_limits import MEMBERS_PER_ADDRESS_MAX
from atoll.peer.net.hello import Hello
from atoll.peer.net.wire import registered

OPTIONAL = ("atoll.peer.verify", "atoll.peer.authority")

# Two daemons of a plain run in one process, as `atoll up` and `atoll join` load them.
PLAIN = """
import asyncio, sys
from pathlib import Path
from atoll.peer.cli import main
from atoll.peer.daemon.daemon import Daemon
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.daemon.status import render, snapshot
from atoll.peer.net.identity import Home

def options(**more):
    return DaemonOptions(run="demo", secret=b"s" * 32, listen_host="127.0.0.1", listen_port=0,
                         advertise="127.0.0.1", **more)

async def scenario(homes):
    first = Daemon(homes[0], options(found=True), lambda line: None)
    ready = asyncio.Event()
    lives = [asyncio.create_task(first.run(ready.set))]
    await ready.wait()
    second = Daemon(
        homes[1], options(found=False, contacts=(first.advertised(),)), lambda line: None
    )
    lives.append(asyncio.create_task(second.run(lambda: None)))
    while second.node.view is None or len(second.node.view.members) < 2:
        await asyncio.sleep(0.05)
    status = snapshot(second.parts)
    print(len(status["members"]), "by the run secret" in render(status))
    for daemon in (second, first):
        daemon.stop()
    await asyncio.gather(*lives)

with Home.open(Path(sys.argv[1]) / "a") as a, Home.open(Path(sys.argv[1]) / "b") as b:
    asyncio.run(asyncio.wait_for(scenario((a, b)), 60))
print([name for name in sys.modules if name.startswith(("atoll.peer.verify", "atoll.peer.auth"))])
"""

DECODED = """
import sys
from atoll.peer.daemon import optional
from atoll.peer.net import hello, wire
payload = bytes.fromhex(sys.argv[1])
loaded = lambda: sorted(name for name in optional.MODULES if name in sys.modules)
try:
    wire.decode(payload, allowed=(hello.Hello,))  # a stranger, whose hello is awaited
except wire.RemoteProtocolError:
    print(loaded())
print(wire.name_of(wire.decode(payload)), loaded())
"""


def output_of(script: str, argument: str) -> list[str]:
    command = [sys.executable, "-c", script, argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_daemons_of_a_plain_run_load_no_optional_package(tmp_path: Path) -> None:
    assert output_of(PLAIN, str(tmp_path)) == ["2 True", "[]"]


def test_a_message_of_an_optional_package_loads_it() -> None:
    """``Known``, without an authority: who sends it hears that nobody expects it."""
    # ["Known", {"number": 0, "digest": 32 times 0x01}]
    known = b"\x92\xa5Known\x82\xa6number\x00\xa6digest\xc4\x20" + b"\x01" * 32
    assert output_of(DECODED, known.hex()) == ["[]", "Known ['atoll.peer.authority.ledger']"]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_all_messages_of_the_optional_packages_are_known_by_name(module: str) -> None:
    importlib.import_module(module)
    found = {name for name, kind in registered().items() if kind.__module__ == module}
    assert found == set(MODULES[module])
    others = {kind.__module__ for kind in registered().values()} - MODULES.keys()
    assert not any(name.startswith(OPTIONAL) for name in others)


def at_the_start(path: Path) -> set[str]:
    """The modules that a module imports when it is imported, by name."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_nobody_outside_imports_the_optional_packages_at_the_start() -> None:
    wrong = {
        name: needs
        for name, path in HOUSE.items()
        if not name.startswith(OPTIONAL)
        and (needs := {each for each in at_the_start(path) if each.startswith(OPTIONAL)})
    }
    assert not wrong


# ---------------------------------------------------------------- bans and passes


class Chain:
    """An admission chain, and what it has done to its daemon."""

    def __init__(self, folder: Path, *, rule: AdmissionPolicy | None = None) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.banned: list[bytes] = []
        daemon: Any = SimpleNamespace(
            note=lambda *args, **fields: None,
            send=lambda peer, message: True,
            link_peers=lambda: (),
            member_peers=lambda: (),
            expel=lambda peer, why: None,
            stop=lambda error: None,
            feed=lambda event: None,
            took_part=lambda terms: False,
            banned=self.banned.extend,
            spawn=lambda work: self.tasks.append(asyncio.get_running_loop().create_task(work)),
        )
        self.chain = AdmissionChain(rule or AdmissionPolicy(), b"m" * 32, folder, daemon)

    @property
    def loaded(self) -> bool:
        return self.chain._loaded is not None

    def admit(self, peer: bytes) -> None:
        self.chain.admit(peer, Hello(2, 2, "demo", "control", 1, ""), called=False)


def test_nothing_of_a_policy_is_left_to_its_base() -> None:
    asked = {
        name for name, value in vars(AdmissionPolicy).items() if callable(value) and name[0] != "_"
    }
    assert asked <= vars(AdmissionChain).keys()


def test_peers_of_one_address_are_counted_as_the_policy_says(tmp_path: Path) -> None:
    chain = Chain(tmp_path, rule=AdmissionPolicy(lambda: None)).chain
    here = ["203.0.113.7"] * MEMBERS_PER_ADDRESS_MAX
    chain.check_address("203.0.113.7", here[1:])
    with pytest.raises(AddressFullError):
        chain.check_address("203.0.113.7", here)


def test_evidence_about_somebody_whom_we_met_before_there_were_bans(tmp_path: Path) -> None:
    async def scenario() -> None:
        evidence = left_behind("equivocation")
        site = Chain(tmp_path)
        site.chain.installed([evidence.culprit, b"x" * 32], ())
        assert not site.loaded
        assert site.chain.status() == {"mode": "secret", "banned": []}
        site.admit(evidence.culprit)
        site.chain._ban_list._believe(  # as it comes over a link
            evidence, *[finding_of(evidence)], first_hand=False
        )
        assert site.banned == [evidence.culprit]
        with pytest.raises(BannedError):
            site.admit(evidence.culprit)
        assert site.chain.is_out(evidence.culprit)
        await asyncio.gather(*site.tasks)
        again = Chain(tmp_path)  # the next life finds the file
        assert again.loaded
        assert again.chain.is_out(evidence.culprit)

    asyncio.run(scenario())


def finding_of(evidence: Any) -> Any:
    return importlib.import_module("atoll.peer.verify.evidence").verify_evidence(evidence)


def test_a_view_that_names_a_ban_is_enough(tmp_path: Path) -> None:
    async def scenario() -> None:
        site = Chain(tmp_path)
        site.chain.installed([b"a" * 32], [Banned(b"x" * 32, b"d" * 32)])
        assert site.chain.is_out(b"x" * 32)
        (row,) = site.chain.status()["banned"]
        assert row["agreed"]

    asyncio.run(scenario())


def test_without_an_authority_nobody_expects_passes(tmp_path: Path) -> None:
    kind = importlib.import_module("atoll.peer.authority.ledger").Known
    with pytest.raises(RemoteProtocolError, match="nobody expects a Known here"):
        Chain(tmp_path).chain.on_message(b"p" * 32, kind(0, b"d" * 32))


def test_who_was_met_is_remembered_up_to_a_limit() -> None:
    met = PeersMet()
    met.add(n.to_bytes(32, "big") for n in range(MET_MAX))
    met.add([b"x" * 32])
    assert len(met) == MET_MAX
    assert (0).to_bytes(32, "big") not in met
    assert b"x" * 32 in met


def test_nothing_is_verified_until_it_is_needed() -> None:
    async def scenario() -> None:
        verifier = LazyVerifier(b"m" * 32, SimpleNamespace(), SimpleNamespace(life=lambda: 1))  # type: ignore[arg-type]
        verifier.banned([b"x" * 32])
        assert not verifier.took_part(b"t" * 32)
        assert verifier.progress == 0
        verifier.close()
        assert verifier._loaded is None
        assert verifier.validation.tasks() == []
        assert verifier._loaded is not None
        verifier.close()

    asyncio.run(scenario())


def test_a_run_without_an_authority_has_a_secret() -> None:
    assert describe_admission({"mode": "secret"}) == ["admission  by the run secret"]
