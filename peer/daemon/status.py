"""Describe what a daemon knows, as one plain dictionary and as the text of `atoll status`."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from atoll.collectives.units import count, duration, listed, rate, size
from atoll.peer.caps.caps import describe as describe_caps
from atoll.peer.daemon.reachability import ReachState
from atoll.peer.daemon.wiring import Components
from atoll.peer.links.link_table import LOSS_SHOWN
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import NO_TERMS
from atoll.peer.membership.participation import trainers_needed
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.probation import rounds_left
from atoll.peer.membership.view import (
    ARCHIVE,
    REPLICA,
    WITNESS,
    Member,
    View,
    plain,
    short,
)
from atoll.peer.plan.reality import RoundTime, round_time

LABEL_CHARACTERS = 10
BANS_SHOWN_MAX = 20  # `atoll status --json` has more
PUNCHED = "punched"  # instead of a relay: both ends have dialled


def snapshot(parts: Components) -> dict[str, Any]:
    """Return what a daemon knows, in plain types only.

    It travels over the local socket and is `atoll status --json`.
    """
    node, executor, host = parts.node, parts.executor, parts.host
    own, state, role = node.follower, executor.state, node.me.role
    view = node.view or (node.joining.view if role == ARCHIVE else None)
    trainer = parts.trainers.trainer
    streams = executor.streams
    return {
        "run": parts.options.run,
        "peer": short(node.me.peer),
        "id": node.me.peer.hex(),
        "address": node.me.address,
        "reach": parts.reach.status(),
        "relay": parts.host.relay.status(),
        "proxy": str(parts.host.proxy) if parts.host.proxy is not None else "",
        "phase": node.phase.value,
        "incarnation": node.me.inc,
        "view": view.number if view else 0,
        "lineage": view.lineage.hex()[:16] if view else "",
        "fork": view.fork if view else False,
        "policy": _policy(view),
        "rules": asdict(view.rules) if view else {},
        "min_trainers": trainers_needed(view, own.terms or NO_TERMS) if view else 1,
        "coordinator": short(view.coordinator) if view else "",
        "round": own.round,
        "chain": own.chain.hex(),
        "digest": own.digest.hex() if own.digest_round == own.round else "",
        "digests": {str(number): digest for number, digest in executor.digests.items()},
        "synced": not own.is_behind,
        "role": role,
        "admission": parts.admission.status(),
        "checkpoint": _checkpoint(parts),
        "durable": parts.durability.describe() if parts.durability is not None else "nothing",
        "survives": survives(node.view, _keepers(parts)),
        "attempt": max((begin.attempt for begin in own.begins.values()), default=0),
        "members": [_member(parts, view, member) for member in view.members] if view else [],
        "learners": _learners(parts),
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
            "sent_again": executor.attempts.again_bytes,
        },
        "caps": parts.caps.status() if parts.caps is not None else {},
        "streams": streams.ciphers(),
        "layout": _layout(parts),
        "congestion": sorted({s.congestion for _, s in streams.outgoing() if not s.closed}),
        "own_links": parts.monitor.totals(),
        "last_round_s": executor.last_round_s,
        "round_time": _round_time(parts),
        "last_commit_unix_s": executor.last_commit_unix_s,
        "left_out": node.heartbeats.left_out,
        "waiting": _waiting(parts),
        "last_error": parts.event_log.last_error,
        "last_error_unix_s": parts.event_log.last_error_unix_s,
        "uptime_s": time.monotonic() - parts.started_s,
    } | _happened(parts)


def _happened(parts: Components) -> dict[str, Any]:
    """Return what there was so far: time spent in rounds, and events."""
    log = parts.event_log
    return {
        "rounds_spent": dict(parts.round_clock.spent),
        "event_counts": dict(log.counts),
        "events": log.events,
        "history": log.history,
    }


def survives(view: View | None, keepers: Collection[bytes]) -> str:
    """Say who has to come back after a power cut of all, so that the run goes on by itself.

    ``keepers``: those on whose disks rounds are, as far as this peer knows.
    """
    if view is None or view.number == 0:
        return ""
    kept = [short(peer) for peer in view.peers if peer in keepers]
    if not kept:
        return "no power cut of all: nobody keeps rounds on its disk"
    names, half = [short(peer) for peer in view.peers], len(view.peers) // 2
    if len(names) == 2 and names[0] in kept:  # the tie-breaker has half of the votes, and the state
        return f"a power cut of all, when this one is back: {names[0]}"
    text = f"any {half + 1} of {listed(names)}" if half + 1 < len(names) else listed(names)
    if 2 * half == len(names) > 2:  # half with the tie-breaker are a quorum, too
        text += f", or {names[0]}" + (f" and {half - 1} more of them" if half > 1 else "")
    if len(kept) < len(names) > half + 1:  # a vote of somebody else may have made up for a disk
        text += f", among them one that has the last round (kept by {listed(kept)})"
    return f"a power cut of all, when these are back: {text}"


def _keepers(parts: Components) -> set[bytes]:
    """Return who keeps rounds: the coordinator hears it, others take it that replicas do."""
    node = parts.node
    lead, me = node.coordinator, node.me.peer
    if lead is not None:
        return lead.roster.keepers()
    replicas = {*node.view.replicas} if node.view is not None else set[bytes]()
    return replicas if node.follower.keeps_rounds else replicas - {me}


def _layout(parts: Components) -> str:
    """Say which layout the last round that this peer took part in had, and why it was that."""
    layout = parts.executor.layout
    return (plain(layout.why) or layout.kind) if layout is not None else ""


def _round_time(parts: Components) -> dict[str, float]:
    """Return what a round should take and what it takes, in seconds; nothing if not known."""
    view, state = parts.node.view, parts.executor.state
    if view is None or state is None:
        return {}
    found = round_time(
        parts.rows.table, view.peers, view.coordinator, state.spec, state.manifest.elements
    )
    return asdict(found) if found is not None else {}


def _learners(parts: Components) -> list[dict[str, Any]]:
    """List the joiners that catch up, and archives, as the coordinator knows them."""
    lead = parts.node.coordinator
    return [
        {
            "peer": short(peer),
            "address": learner.member.address,
            "role": learner.member.role,
            "outbound": parts.reach.is_outbound(peer),
            "round": learner.beat.round if learner.beat else 0,
            "synced": learner.beat is not None and not learner.beat.unsynced,
        }
        for peer, learner in (lead.admission.joiners.items() if lead else ())
    ]


def _checkpoint(parts: Components) -> str:
    writer = parts.checkpointer
    if writer is None:
        return ""
    text = "none yet"
    if writer.latest is not None:
        ago = duration(max(0.0, time.time() - writer.latest.unix_s))
        text = f"round {writer.latest.round}, {ago} ago: {writer.latest.path}"
    doing = writer.describe_writing()
    return f"{text}; {doing}" if doing else text


def _policy(view: View | None) -> str:
    """Describe the policy in force and what it means for this view."""
    if view is None:
        return ""
    chosen = view.rules.policy
    if view.may_fork:
        return f"{chosen}: if the others are gone, whoever is left goes on, marked as a fork"
    text = f"{chosen}: a majority of the voters decides"
    if len(view.members) == 2:
        text += f"; if {short(view.members[0].peer)} is lost, the other halts"
    return text


def _member(parts: Components, view: View, member: Member) -> dict[str, Any]:
    node = parts.node
    me = member.peer == node.me.peer
    linked = me or member.peer in parts.host.link_peers()
    state = "connected" if linked else "gone" if member.peer in node.refused else "no connection"
    entry = {
        "peer": short(member.peer),
        "address": member.address,
        "role": member.role,
        "outbound": parts.reach.is_outbound(member.peer),
        "you": me,
        "state": state,
        "via": _via(parts, member.peer),
        "coordinator": node.view is not None and member.peer == node.view.coordinator,
        "rtt_ms": round(1000 * parts.host.srtt_s(member.peer), 1),
    }
    left = rounds_left(view, node.follower.completed)
    if member.peer in left:
        entry["probation"] = left[member.peer]
    if not me:
        entry |= parts.monitor.status(member.peer)
    lead = node.coordinator
    beat = lead.roster.heartbeats.get(member.peer) if lead else None
    if beat is not None:
        entry |= {"round": beat.round, "attached": beat.attached, "arrived": beat.arrived}
    return entry


def _via(parts: Components, peer: bytes) -> str:
    """Return how a member is linked that neither can dial: through which relay, or "punched"."""
    link = parts.host.link_of(peer)
    if link is not None and link.is_punched:
        return PUNCHED
    return short(link.relay) if link is not None and link.relay else ""


def _waiting(parts: Components) -> str:
    """Say who or what the next commit waits for, and since when, in one sentence."""
    node = parts.node
    view, own = node.view, node.follower
    if view is None:
        return _outside(parts)
    if node.heartbeats.halted:
        return node.heartbeats.halted
    if own.loading:
        return f"this peer reads the state of round {own.round} from its disk"
    if own.unsynced:
        if loading := parts.executor.sync.describe():
            return f"this peer is downloading {loading}"
        behind = count(node.syncing.rounds_behind, "round")
        return f"this peer is {behind} behind the others and asks them again soon"
    if node.election is not None and (electing := node.election.waiting_for()):
        names = listed([short(peer) for peer in electing[0]])
        return f"no coordinator for {duration(electing[1])}: the election waits for {names}"
    tail = _without_connection(parts, view)
    if node.heartbeats.held:
        return f"{node.heartbeats.held}{tail}"
    return f"{_round_waits(parts)}{tail}"


def _without_connection(parts: Components, view: View) -> str:
    reached = {*parts.host.link_peers(), parts.node.me.peer}
    gone = [short(peer) for peer in view.peers if peer not in reached]
    return f"; no connection to {listed(gone)}" if gone else ""


def phase_of(own: MemberState) -> tuple[int, bool]:
    """Return which round this peer has, and whether the next one is exchanged."""
    return own.round, own.round + 1 in own.begins


def _round_waits(parts: Components) -> str:
    """Say what the next round waits for, where there is a view and rounds are not held."""
    node, own = parts.node, parts.node.follower
    number, is_exchanged = own.round + 1, own.round + 1 in own.begins
    late = parts.round_clock.late(phase_of(own))
    names = listed([short(p) + (" (this peer)" if p == node.me.peer else "") for p in late])
    so_far = f" ({duration(node.heartbeats.waiting[1])} so far)" if names else ""
    if is_exchanged:
        waits = f" and waits for {names}" if names else ""
        return f"round {number} is exchanged{waits}{so_far}"
    if names and not {*late} & {*parts.host.link_peers(), node.me.peer}:
        return f"round {number} waits for {names} to come back{so_far}"
    if names:
        return f"round {number} waits for the training of {names}{so_far}"
    if own.attached:
        return f"round {number} is {'about to begin' if own.submissions else 'trained for'}"
    yet = "" if own.round else " yet"
    return f"no training script is attached{yet}: start one (python train.py)"


def nobody_answers(run: str, address: str, why: str) -> str:
    """Say what a peer waits for that was in a run before and reaches nobody of it."""
    return (
        f"nobody of run {run} answers yet: {why}. This peer goes on trying, and others can dial it"
        f" at {address}: start another member. If nobody is left: --resume PATH goes on from a"
        " checkpoint, --force-new-lineage begins anew, without state"
    )


def answers_late(why: str, limit_s: float) -> str:
    """Say what a newcomer waits for whose connections are taken, and closed or not answered."""
    return (
        f"{why}. Somebody takes connections there, and may be busy with others, or it is no port of"
        f" atoll: this peer goes on trying for {duration(limit_s)}"
    )


def nobody_leads(run: str, peers: Sequence[bytes]) -> str:
    """Say what a peer waits for that was in a run before, and that nobody lets in."""
    there = listed([short(peer) for peer in peers]) or "nobody"
    return (
        f"this peer waits until a member of run {run} lets it in; it has a connection to {there}."
        " If none of them is in the run any more: --resume PATH on one machine goes on from a"
        " checkpoint, and the others join it"
    )


def missing_founders(parts: Components) -> str:
    """Say who is here, whom the others wait for, and how to go on without them."""
    text = parts.node.bootstrap.describe()
    missing = parts.reconnector.unanswered(parts.addresses.contacts())
    known = {address: parts.reconnector.why_not(address) for address in missing}
    silent = [address for address, why in known.items() if not why]
    if silent:
        text += f"; no answer from {listed(silent)}"
    return text + "".join(f"; {why}" for why in known.values() if why)


def _outside(parts: Components) -> str:
    """Say what a peer does that is in no view."""
    node = parts.node
    run, behind = parts.options.run, node.syncing.rounds_behind
    if parts.inquiry is not None:
        return f"before run {run} is resumed, does it live? {parts.inquiry.describe()}"
    if node.bootstrap.waiting:
        return missing_founders(parts)
    if node.phase is not Phase.LEARNER or not node.joining.is_followed:
        has = f"; it has the state of round {node.follower.round}" if parts.executor.state else ""
        return f"this peer is outside run {run}: no coordinator of it answers{has}"
    late = f"{count(behind, 'round')} behind" if behind else "up to date"
    loading = parts.executor.sync.describe()
    if node.me.role == ARCHIVE:
        text = f"following run {run} as an archive, round {node.follower.round}, {late}"
        return f"{text}; downloading {loading}" if loading else text
    return f"joining run {run}, {late}: downloading {loading or 'the state'}"


def render(status: dict[str, Any]) -> str:
    """Return the text of `atoll status`."""
    size_text = f", {status['parameters']:,} parameters" if status["parameters"] else ""
    up = duration(status["uptime_s"])
    lines = [
        _line("run", f"{status['run']}, round {status['round']}{size_text}"),
        _line("peer", f"{status['peer']} at {status['address']}, {_standing(status)}, up {up}"),
    ]
    if status["reach"]["state"] != ReachState.UNKNOWN.value:
        lines.append(_line("reach", status["reach"]["text"]))
    lines += carried(status["relay"], outbound=status["reach"]["outbound"])
    if status["policy"]:
        lines.append(_line("policy", status["policy"]))
    if status["min_trainers"] > 1:
        lines.append(
            _line("trainers", f"at least {status['min_trainers']}: with fewer no round begins")
        )
    if status["fork"]:
        lines.append(_line("FORK", f"this is lineage {status['lineage']}, without a majority"))
    for event in status["history"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["unix_s"]))
        lines.append(_line(event["kind"], f"{when}  {event['text']}"))
    lines += _table([*map(_member_row, status["members"]), *map(_learner_row, status["learners"])])
    lines += _trainer(status)
    lines += _traffic(status)
    if status["layout"]:
        lines.append(_line("plan", status["layout"]))
    if status["round_time"]:
        lines.append(_line("round", RoundTime(**status["round_time"]).text))
    if status["digest"]:
        lines.append(_line("state", f"{status['digest'][:32]} after round {status['round']}"))
    if status["checkpoint"]:
        lines.append(_line("checkpoint", status["checkpoint"]))
    lines.append(_line("remembers", status["durable"]))
    if status["survives"]:
        lines.append(_line("survives", status["survives"]))
    lines += describe_admission(status["admission"])
    if status["left_out"]:
        lines.append(_line("no link", status["left_out"]))
    lines.append(_line("now", status["waiting"]))
    return "\n".join([*lines, _line("error", _last_error(status))])


def describe_admission(admission: dict[str, Any]) -> list[str]:
    """Say how peers are admitted, and who is banned."""
    if admission["mode"] == "authority":
        from atoll.peer.authority.ledger import describe  # not in a daemon that has none

        lines = describe(admission)
    else:
        lines = ["admission  by the run secret"]
    return lines + describe_bans(admission)


def describe_bans(admission: dict[str, Any]) -> list[str]:
    """Return the lines of `atoll status` about bans."""
    rows = admission.get("banned", [])
    lines = [
        f"  banned {row['text']}; evidence {row['evidence'][:16]}"
        + ("" if row["agreed"] else " (not in the view yet)")
        for row in rows[:BANS_SHOWN_MAX]
    ]
    if len(rows) > BANS_SHOWN_MAX:
        lines.append(f"  and {len(rows) - BANS_SHOWN_MAX} more are banned")
    return lines


def _standing(status: dict[str, Any]) -> str:
    """Say in words what this peer is in the run."""
    if status["phase"] == Phase.LEARNER.value:
        return "archive" if status["role"] == ARCHIVE else "joining"
    words = {Phase.OUT.value: "outside", Phase.CANDIDATE.value: "electing a coordinator"}
    member = WITNESS if status["role"] == WITNESS else status["phase"]
    return words.get(status["phase"], str(member))


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL_CHARACTERS}} {text}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines with aligned columns; leave out columns that nobody fills."""
    columns = [column for column in zip(*rows, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  "
        + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]


def _member_row(member: dict[str, Any]) -> tuple[str, ...]:
    doing = ["outbound"] if member["outbound"] else []
    doing += [member["state"]] if member["state"] != "connected" else []
    if via := member["via"]:
        doing.append(via if via == PUNCHED else f"via {via}")
    if "round" in member:
        doing.append(f"round {member['round']}")
        if member["role"] == REPLICA:
            doing.append("training" if member["attached"] else "no trainer")
    doing += _probation(member)
    role = "member" if member["role"] == REPLICA else member["role"]
    role = "coordinator" if member["coordinator"] else role
    link = "this peer" if member["you"] else ", ".join(_link(member))
    return (member["peer"], member["address"], role, ", ".join(doing), link)


def _learner_row(learner: dict[str, Any]) -> tuple[str, ...]:
    doing = "archive" if learner["role"] == ARCHIVE else "joining"
    late = "" if learner["synced"] else ", downloading the state"
    outbound = "outbound, " if learner["outbound"] else ""
    state = f"{outbound}round {learner['round']}{late}"
    return (learner["peer"], learner["address"], doing, state, "")


def carried(relay: dict[str, Any], *, outbound: bool) -> list[str]:
    """Say what this peer carries for others, if it carries anything or was told to.

    A pair that has met directly keeps a control link through a relay, which then stands by.
    """
    if not (relay["bytes_per_s"] or relay["circuits"]):
        return []
    if outbound and not relay["circuits"]:
        return [_line("relay", "nothing, because others cannot dial this peer")]
    data, links = _pairs(relay, bulk=True), _pairs(relay, bulk=False)
    mbit = relay["bytes_per_s"] * 8 / 1e6
    said = [f"up to {mbit:g} Mbit/s of others' data"] if mbit else []
    if mbit and data:
        said[0] += f", now between {data}"
    if links:
        said.append(f"control links, or their reserve, between {links}")
    return [_line("relay", f"{'; '.join(said)}; {size(relay['carried_bytes'])} carried so far")]


def _pairs(relay: dict[str, Any], *, bulk: bool) -> str:
    """Name the pairs that data streams, or else control links, lead between through this peer."""
    return ", ".join(" and ".join(c["between"]) for c in relay["circuits"] if c["bulk"] == bulk)


def _trainer(status: dict[str, Any]) -> list[str]:
    if status["trainer"]:
        figures = (f", {k} {v:.6g}" for k, v in status["trainer"]["metrics"].items())
        return [_line("trainer", f"process {status['trainer']['pid']}{''.join(figures)}")]
    return [_line("trainer", "none")] if status["role"] not in (ARCHIVE, WITNESS) else []


def _traffic(status: dict[str, Any]) -> list[str]:
    moved, lines = status["bytes"], []
    for way in ("sent", "received"):
        each = ", ".join(f"{purpose} {size(number)}" for purpose, number in moved[way].items())
        again = moved["sent_again"] if way == "sent" else 0
        tail = f"; {size(again)} of the rounds again, after broken attempts" if again else ""
        lines.append(_line(way, f"{size(sum(moved[way].values()))}: {each}{tail}"))
    if status["caps"]:
        lines.append(_line("caps", describe_caps(status["caps"])))
    if status["streams"]:
        kinds = (f"{number} {cipher}" for cipher, number in sorted(status["streams"].items()))
        lines.append(_line("streams", ", ".join(kinds)))
    return lines


def _last_error(status: dict[str, Any]) -> str:
    if not status["last_error"]:
        return "none"
    ago_s = max(0.0, time.time() - status["last_error_unix_s"])
    return f"{status['last_error']} ({duration(ago_s)} ago)"


def _probation(member: dict[str, Any]) -> list[str]:
    """Say for how long the member's submissions do not count; nothing if they do."""
    rounds = member.get("probation")
    if rounds is None:
        return []
    if rounds == 0:
        return ["on probation until the next view"]
    return [f"on probation for {count(rounds, 'more round')}"]


def _link(member: dict[str, Any]) -> list[str]:
    """Describe the link to a member, as far as it was measured."""
    marks = ["on this machine"] if member.get("local") else []
    marks += [duration(1e-3 * member["rtt_ms"])] if member["rtt_ms"] else []
    for way, name in (("out", "up"), ("in", "down")):
        if f"{way}_bytes_per_s" in member:
            marks.append(f"{name} {rate(member[f'{way}_bytes_per_s'])}")
    marks += [f"loss {member['loss']:.1%}"] if member.get("loss", 0.0) >= LOSS_SHOWN else []
    return marks
