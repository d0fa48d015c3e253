"""Put into words for people whether a peer can be dialled, and what to do about it. Sans-I/O."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.collectives.units import duration, listed
from atoll.peer.daemon.reachability import OwnReach, ReachState
from atoll.peer.membership.view import short
from atoll.peer.net.address_kind import LOOPBACK, NAME, PUBLIC, WORDS, address_kind
from atoll.peer.net.invite import format_address
from atoll.peer.net.reach_messages import OK, OTHER, OUTCOMES, REFUSED, ReachAnswer

NAMES_MAX = 8  # peers that a line names
PAGE = "docs/reachability.md"
RELAY_LINE = "atoll up --run NAME --witness --relay 20"
# Relays that a run with outbound peers should have: when one dies, another is there.
RELAYS_WANTED = 2


def describe_reach(
    own: OwnReach,
    advertised: str,
    port: int,
    *,
    mapped: bool = False,
    relays: bool = False,
    proxied: bool = False,
) -> str:
    """Say whether others can dial this peer, how that is known, and what to do: a line or more.

    ``mapped``: at ``port`` of the router, which forwards it, and all others know that. ``relays``:
    it was started with --relay. ``proxied``: it dials through a proxy, and is dialled there.
    """
    if own.state is ReachState.UNKNOWN:
        return f"not known yet whether others can dial {advertised}: there was nobody to try it"
    if own.state is ReachState.REACHABLE:
        return _reachable(own, advertised, port, mapped)
    if own.state is ReachState.OUTBOUND:
        return _outbound(own, port, how_to_open(port, proxied=proxied), relays)
    return _unconfirmed(own, advertised)


def _reachable(own: OwnReach, advertised: str, port: int, mapped: bool) -> str:
    passed = [one for one in own.found.answers if one.outcome == OK] if own.found else []
    if passed and own.found is not None:
        elsewhere = [one for one in passed if one.by != own.found.asked]
        where = format_address(own.found.observed, port)
        text = f"others can dial this peer at {where}: {dials(elsewhere or passed)}"
    elif own.dialled_by is not None:
        by, ip = own.dialled_by
        where, text = advertised, f"others can dial this peer: {short(by)} has done so from {ip}"
    else:
        where, text = advertised, f"others can dial this peer at {advertised}"
    host = advertised.rpartition(":")[0]
    if mapped:
        return f"{text}. Its router forwards that; it advertises {advertised}"
    if where != advertised and address_kind(host) not in (PUBLIC, NAME):
        text += f". It advertises {advertised}; with --advertise {where} all others dial it there"
    return text


def _outbound(own: OwnReach, port: int, how: str, relays: bool) -> str:
    if own.found is None:
        return "this peer is outbound: others cannot dial it"
    # It would be wrong to be quiet about an option that does nothing.
    vain = ["--relay is in vain here: only a peer that can be dialled relays"] if relays else []
    where = format_address(own.found.observed, port)
    failed = [one for one in own.found.answers if one.outcome != OK]
    lines = [
        f"this peer is outbound: others cannot dial it at {where}: {dials(failed)}",
        "It trains fully all the same: peers that can be dialled have it dial them, and it meets"
        " others that cannot directly, where the routers of both let it, else through peers that"
        f" were started with --relay MBIT. To be dialled too: {how} ({PAGE})",
        *vain,
    ]
    if any(one.outcome == OTHER for one in failed):
        lines.append("Two peers behind one router need two ports: --listen :PORT")
    return "\n".join(lines)


def how_to_open(port: int, *, proxied: bool = False) -> str:
    """Say what makes a machine one that others can dial; ``proxied``: that has only a proxy."""
    if proxied:
        return (
            "start with --advertise HOST:PORT if an address leads here: so far others have come to"
            " the proxy's"
        )
    return (
        f"let TCP port {port} pass the firewall, forward it to this machine on the router, or"
        " start with --advertise HOST:PORT if another address leads here"
    )


def _unconfirmed(own: OwnReach, advertised: str) -> str:
    text = f"not confirmed yet that others can dial this peer at {advertised}"
    if own.found is not None and own.state is ReachState.UNCONFIRMED and not own.why:
        passed = [one for one in own.found.answers if one.outcome == OK]
        if passed:
            return f"{text}: {dials(passed)}, and nobody elsewhere is there to try it"
        return f"{text} still: {dials(own.found.answers)}; the next try decides"
    if own.neighbour is not None:
        by, ip = own.neighbour
        return f"{text}: {short(by)} ({ip}), of the same network, has done so, and no other"
    if own.why:
        return f"{text}: {own.why}"
    if own.asking is not None:
        return f"{text}: {short(own.asking)} was asked to try, and has not answered"
    return text


def dials(answers: Sequence[ReachAnswer]) -> str:
    """Say who got what: "a1b2c3d4 (198.51.100.7) got no answer in 2.5 s"."""
    parts = []
    for outcome in OUTCOMES:
        same = [one for one in answers if one.outcome == outcome]
        if same:
            took = duration(max(one.took_s for one in same))
            words = _GOT.get(outcome, "got no answer in {took}").format(took=took)
            parts.append(f"{listed([_dialler(one) for one in same])} {words}")
    return "; ".join(parts)


_GOT = {
    OK: "got through in {took}",
    REFUSED: "got a refusal after {took}",
    OTHER: "found another program or peer there after {took}",
}


def _dialler(one: ReachAnswer) -> str:
    return f"{short(one.by)} ({one.from_ip})" if one.from_ip else short(one.by)


def alone(outbound: Sequence[str], silent: Sequence[str], port: int) -> str:
    """Say why peers that are all outbound cannot train together, and what would help.

    ``outbound``: the names of members that can only dial out; ``silent``: of others without a link.
    """
    parts = []
    if silent:
        whom, them = _some(silent), "it" if len(silent) == 1 else "them"
        parts.append(f"no link to {whom}: is that machine off? Start {them} again")
    if outbound:
        parts.append(
            f"no link to {_some(outbound)}: this peer is outbound, and so is the other side, and"
            " no relay is there between the two: that takes a peer that can be dialled. Start the"
            " one again that was there, or open a port of this machine:"
            f" {how_to_open(port)} ({PAGE})"
        )
    return ". ".join(parts)


def relay_wanted(outbound: int, voters: int, relays: Sequence[str], bulk: int) -> str:
    """Say which relay a run lacks most of whose voters cannot be dialled; "" if none.

    ``relays``: the names of members that can be dialled; ``bulk``: how many of them carry data too.
    """
    if 2 * outbound <= voters or (len(relays) >= RELAYS_WANTED and bulk):
        return ""
    lacks = []
    if len(relays) < RELAYS_WANTED:
        who = f"only {_some(relays)} relays" if relays else "nobody relays"
        lacks.append(f"{who} between them, and without a relay they cannot elect a coordinator")
    if not bulk:
        lacks.append("no relay carries data of those that do not meet directly")
    return (
        f"{outbound} of {voters} voters are outbound: {'; '.join(lacks)}. Start one more peer where"
        f" it can be dialled: `atoll join INVITE --witness --relay 20` ({PAGE})"
    )


def _some(names: Sequence[str]) -> str:
    return listed([*names[:NAMES_MAX], *(["others"] if len(names) > NAMES_MAX else [])])


def another_router(outer_ip: str, observed: str) -> str:
    """Say that a router forwards a port in vain, because others do not see its address."""
    return (
        f"the router's own address, {outer_ip}, is not the one that others see, {observed}: another"
        f" router stands before it, as with many providers, and forwards nothing ({PAGE})"
    )


def founders_silent(port: int) -> str:
    """Say what may keep founders from meeting each other, and what would help."""
    return (
        "no other founder has answered yet. Of two that only dial out, because routers or firewalls"
        " let nobody in, neither can reach the other: one of them needs an open port"
        f" ({how_to_open(port)}), or a relay between them, which founds the run:"
        f" `{RELAY_LINE}` on a machine that can be dialled ({PAGE})"
    )


def who_can_join(address: str, *, relays: bool = False) -> str:
    """Say at once, when a run is founded, who can join at this address, and what to do.

    ``relays``: it is founded by a relay, for others that cannot be dialled.
    """
    host, _, port = address.rpartition(":")
    kind = address_kind(host)
    if kind == LOOPBACK:
        return f"only peers on this machine can join: {host} is {WORDS[kind]}"
    if kind in WORDS:
        only = (
            f"only machines that have a way to {host} can join, as in one network or VPN: it is"
            f" {WORDS[kind]}. For others,"
        )
        if relays:
            return (
                f"{only} start with --advertise PUBLIC:{port}, the address at which they reach this"
                " machine; where a router or a container's host stands before it, that has to"
                f" forward TCP port {port}. A relay that cannot be dialled is of no use ({PAGE})"
            )
        return (
            f"{only} forward TCP port {port} on the router to this machine and start with"
            f" --advertise PUBLIC:{port}. If that cannot be done, nobody can join an outbound"
            f" founder, which can only dial out: run `{RELAY_LINE}` on a machine that can be"
            f" dialled, and here `atoll up --via FILE` with the line that it prints ({PAGE})"
        )
    return (
        f"not confirmed yet that others can dial {address}: whoever joins first tries it."
        f" TCP port {port} must pass the firewall of this machine"
    )
