"""Carry out ``atoll authority``, and beside a daemon ``atoll id`` and ``atoll revoke``.

Each verb loads peer/authority by itself: a daemon that has none of it is started here too.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.collectives.errors import ConfigError, HomeInUseError
from atoll.peer.membership.view import ARCHIVE, REPLICA, WITNESS
from atoll.peer.net.identity import Home, default_home
from atoll.peer.net.invite import Invite, check_run_name, parse_address

if TYPE_CHECKING:
    from atoll.peer.authority.grants import Grant

EXPIRES_DEFAULT = "7d"  # of a token: long enough to send it around, too short to be found later


def add_authority_verbs(verbs: Any) -> tuple[argparse.ArgumentParser, ...]:
    """Add the authority's commands to ``atoll``; return those that need a daemon's home."""
    authority = verbs.add_parser(
        "authority", help="decide who may join a run, with a key of its own"
    )
    doings = authority.add_subparsers(required=True, metavar="WHAT")
    new = doings.add_parser("new", help="make a key; keep it offline")
    new.set_defaults(command=_new)
    invite = doings.add_parser("invite", help="print an invite for one peer or more")
    invite.add_argument("--uses", type=int, default=1, metavar="N", help="peers (default 1)")
    invite.set_defaults(command=_invite)
    allow = doings.add_parser("allow", help="print an invite that only this peer can use")
    allow.set_defaults(command=_allow)
    revoke = doings.add_parser(
        "revoke", help="put peers or tokens on the list of those who are out"
    )
    revoke.set_defaults(command=_revoke)
    for doing in (new, invite, allow, revoke):
        doing.add_argument("folder", metavar="DIR", help="where the authority's key is")
    for doing, what in ((allow, "what `atoll id` prints there"), (revoke, "of a peer or a token")):
        doing.add_argument("ids", nargs="+", metavar="ID", help=what)
    for doing, default in ((invite, EXPIRES_DEFAULT), (allow, "never")):
        doing.add_argument("--run", required=True, metavar="NAME")
        doing.add_argument("--at", required=True, metavar="HOST:PORT", help="of any member")
        doing.add_argument(
            "--expires", default=default, metavar="7d", help=f"or 12h, never (default {default})"
        )
        doing.add_argument("--role", choices=(REPLICA, WITNESS, ARCHIVE), default=REPLICA)

    told = verbs.add_parser("revoke", help="tell all members who is out: the authority's list")
    told.add_argument("file", metavar="FILE", help="DIR/revocations of the authority")
    told.set_defaults(command=_tell)
    who = verbs.add_parser("id", help="print this peer's id, by which an authority knows it")
    who.set_defaults(command=_id)
    return told, who


def _new(parsed: argparse.Namespace) -> int:
    from atoll.peer.authority.key import Authority

    made = Authority.new(Path(parsed.folder))
    print(made.public_key.hex())
    return 0


def _invite(parsed: argparse.Namespace) -> int:
    from atoll.peer.authority.key import Authority, expiry

    authority = Authority.open(Path(parsed.folder))
    run, address = check_run_name(parsed.run), parse_address(parsed.at)
    not_after_s = expiry(parsed.expires, time.time())
    grant, seed = authority.token(run, parsed.role, parsed.uses, not_after_s)
    _show(grant, authority.invite(grant, address, seed))
    return 0


def _allow(parsed: argparse.Namespace) -> int:
    from atoll.peer.authority.key import Authority, expiry, parse_id

    authority = Authority.open(Path(parsed.folder))
    run, address = check_run_name(parsed.run), parse_address(parsed.at)
    not_after_s = expiry(parsed.expires, time.time())
    for peer in [parse_id(text) for text in parsed.ids]:
        grant = authority.allow(run, parsed.role, peer, not_after_s)
        _show(grant, authority.invite(grant, address))
    return 0


def _show(grant: Grant, invite: Invite) -> None:
    uses = f" for {grant.uses}" if grant.is_token else ""
    print(f"{grant.describe()}{uses}, id {grant.subject.hex()}:", file=sys.stderr)
    verb = "follow" if grant.role == ARCHIVE else "join"
    print(f"atoll {verb} {invite}{' --witness' if grant.role == WITNESS else ''}")


def _revoke(parsed: argparse.Namespace) -> int:
    from atoll.peer.authority.key import Authority, parse_id

    authority = Authority.open(Path(parsed.folder))
    latest = authority.revoke([parse_id(text) for text in parsed.ids])
    print(f"list {latest.number} with {len(latest.ids)} revoked: {authority.revocations_path}")
    print(f"  on the machine of any member: atoll revoke {authority.revocations_path.name}")
    return 0


def _tell(parsed: argparse.Namespace) -> int:
    from atoll.peer.authority.grants import REVOCATIONS_BYTES_MAX
    from atoll.peer.client.ipc_client import ask

    with Path(parsed.file).open("rb") as file:
        signed = file.read(REVOCATIONS_BYTES_MAX + 1)
    if len(signed) > REVOCATIONS_BYTES_MAX:
        raise ConfigError(f"{parsed.file} is no revocation list", fix="give DIR/revocations")
    print(ask(parsed.home, "revoke", signed=signed))
    return 0


def _id(parsed: argparse.Namespace) -> int:
    """Print this peer's id; make the home and the identity if there is none yet."""
    from atoll.peer.client.ipc_client import ask

    try:
        with Home.open(default_home(parsed.home)) as home:
            print(home.peer_id.hex())
    except HomeInUseError:
        print(ask(parsed.home, "status")["id"])
    return 0
