"""Make the summary and the verdict of `atoll demo` from its figures. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.collectives.units import count, duration, size
from atoll.peer.demo.figures import DemoFigures, PeerFigures, ProcessEnding

LOSS_SHARE_MAX = 0.75  # of the untrained model's loss: far outside the noise of the held-out text
LEAVE_MAX_S = 5.0  # what a clean leave is promised to take
ORPHANED_MAX_S = 10.0  # by then a trainer must know that its daemon is dead
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class DemoCheck:
    """Describe one condition of success; ``why`` says what is wrong if it is not ``ok``."""

    name: str
    ok: bool
    why: str


def all_reduce_bytes(peers: int, parameters: int, steps: int) -> int:
    """Return what one peer sends if float32 gradients are ring-all-reduced at each of ``steps``."""
    return round(2 * (peers - 1) / peers * FLOAT32_BYTES * parameters * steps)


def checks(figures: DemoFigures) -> list[DemoCheck]:
    """Check everything that must be so for exit status 0."""
    found = [_loss_check(figures)]
    if figures.chaos:
        newcomer = figures.newcomer
        found += [
            DemoCheck(
                "survivors went on",
                figures.committed_s is not None,
                "no survivor committed a round after the kill",
            ),
            DemoCheck(
                "newcomer took part",
                newcomer is not None and newcomer.contributed > 0,
                "the newcomer contributed to no committed round",
            ),
        ]
    return [*found, _digest_check(figures), _ending_check(figures)]


def _loss_check(figures: DemoFigures) -> DemoCheck:
    untrained, final = figures.losses.get(1), figures.last_loss
    if untrained is None or final is None:
        return DemoCheck("loss fell", False, "no held-out loss was reported")
    why = f"{final:.3f} is not below {LOSS_SHARE_MAX:.0%} of {untrained:.3f}; try more --rounds"
    return DemoCheck("loss fell", final < LOSS_SHARE_MAX * untrained, why)


def _digest_check(figures: DemoFigures) -> DemoCheck:
    living = figures.living
    name = "digests equal"
    if len({peer.round for peer in living}) != 1:
        rounds = ", ".join(f"{peer.name} has round {peer.round}" for peer in living)
        return DemoCheck(name, False, f"peers ended at different rounds: {rounds}")
    if not all(peer.digest for peer in living):
        return DemoCheck(name, False, f"not every peer has a digest of round {living[0].round}")
    unequal = sorted(r for r, of in figures.digests.items() if len(set(of.values())) > 1)
    if unequal or len({peer.digest for peer in living}) != 1:
        at = ", ".join(map(str, unequal or [living[0].round]))
        return DemoCheck(name, False, f"peers hold different state after round {at}")
    return DemoCheck(name, True, "")


def _ending_check(figures: DemoFigures) -> DemoCheck:
    wrong = [_describe(end) for end in figures.endings if end.got != end.wanted]
    if figures.left_s > LEAVE_MAX_S:
        wrong.append(f"a daemon took {figures.left_s:.1f} s to leave")
    if figures.orphaned_s is not None and figures.orphaned_s > ORPHANED_MAX_S:
        wrong.append(f"a trainer took {figures.orphaned_s:.1f} s to notice its daemon's death")
    ok = bool(figures.endings) and not wrong
    return DemoCheck("processes ended as expected", ok, "; ".join(wrong) or "nothing was started")


def _describe(end: ProcessEnding) -> str:
    got = "did not end by itself" if end.got is None else f"ended with {end.got}"
    return f"{end.process} {got} instead of {end.wanted}"


# ---------------------------------------------------------------- text


def summary(figures: DemoFigures) -> list[tuple[str, str]]:
    """Return pairs of a label and a line; a label is empty where the line before goes on."""
    untrained, final = figures.losses.get(1), figures.last_loss
    lines = [
        ("untrained loss", _loss(untrained)),
        ("final held-out loss", f"{_loss(final)} after round {max(figures.losses, default=0)}"),
        *_byte_lines(figures),
    ]
    if figures.killed_unix_s is not None:
        lines += _death_lines(figures)
    newcomer = figures.newcomer
    if newcomer is not None:
        text = f"{newcomer.name} was started after round {figures.joined_round}"
        rounds = count(newcomer.contributed, "round")
        lines.append(("newcomer", f"{text} and contributed to {rounds}"))
    each = ", ".join(f"{p.name} {_share(p)}" for p in figures.peers if p.elapsed_s)
    return [
        *lines,
        ("state digests", _digest_line(figures)),
        ("time spent waiting", f"{figures.waiting_share:.1%} of the training time ({each})"),
        ("processes", _ending_line(figures)),
        ("time", f"{figures.duration_s:.0f} s, {_seconds(figures.usual_s)} a round"),
    ]


def _byte_lines(figures: DemoFigures) -> list[tuple[str, str]]:
    """Return what each daemon has sent, beside all-reduce, and then what it was for."""
    lines = [("bytes sent", f"{'':8}{'DiLoCo':>9}   {'all-reduce at every step':<27}steps")]
    for peer in figures.peers:
        dense = all_reduce_bytes(figures.founders, figures.parameters, peer.steps)
        ratio = f", {dense / peer.sent_bytes:.0f} times" if peer.sent_bytes and dense else ""
        text = f"{peer.name:<8}{size(peer.sent_bytes):>9}   {size(dense):>8}{ratio:<18}"
        lines.append(("", f"{text}{peer.steps:>6}"))
    purposes = list(dict.fromkeys(purpose for peer in figures.peers for purpose in peer.sent))
    lines.append(("... by purpose", f"{'':8}{''.join(f'{purpose:>9}' for purpose in purposes)}"))
    for peer in figures.peers:
        each = "".join(f"{size(peer.sent.get(purpose, 0)):>9}" for purpose in purposes)
        lines.append(("", f"{peer.name:<8}{each}"))
    return lines


def _death_lines(figures: DemoFigures) -> list[tuple[str, str]]:
    victim = next((peer for peer in figures.peers if peer.killed), None)
    role = "the coordinator" if figures.killed_coordinator else "a member"
    name = victim.name if victim else "a peer"
    text = f"noticed after {_seconds(figures.noticed_s)}"
    if figures.reformed_s is not None:
        text += f", all survivors in a new view after {_seconds(figures.reformed_s)}"
    commit = f"next round committed after {_seconds(figures.committed_s)}, local steps included"
    return [
        ("SIGKILL", f"daemon of {name}, {role}, after round {figures.killed_round}"),
        ("survivors", text),
        ("", f"{commit} (usual: {_seconds(figures.usual_s)} a round)"),
        ("its trainer", f"ended with a clear error after {_seconds(figures.orphaned_s)}"),
    ]


def _digest_line(figures: DemoFigures) -> str:
    living = figures.living
    compared = sum(len(of) > 1 for of in figures.digests.values())
    check = _digest_check(figures)
    if not check.ok:
        return f"NOT EQUAL: {check.why}"
    if len(living) < 2:
        return f"one peer, nothing to compare: {living[0].digest[:16]}"
    names = ", ".join(peer.name.removeprefix("peer ") for peer in living)
    return (
        f"equal on peers {names} after round {living[0].round}: {living[0].digest[:16]}"
        f" ({count(compared, 'round')} compared)"
    )


def _ending_line(figures: DemoFigures) -> str:
    check = _ending_check(figures)
    if not check.ok:
        return f"UNEXPECTED: {check.why}"
    ended = f"all {len(figures.endings)} ended as expected"
    return f"{ended}; to leave took a daemon {figures.left_s:.1f} s at most"


def _loss(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f} nats per byte"


def _seconds(value: float | None) -> str:
    if value is None:
        return "unknown"
    return duration(value)


def _share(peer: PeerFigures) -> str:
    return f"{peer.waited_s / peer.elapsed_s:.0%}"
