"""One seed from beginning to end: form, faults, heal, and everyone has to go on.

``run_seed`` returns an Outcome and never raises for what the machines do: a failure names the
invariant. Tracing costs a factor of two, so failures are run again with it.
"""

from __future__ import annotations

import gc
import traceback
from dataclasses import dataclass, field

from harness.tracing import Recorder

from simulation.arena import Arena
from simulation.faults import Faults
from simulation.liveness import goal_reached, is_halted, outlook, why_not
from simulation.options import Options, draw
from simulation.script import Fault, draw_script

__all__ = ["Outcome", "run_script", "run_seed"]

FORM_S = 60.0  # nothing fails meanwhile
COMMIT_S = 10.0  # I7: a round commits so soon after the faults stop ...
REJOIN_S = 15.0  # ... and everyone is back in: JOIN, catching up and a view, in several turns
STEPS_MAX = 400_000
CHECK_S = 0.1
DRAIN_S = 0.3  # from the end of the faults to the judgement


@dataclass(frozen=True)
class Outcome:
    seed: int
    failure: str = ""  # the invariant and what broke it
    verdict: str = ""  # "recovered", or why it could not
    rounds: int = 0
    views: int = 0
    events: int = 0
    virtual_s: float = 0.0
    trace: str = ""
    seen: dict[str, int] = field(default_factory=dict)  # what the run has come to

    @property
    def invariant(self) -> str:
        """What a shrinker must keep: the failure without names and numbers."""
        return self.failure.split(":")[0]


def run_seed(seed: int, tracing: bool = False) -> Outcome:
    options = draw(seed)
    return run_script(options, draw_script(options), tracing)


def run_script(
    options: Options,
    script: list[Fault],
    tracing: bool = False,
    recorder: Recorder | None = None,
) -> Outcome:
    gc.disable()  # a run is short, and looking for garbage costs a tenth of it
    try:
        return _carried_out(options, script, tracing, recorder)
    finally:
        gc.enable()  # all of the run is garbage now, and nothing else is looked at


def _carried_out(
    options: Options, script: list[Fault], tracing: bool, recorder: Recorder | None
) -> Outcome:
    arena = Arena(options)
    arena.tracing, arena.recorder = tracing, recorder
    failure = verdict = ""
    try:
        verdict = _run(arena, options, script)
    except AssertionError as error:
        failure = str(error) or "assertion: " + traceback.format_exc(limit=-2)
    except Exception as error:  # the machine itself failed: that is a finding, not a crash
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename.rsplit('/', 1)[-1]}:{place.name}"
        failure = f"crash in {where}: {type(error).__name__}: {error}"
    return Outcome(
        options.seed,
        failure,
        verdict,
        arena.committed,
        len(arena.checker.views),
        arena.events,
        arena.now_s,
        arena.tail(100_000) if tracing else "",
        _seen(arena),
    )


def _seen(arena: Arena) -> dict[str, int]:
    """How often the rare things have come about: seeds that reach nothing show nothing."""
    views = arena.checker.views.values()
    seen = arena.seen.copy()
    seen["fork views"] = sum(view.fork for view in views)
    seen["rollback views"] = sum(view.rollback for view in views)
    seen["cradles"] = sum(v.number == 1 and bool(v.ancestors) for v in views)
    seen["views with newcomers"] = sum(bool(view.newcomers) for view in views)
    seen["views that remember somebody"] = sum(bool(view.absent) for view in views)
    seen["views with bans"] = sum(bool(view.banned) for view in views)
    seen["runs with unlinked pairs"] = int(bool(arena.outbound or arena.unlinkable))
    seen["runs with relays"] = int(bool(arena.relays))
    seen["attempts that a witness owns"] = arena.plane.owned
    seen["resumed views"] = sum(v.number == 1 and v.base_round > 0 for v in views)
    for kind in ("yield", "base-lost", "excluded", "diverged", "held", "links", "hand-over"):
        seen[kind] = arena.noted[kind]
    return {what: count for what, count in sorted(seen.items()) if count}


def _run(arena: Arena, options: Options, script: list[Fault]) -> str:
    calm = arena.loss, arena.double
    arena.loss = arena.double = 0.0
    if options.profile == "birth":
        Faults(arena, [fault for fault in script if fault.at_s == 0.0])
        script = [fault for fault in script if fault.at_s > 0.0]
    arena.begin()
    _until(arena, lambda: _has_formed(arena), FORM_S, "the run never formed")
    arena.formed = True
    arena.loss, arena.double = calm
    faults = Faults(arena, script)
    arena.run(options.faulty_s)
    arena.checker.bounded(arena)
    faults.heal()
    arena.run(faults.drain_s + DRAIN_S + 5 * options.delay_s)  # what the dead had said still counts
    found = outlook(arena, faults.left)
    faults.revive()
    if not found.recovers:
        arena.run(2.0)  # safety goes on
        arena.checker.bounded(arena)
        return found.verdict
    transfer_s = 2 * (options.load_s + options.chunk_s * options.chunks * options.hosts)
    waits_s = found.extra_s + max(3.0 * options.inner_s, 20 * options.delay_s)
    start = _furthest(arena)
    end_s = COMMIT_S + transfer_s + waits_s
    try:
        _until(
            arena,
            lambda: _furthest(arena) > start or is_halted(arena),
            end_s,
            "invariant 7: no commit",
        )
    except AssertionError:
        if not _waits_apart(arena):
            raise
        return "held: those who count wait with different calls"
    if not found.everyone:
        return "recovered, without some"
    end_s = REJOIN_S + transfer_s + waits_s + 0.5 * len(arena.hosts)
    goal = start + 2
    _until(
        arena,
        lambda: goal_reached(arena, faults.left, goal) or is_halted(arena),
        end_s,
        "invariant 7: not everyone is back",
    )
    arena.checker.bounded(arena)
    return "halted, and says so" if is_halted(arena) else found.verdict


def _waits_apart(arena: Arena) -> bool:
    """Return whether a round is held because too few of those who call for it count, while others
    who count wait with another call: nobody tells them before it begins (docs/log.md)."""
    leads = [host.node.coordinator for host in arena.living() if host.node.coordinator]
    return any(
        (" is held: " in lead.eligibility.held or lead.eligibility.left_out)
        and len({beat.operation for beat in lead.roster.heartbeats.values() if beat.arrived}) > 1
        for lead in leads
    )


def _has_formed(arena: Arena) -> bool:
    return all(host.alive and host.round >= 2 for host in arena.hosts.values())


def _furthest(arena: Arena) -> int:
    """Rounds go back in a rollback, and a lineage that gives way may have had more."""
    return max((host.round for host in arena.living() if host.node.view is not None), default=0)


def _until(arena: Arena, condition, limit_s: float, what: str) -> None:  # type: ignore[no-untyped-def]
    end_s = arena.now_s + limit_s
    next_s = arena.now_s
    for _ in range(STEPS_MAX):
        if arena.now_s >= next_s:
            next_s = arena.now_s + CHECK_S
            if condition():
                return
            if arena.now_s > end_s:
                break
        arena.advance()
    raise AssertionError(f"{what} in {limit_s:.1f} s: {why_not(arena)}")
