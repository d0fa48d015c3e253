"""Judge the way into a run, stage by stage, and what its member says. Pure."""

from __future__ import annotations

from typing import Final

from atoll.collectives.units import duration, listed, rate, size
from atoll.peer.daemon.reach_lines import dials, how_to_open
from atoll.peer.daemon.reachability import DialledBy, ReachTrigger, judge_answers
from atoll.peer.doctor.facts import (
    OK,
    Diagnosis,
    Facts,
    MemberAnswer,
    RateFacts,
    RunFacts,
    Trouble,
    fail,
    ok,
    skipped,
    warn,
)
from atoll.peer.doctor.machine_checks import NO_MODEL, parameters
from atoll.peer.membership.view import short

# The stages of a dial, in order, by the names that errors have (net/dial.py), and their lines.
STAGES: Final = {
    "DNS": "name",
    "TCP": "tcp",
    "TLS": "tls",
    "secret": "secret",
    "identity": "identity",
    "version": "version",
    "admission": "admission",
}
# ... and those of a dial through a proxy, which resolves names itself.
PROXY_STAGES: Final = {"proxy": "tcp", "TCP behind the proxy": "tcp"}
REFUSED: Final = "refused"  # the member has answered a hello, with a reason why not
# Clocks that NTP keeps differ by milliseconds. Invites that expire, and logs that are compared,
# bear some seconds.
CLOCK_OFF_S: Final = 10.0
# Members wait longer than the usual 1.2 s for signs of life of a peer that is this far away.
ROUND_TRIP_GOOD_S: Final = 0.35
# Below it, 100 M parameters in int8 take over seven minutes each way in every round.
RATE_GOOD_BYTES_PER_S: Final = 2e6 / 8


def invite(facts: Facts) -> Diagnosis:
    """Tell whether `atoll join` takes the invite with this home."""
    run = _run(facts)
    if run.invite_problem:
        return fail(run.invite_problem, run.invite_fix)
    return ok(f"for run {run.run} at {run.address}", run.run)


def name(facts: Facts) -> Diagnosis:
    """Tell what addresses the host's name has."""
    run = _run(facts)
    trouble = _trouble_before("name", run)
    if trouble is not None:
        return trouble
    if run.proxy:
        return ok(f"{run.host} is for {run.proxy} to find", [])
    if run.found == (run.host,):
        return ok(f"{run.host} is an address: nothing to resolve", list(run.found))
    where = listed(run.found)
    return ok(f"{run.host} is {where}, found in {duration(run.resolve_s)}", list(run.found))


def tcp(facts: Facts) -> Diagnosis:
    """Tell whether something answers at the address."""
    run = _run(facts)
    by = f" through {run.proxy}" if run.proxy else ""
    what = f"{run.address} answered{by} in {duration(run.connect_s)}"
    return _trouble_before("tcp", run) or ok(what, run.connect_s)


def tls(facts: Facts) -> Diagnosis:
    """Tell whether what answers speaks TLS as members of a run do."""
    return _trouble_before("tls", _run(facts)) or ok("it speaks TLS 1.3 as peers do", True)


def secret(facts: Facts) -> Diagnosis:
    """Tell whether the run's secret is the one of the invite."""
    run = _run(facts)
    return _trouble_before("secret", run) or ok(f"both have the same one (tag {run.tag})", run.tag)


def identity(facts: Facts) -> Diagnosis:
    """Tell whether it is the peer that made the invite."""
    run = _run(facts)
    named = "it is the peer that made the invite"
    what = (
        named if run.names_peer else "it has proved an identity; an authority's invite names none"
    )
    return _trouble_before("identity", run) or ok(what, run.names_peer)


def version(facts: Facts) -> Diagnosis:
    """Tell whether the two programs can be in one run."""
    run, machine = _run(facts), facts.machine
    trouble = _trouble_before("version", run)
    if trouble is not None:
        return trouble
    answer = run.answer
    if answer is None:
        refused = run.trouble is not None and run.trouble.stage == REFUSED
        return ok("both speak one protocol") if refused else skipped("the member gave no answer")
    there = f"atoll {answer.program} (protocol {answer.protocol})"
    value = {"atoll": answer.program, "protocol": answer.protocol}
    if answer.program != machine.program:
        what = f"it runs {there}, this machine {machine.program}: they work together"
        older = min(answer.program, machine.program, key=_ordered)
        where = "there" if older == answer.program else "here"
        return warn(what, f"update atoll {where} when it suits", value)
    return ok(f"it runs {there} too", value)


def admission(facts: Facts) -> Diagnosis:
    """Tell whether the member talks to peers of the invite's run."""
    run = _run(facts)
    trouble = _trouble_before("admission", run)
    if trouble is None and run.answer is None:
        return skipped("the member gave no answer")
    return trouble or ok(f"it is in run {run.run} and answers", True)


def _ordered(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def model(facts: Facts) -> Diagnosis:
    """Tell what the run trains, if a trainer has brought a model."""
    answer, without = _answer(facts)
    if answer is None:
        return without
    if not answer.elements:
        return ok(f"{NO_MODEL}: the first trainer brings one, and a witness holds none", None)
    value = {
        "parameters": answer.elements,
        "state_bytes": answer.state_bytes,
        "daemon_bytes": answer.daemon_bytes,
        "method": answer.method,
        "codec": answer.codec,
    }
    state = f", {size(answer.state_bytes)} of state" if answer.state_bytes else ""
    how = f"{answer.method} with {answer.codec}"
    return ok(f"{parameters(answer.elements)}, {how}{state}", value)


def clock(facts: Facts) -> Diagnosis:
    """Tell how far this machine's clock is from the member's."""
    answer, without = _answer(facts)
    if answer is None:
        return without
    offset_s = answer.clock_offset_s
    how = "ahead of" if offset_s < 0 else "behind"
    what = f"{duration(abs(offset_s))} {how} the member's, give or take"
    what += f" {duration(answer.clock_error_s)}"
    if abs(offset_s) - answer.clock_error_s > CLOCK_OFF_S:
        fix = "set the clock that is wrong: timedatectl set-ntp true; invites expire by it"
        return warn(what, fix, offset_s)
    if abs(offset_s) <= answer.clock_error_s:
        what = f"as the member's, give or take {duration(answer.clock_error_s)}"
    return ok(what, offset_s)


def round_trip(facts: Facts) -> Diagnosis:
    """Tell how long a message takes to the member and back."""
    answer, without = _answer(facts)
    if answer is None:
        return without
    what = f"{duration(answer.rtt_s)} to the member and back"
    if answer.rtt_s > ROUND_TRIP_GOOD_S:
        fix = "none is needed: rounds bear it, and members wait longer for signs of life"
        return warn(what, fix, answer.rtt_s)
    return ok(what, answer.rtt_s)


def dial_back(facts: Facts) -> Diagnosis:
    """Tell whether members can dial this machine at its port."""
    run = _run(facts)
    answer, without = _answer(facts)
    if answer is None:
        return without
    port = int(facts.machine.listen.rpartition(":")[2])
    found = dial_back_line(run.dialled, run.not_dialled, port, proxied=bool(run.proxy))
    if not port and found.status != OK:
        return skipped("port 0 is another one at each start, which nobody can forward")
    return found


def dial_back_line(
    dialled: DialledBy | None, why_not: str, port: int, *, proxied: bool = False
) -> Diagnosis:
    """Judge by what members came to, as a daemon does once it runs (daemon/reachability.py).

    ``proxied``: this machine dials through a proxy, at whose address it is dialled.
    """
    if dialled is None:
        return skipped(why_not)
    found, shown = judge_answers(dialled, leads_here=True), dials(dialled.answers)
    value = {short(one.by): one.outcome for one in dialled.answers}
    if found is ReachTrigger.UNANSWERED:
        return skipped("no member could try")
    if found is ReachTrigger.CONFIRMED:
        return ok(f"others can dial port {port} here: {shown}", value)
    if found is ReachTrigger.NEIGHBOUR:
        what = f"not confirmed that others can dial port {port} here: {shown}, and nobody else"
        fix = "none is needed: the daemon asks others as soon as there are some, and says so"
        return warn(f"{what} is there to try it", fix, value)
    fix = "none is needed: it trains all the same, as an outbound peer. To be dialled, too:"
    what = f"others cannot dial port {port} here: {shown}"
    return warn(what, f"{fix} {how_to_open(port, proxied=proxied)}", value)


def rate_up(facts: Facts) -> Diagnosis:
    """Tell how fast this machine sends to the member."""
    return _rate(facts, _run(facts).up, "to the member", "sending")


def rate_down(facts: Facts) -> Diagnosis:
    """Tell how fast this machine receives from the member, and how long joining takes."""
    run = _run(facts)
    found = _rate(facts, run.down, "from the member", "receiving")
    if run.down is None or not (run.down.bytes and run.down.seconds) or run.answer is None:
        return found
    takes_s = run.answer.state_bytes / (run.down.bytes / run.down.seconds)
    if not takes_s:
        return found
    what = f"{found.what}; joining loads the state in about {duration(takes_s)}"
    return Diagnosis(found.status, what, found.fix, found.value)


def _rate(facts: Facts, found: RateFacts | None, where: str, doing: str) -> Diagnosis:
    answer, without = _answer(facts)
    if answer is None:
        return without
    if found is None:
        return skipped("rates are not wanted (--no-rates)")
    if found.problem or not found.seconds:
        return skipped(f"{found.problem or 'nothing arrived'}")
    per_s = found.bytes / found.seconds
    value = round(8 * per_s / 1e6, 3)
    what = f"{rate(per_s)} {where} ({size(found.bytes)} in {duration(found.seconds)})"
    if per_s < RATE_GOOD_BYTES_PER_S:
        fix = f"rounds wait for {doing}: docs/choosing.md lists methods that exchange less"
        return warn(what, fix, value)
    return ok(what, value)


# ---------------------------------------------------------------- what checks have in common


def _run(facts: Facts) -> RunFacts:
    assert facts.run is not None, "this check is for runs"
    return facts.run


def _trouble_before(line: str, run: RunFacts) -> Diagnosis | None:
    """Return what the line of a stage says if the way ended there or before; None if it went on."""
    if run.trouble is None:
        return None
    lines = list(STAGES.values())
    ended = lines.index(_line_of(run.trouble))
    if lines.index(line) < ended:
        return None
    return _failed(run.trouble) if lines[ended] == line else skipped(f"{lines[ended]} failed")


def _line_of(trouble: Trouble) -> str:
    return (STAGES | PROXY_STAGES).get(trouble.stage, "admission")


def _failed(trouble: Trouble) -> Diagnosis:
    return fail(trouble.what, trouble.fix, trouble.stage)


def _answer(facts: Facts) -> tuple[MemberAnswer | None, Diagnosis]:
    """Return what the member has said, and what a line says where it has said nothing."""
    run = _run(facts)
    if run.trouble is not None:
        return None, skipped(f"{_line_of(run.trouble)} failed")
    return run.answer, skipped("the member was not asked")
