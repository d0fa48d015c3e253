"""What a daemon knows, as one plain dictionary, and as the text of `atoll status`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from atoll.peer.audit.door import describe_bans
from atoll.peer.authority.standing import describe
from atoll.peer.group.phases import Phase
from atoll.peer.group.probation import rounds_left
from atoll.peer.group.views import ARCHIVE, WITNESS, Member, View, plain, short

if TYPE_CHECKING:
    from atoll.peer.daemon import Daemon

__all__ = ["missing_founders", "render", "snapshot"]

LOSS_SHOWN = 0.0005  # of the bytes: what rounds to a tenth of a percent


def snapshot(daemon: Daemon) -> dict[str, Any]:
    """Plain types only: this travels over the local socket and is `atoll status --json`."""
    node, runner, host = daemon.node, daemon.runner, daemon.host
    own, state, role = node.follower, runner.state, node.me.role
    view = node.view or (node.joining.taught if role == ARCHIVE else None)
    trainer = daemon.desk.trainer
    streams = runner.streams
    return {
        "run": daemon.options.run,
        "peer": short(node.me.peer),
        "id": node.me.peer.hex(),
        "address": daemon.address,
        "phase": node.phase.value,
        "incarnation": node.me.inc,
        "view": view.number if view else 0,
        "lineage": view.lineage.hex()[:16] if view else "",
        "fork": view.fork if view else False,
        "policy": _policy(view),
        "coordinator": short(view.coordinator) if view else "",
        "round": own.round,
        "chain": own.chain.hex(),
        "digest": own.digest.hex() if own.digest_round == own.round else "",
        "digests": {str(number): digest for number, digest in runner.digests.items()},
        "synced": not own.unsynced,
        "role": role,
        "admission": daemon.guard.status(),
        "checkpoint": _checkpoint(daemon),
        "attempt": max((begin.attempt for begin in own.begins.values()), default=0),
        "members": [_member(daemon, view, member) for member in view.members] if view else [],
        "learners": _learners(daemon),
        "spec": state.spec.to_wire() if state else None,
        "parameters": state.manifest.elements if state else 0,
        "trainer": (
            {
                "pid": trainer.pid,
                "metrics": dict(trainer.metrics),
                "waiting": bool(trainer.awaiting),
            }
            if trainer
            else None
        ),
        "bytes": {
            "sent": host.counts.sent,
            "received": host.counts.received,
            "sent_again": runner.reducer.jobs.again_bytes,
        },
        "streams": streams.ciphers(),
        "layout": _layout(daemon),
        "congestion": sorted({s.congestion for _, s in streams.outgoing() if not s.closed}),
        "own_links": daemon.surveyor.totals(),
        "last_round_s": runner.last_round_s,
        "last_commit_unix_s": runner.last_commit_unix_s,
        "waiting": _waiting(daemon),
        "last_error": daemon.journal.last_error,
        "events": daemon.journal.events,
        "history": daemon.journal.history,
        "uptime_s": time.monotonic() - daemon.started_s,
    }


def _layout(daemon: Daemon) -> str:
    """Of the last round that this peer has taken part in, and why it was that."""
    layout = daemon.runner.reducer.layout
    return (plain(layout.why) or layout.kind) if layout is not None else ""


def _learners(daemon: Daemon) -> list[dict[str, Any]]:
    """As the coordinator knows them: joiners that catch up, and archives."""
    lead = daemon.node.coordinator
    return [
        {
            "peer": short(peer),
            "address": learner.member.address,
            "role": learner.member.role,
            "round": learner.beat.round if learner.beat else 0,
            "synced": learner.beat is not None and not learner.beat.unsynced,
        }
        for peer, learner in (lead.admission.learners.items() if lead else ())
    ]


def _checkpoint(daemon: Daemon) -> str:
    writer = daemon.checkpointer
    if writer is None:
        return ""
    text = "none yet"
    if writer.latest is not None:
        ago_s = time.time() - writer.latest.unix_s
        text = f"round {writer.latest.round}, {ago_s:.0f} s ago: {writer.latest.path}"
    doing = writer.describe_writing()
    return f"{text}; {doing}" if doing else text


def _policy(view: View | None) -> str:
    """The policy in force and what it means for this view."""
    if view is None:
        return ""
    chosen = view.rules.policy
    if view.may_fork:
        return f"{chosen}: whoever is left goes on, as a flagged fork, when the others are gone"
    text = f"{chosen}: a majority of the voters decides"
    if len(view.members) == 2:
        text += f"; if {short(view.members[0].peer)} is lost, the other halts"
    return text


def _member(daemon: Daemon, view: View, member: Member) -> dict[str, Any]:
    node = daemon.node
    me = member.peer == node.me.peer
    linked = me or member.peer in daemon.host.link_peers()
    state = "connected" if linked else "gone" if member.peer in node.refused else "no link"
    entry = {
        "peer": short(member.peer),
        "address": member.address,
        "role": member.role,
        "you": me,
        "state": state,
        "coordinator": node.view is not None and member.peer == node.view.coordinator,
        "rtt_ms": round(1000 * daemon.host.srtt_s(member.peer), 1),
    }
    left = rounds_left(view, node.follower.served)
    if member.peer in left:
        entry["probation"] = left[member.peer]
    if not me:
        entry |= daemon.surveyor.status(member.peer)
    lead = node.coordinator
    beat = lead.roster.beats.get(member.peer) if lead else None
    if beat is not None:
        entry |= {"round": beat.round, "attached": beat.attached, "arrived": beat.arrived}
    return entry


def _waiting(daemon: Daemon) -> str:
    """Who or what the next commit waits for, and since when, in one sentence."""
    node = daemon.node
    view, own = node.view, node.follower
    if view is None:
        return _outside(daemon)
    if node.beats.halted:
        return node.beats.halted
    if own.unsynced:
        if loading := daemon.runner.catch_up.describe():
            return f"this peer is loading {loading}"
        behind = node.syncing.rounds_behind
        return f"this peer is {behind} rounds behind the others and asks them again soon"
    linked = daemon.host.link_peers()
    gone = [short(p) for p in view.peers if p != node.me.peer and p not in linked]
    tail = f"; no link to {', '.join(gone)}" if gone else ""
    late, waited_s = node.beats.waiting
    names = ", ".join(short(peer) for peer in late) or "the first submission"
    if node.succession is not None and (electing := node.succession.waiting_for()):
        names = ", ".join(short(peer) for peer in electing[0])
        return f"no coordinator for {electing[1]:.0f} s: the election waits for {names}"
    if node.beats.held:
        return f"{node.beats.held}{tail}"
    begin = own.begins.get(own.round + 1)
    if begin is not None:
        return (
            f"round {begin.round}, attempt {begin.attempt}: {names} reducing"
            f" for {waited_s:.0f} s{tail}"
        )
    return f"round {own.round + 1} has waited {waited_s:.0f} s for {names}{tail}"


def missing_founders(daemon: Daemon) -> str:
    """Who is here, whom the others wait for, and how to go on without them."""
    text = daemon.node.genesis.describe()
    silent = daemon.keeper.unanswered(daemon.contacts())
    if silent:
        text += f"; no answer from {', '.join(silent)}"
    if daemon.options.resume is not None:
        text += f"; without them: atoll up --run {daemon.options.run} --resume CHECKPOINT"
    return text


def _outside(daemon: Daemon) -> str:
    """What a peer does that is in no view."""
    node = daemon.node
    run, behind = daemon.options.run, node.syncing.rounds_behind
    if daemon.inquiry is not None:
        return f"before run {run} is resumed, does it live? {daemon.inquiry.describe()}"
    if node.genesis.waiting:
        return missing_founders(daemon)
    if node.phase is not Phase.LEARNER or not node.joining.is_taught:
        has = f", which has the state of round {node.follower.round}" if daemon.runner.state else ""
        return f"no coordinator of run {run} answers this {node.me.role}{has}"
    late = f"{behind} round{'s' if behind > 1 else ''} behind" if behind else "up to date"
    loading = daemon.runner.catch_up.describe()
    if node.me.role == ARCHIVE:
        text = f"following run {run} as an archive, round {node.follower.round}, {late}"
        return f"{text}; loading {loading}" if loading else text
    return f"joining run {run}: loading {loading or 'the state'}; {late}"


def render(status: dict[str, Any]) -> str:
    """The text of `atoll status`."""
    lines = [
        f"run {status['run']}   peer {status['peer']} at {status['address']}   {status['phase']}"
        f"   up {status['uptime_s']:.0f} s",
        f"view {status['view']}   round {status['round']}   coordinator {status['coordinator']}"
        f"   lineage {status['lineage']}{' FORK' if status['fork'] else ''}",
        f"policy {status['policy']}",
    ]
    for event in status["history"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["unix_s"]))
        lines.append(f"{event['kind']:<8} {when}  {event['text']}")
    for member in status["members"]:
        marks = [member["state"]]
        marks += [member["role"]] if member["role"] == WITNESS else []
        marks += ["coordinator"] if member["coordinator"] else []
        marks += ["this peer"] if member["you"] else []
        marks += [f"round {member['round']}"] if "round" in member else []
        marks += ["trainer attached"] if member.get("attached") else []
        marks += _probation(member)
        marks += _link(member)
        lines.append(f"  {member['peer']}  {member['address']:<24} {', '.join(marks)}")
    for learner in status["learners"]:
        doing = "archive" if learner["role"] == ARCHIVE else "joining"
        late = "" if learner["synced"] else ", catching up"
        text = f"{doing}, round {learner['round']}{late}"
        lines.append(f"  {learner['peer']}  {learner['address']:<24} {text}")
    if status["trainer"]:
        figures = "  ".join(f"{k} {v:.6g}" for k, v in status["trainer"]["metrics"].items())
        lines.append(f"trainer pid {status['trainer']['pid']}  {figures}")
    elif status["role"] not in (ARCHIVE, WITNESS):
        lines.append("no trainer attached")
    moved = status["bytes"]
    for way in ("sent", "received"):
        each = ", ".join(f"{purpose} {_size(count)}" for purpose, count in moved[way].items())
        again = moved["sent_again"] if way == "sent" else 0
        tail = f"; {_size(again)} of the rounds again, after broken attempts" if again else ""
        lines.append(f"{way:<8} {_size(sum(moved[way].values()))}: {each}{tail}")
    if status["streams"]:
        kinds = (f"{count} {cipher}" for cipher, count in sorted(status["streams"].items()))
        lines.append(f"{'streams':<8} {', '.join(kinds)}")
    if status["layout"]:
        lines.append(f"{'layout':<8} {status['layout']}")
    if status["digest"]:
        lines.append(f"state digest {status['digest'][:32]}   {status['parameters']:,} parameters")
    if status["checkpoint"]:
        lines.append(f"checkpoint {status['checkpoint']}")
    lines += describe(status["admission"])
    lines += describe_bans(status["admission"])
    lines.append(f"now: {status['waiting']}")
    lines.append(f"last error: {status['last_error'] or 'none'}")
    return "\n".join(lines)


def _probation(member: dict[str, Any]) -> list[str]:
    """Whether its submissions count."""
    rounds = member.get("probation")
    if rounds is None:
        return []
    if rounds == 0:
        return ["on probation until the next view"]
    return [f"on probation for {rounds} more round{'s' if rounds > 1 else ''}"]


def _link(member: dict[str, Any]) -> list[str]:
    """The link to a member, as far as it was measured."""
    marks = ["on this machine"] if member.get("local") else []
    marks += [f"rtt {member['rtt_ms']:.3g} ms"] if member["rtt_ms"] else []
    ways = [
        f"{way} {8e-6 * member[f'{way}_bytes_per_s']:.3g}"
        for way in ("out", "in")
        if f"{way}_bytes_per_s" in member
    ]
    marks += [f"{' '.join(ways)} Mbit/s"] if ways else []
    marks += [f"loss {member['loss']:.1%}"] if member.get("loss", 0.0) >= LOSS_SHOWN else []
    return marks


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
