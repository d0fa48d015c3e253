"""Scenario transcripts: a few lines of script, and what the machines then say to each other.

The head of a file is the script, one verb per line; below the line of dashes stands the transcript.
Heartbeats are left out and so is what the trainers do. `make scenarios-rewrite` writes transcripts
anew: read the difference before you commit it.

    hosts a b c            processes with their trainers; `hosts a b w:witness` gives a role
    outbound NAMES         these can only dial out; before `hosts`, as is the next one
    nolink A B             these have no common protocol
    relays NAMES CARRIES   these carry control links of others, and some of them data as well
    unlink A B / relink A B   they lose their link, and have one again
    averages               what steps reduce is known to all, so that a witness can own it
    unreachable NAME       it finds out that nobody can dial it
    soon 5s                hand over after so long to who has more links, and not after a minute
    rules POLICY ON_LOST ON_FORK MIN_TRAINERS
    form                   found, join, attach, two rounds (not in the transcript)
    quiet                  forget the transcript so far
    run 2s                 let time pass
    kill|off|pause|resume|restart|leave|detach|train NAME
    join NAME              a new process that asks to come in
    cut A B / oneway A B / isolate A B / heal
    bridge NAMES NAMES     two halves that hear each other only through who is in neither; no
                           stream is found broken before the round stalls
    deaf NAME              no data goes to it or from it, and no stream is found broken
    calls NAME NAMES       it waits for these as the founders of a run
    ask NAME N             rounds are to need so many trainers
    lose KIND [to NAME]    the next message of this kind is lost
    flip NAME              a memory error in its state
    stuck NAME             what it downloads does not come to an end
    mute NAME              its heartbeats are lost, and nothing else
    digests NAME 0.3s      so long after each commit it knows the digest of its new state
    asynchronous N         rounds are of those who have submitted, but begin with N trainers
    when NAME reducing|ready
    until round N          everyone alive has applied it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from harness.cluster import Cluster, peer_id, short
from harness.faults import busy_with, lose, when_held
from harness.host import Host

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.view import Rules
from atoll.peer.membership.witness_owners import Work

__all__ = ["FOLDER", "Script", "play", "split"]

FOLDER = Path(__file__).parents[1] / "scenarios"
LINE = "-" * 20
# A view shows as "installed".
LEFT_OUT = ("Heartbeat", "CoordinatorBeat", " trainer: ", "ProbeView", " note view: ")
WAIT_S = 60.0
INNER_S = 0.5  # few rounds in a transcript
SILENT_STREAM_S = 10.0  # until the shell gives a stream up on which nothing moves
REPEAT_S = 0.7  # the same message again so soon is left out: BEGIN, votes and JOIN are repeated


def split(text: str) -> tuple[str, str]:
    """Script and transcript of a scenario's file."""
    head, _, transcript = text.partition(LINE + "\n")
    return head, transcript


def play(head: str) -> str:
    """The transcript that this script has."""
    script = Script()
    for line in head.splitlines():
        words = line.split("#")[0].split()
        if words:
            getattr(script, f"do_{words[0]}")(*words[1:])
    return script.transcript()


class Script:
    """One method per verb."""

    def __init__(self) -> None:
        self.cluster = Cluster("")
        self.names = ""
        self.terms: ms.Terms | None = None
        self._from = 0

    def transcript(self) -> str:
        shown = []
        for line in self.cluster.trace[self._from :]:
            if "note held" in line or not any(left_out in line for left_out in LEFT_OUT):
                shown.append(line)
        return "\n".join(_collapsed(shown, self.names)) + "\n"

    def do_hosts(self, *names: str) -> None:
        for name in names:
            peer, _, role = name.partition(":")
            self.cluster.add(peer, role or "replica")
            if self.terms is not None and role in ("", "replica"):
                self.cluster.give(peer, ev.Configured("spec", 1, 1, self.terms))
            self.names += peer

    def do_outbound(self, names: str) -> None:
        self.cluster.outbound |= {*names}

    def do_nolink(self, a: str, b: str) -> None:
        self.cluster.unlinkable.add(frozenset((peer_id(a), peer_id(b))))

    def do_averages(self) -> None:
        self.terms = ms.Terms(work=Work((4,), 1, "float32"))

    def do_asynchronous(self, trainers: str) -> None:
        self.terms = ms.Terms(min_trainers=int(trainers), asynchronous=True)

    def do_relays(self, names: str, carries: str = "") -> None:
        self.cluster.relays |= {name: name in carries for name in names}

    def do_unreachable(self, name: str) -> None:
        self.cluster.give(name, ev.Reach(outbound=True))

    def do_unlink(self, a: str, b: str) -> None:
        """The link is gone, and cannot be made."""
        self.do_nolink(a, b)
        for here, there in ((a, b), (b, a)):
            self.cluster.give(here, ev.LinkDown(peer_id(there), "reset"))

    def do_relink(self, a: str, b: str) -> None:
        self.cluster.unlinkable.discard(frozenset((peer_id(a), peer_id(b))))
        self.cluster.link(a, b)

    def do_soon(self, duration: str) -> None:
        self.cluster.timing = replace(
            self.cluster.timing, better_s=float(duration.removesuffix("s"))
        )

    def do_rules(
        self, policy: str, on_lost: str = "halt", on_fork: str = "auto", min_trainers: str = "0"
    ) -> None:
        self.cluster.rules = Rules(policy, on_lost, on_fork, int(min_trainers))

    def do_ask(self, name: str, count: str) -> None:
        self.cluster.give(name, ev.TrainersAsked(int(count)))

    def do_form(self) -> None:
        self.cluster.form(self.names)
        for host in self.cluster.living():
            host.inner_s = INNER_S
        number = self.cluster.committed + 1
        self.cluster.until(lambda: all(h.round == number for h in self.cluster.living()))
        self.do_quiet()

    def do_quiet(self) -> None:
        self._from = len(self.cluster.trace)

    def do_run(self, duration: str) -> None:
        self.cluster.run(float(duration.removesuffix("s")))

    def do_when(self, name: str, what: str) -> None:
        cluster = self.cluster
        conditions: dict[str, Callable[[], bool]] = {
            "reducing": busy_with(cluster, name),
            "ready": when_held(cluster, name),
        }
        cluster.until(conditions[what], WAIT_S)

    def do_until(self, what: str, number: str) -> None:
        assert what == "round"
        goal = int(number)
        self.cluster.until(lambda: all(self._is_at(h, goal) for h in self.cluster.living()), WAIT_S)

    def _is_at(self, host: Host, goal: int) -> bool:
        return host.node.view is not None and host.round >= goal

    def do_kill(self, name: str) -> None:
        self.cluster.kill(name)

    def do_off(self, name: str) -> None:
        self.cluster.host(name).off = True
        self.cluster.host(name).alive = False

    def do_pause(self, name: str) -> None:
        self.cluster.pause(name)

    def do_resume(self, name: str) -> None:
        self.cluster.resume(name)

    def do_restart(self, name: str) -> None:
        self.cluster.restart(name)

    def do_leave(self, name: str) -> None:
        self.cluster.leave(name)

    def do_detach(self, name: str) -> None:
        self.cluster.detach(name)

    def do_train(self, name: str) -> None:
        self.cluster.train(name)

    def do_join(self, name: str) -> None:
        self.cluster.add(name)
        for host in self.cluster.living():
            if host.name != name:
                self.cluster.link(name, host.name)
        self.cluster.train(name)
        self.names += name

    def do_cut(self, a: str, b: str) -> None:
        self.cluster.cut.add(frozenset((peer_id(a), peer_id(b))))

    def do_bridge(self, here: str, there: str) -> None:
        self.cluster.broken_s = SILENT_STREAM_S
        for a in here:
            for b in there:
                self.do_cut(a, b)

    def do_deaf(self, name: str) -> None:
        """Cut its data both ways: it hears what others say, and nobody finds out why."""
        self.cluster.broken_s = SILENT_STREAM_S
        for other in self.names:
            if other != name:
                self.cluster.data_cut.add(frozenset((peer_id(name), peer_id(other))))

    def do_calls(self, name: str, names: str) -> None:
        founders = tuple(self.cluster.address(other, 1) for other in names)
        self.cluster.give(name, ms.BootstrapConfig(founders=founders))

    def do_oneway(self, a: str, b: str) -> None:
        self.cluster.one_way.add((peer_id(a), peer_id(b)))

    def do_isolate(self, *names: str) -> None:
        self.cluster.isolate(names)

    def do_heal(self) -> None:
        self.cluster.heal()

    def do_lose(self, kind: str, to: str = "", name: str = "") -> None:
        assert to in ("", "to")
        lose(self.cluster, getattr(ms, kind), name, 1)

    def do_stuck(self, name: str) -> None:
        self.cluster.stuck = lambda host, _donor: host.name == name

    def do_mute(self, name: str) -> None:
        before = self.cluster.hold
        beats = ms.Heartbeat | ms.SameBeat

        def hold(source: bytes, peer: bytes, message: object) -> bool:
            is_lost = source == peer_id(name) and isinstance(message, beats)
            return is_lost or before(source, peer, message)

        self.cluster.hold = hold

    def do_digests(self, name: str, duration: str) -> None:
        self.cluster.host(name).digest_s = float(duration.removesuffix("s"))

    def do_flip(self, name: str) -> None:
        self.cluster.host(name).flipped = b"one bit"


def _collapsed(lines: list[str], names: str) -> list[str]:
    """Times from the script's first line; one line for a message to several; no repetitions."""
    if not lines:
        return []
    start_s = float(lines[0].split()[0])
    kept: list[tuple[float, str, str, str]] = []  # time, source, targets, text
    last_s: dict[tuple[str, str], float] = {}
    for line in lines:
        when, what = line.split(maxsplit=1)
        for name in names:
            what = what.replace(short(peer_id(name)), name)
        now_s, (first, _, text) = float(when) - start_s, what.partition(" ")
        source, arrow, target = first.partition("->")
        repeats = arrow and now_s - last_s.get((first, text), -REPEAT_S) < REPEAT_S
        last_s[first, text] = now_s
        if repeats:
            continue
        if arrow and kept and kept[-1][2] and (now_s, source, text) == (*kept[-1][:2], kept[-1][3]):
            target = kept.pop()[2] + target
        kept.append((now_s, source, target, text))
    return [
        f"{now_s:7.3f} {source}{'->' if target else ''}{target} {text}"
        for now_s, source, target, text in kept
    ]


def rewrite() -> None:
    for path in sorted(FOLDER.glob("*.txt")):
        head, _ = split(path.read_text("utf-8"))
        path.write_text(head + LINE + "\n" + play(head), "utf-8")
        print(path.name)


if __name__ == "__main__":
    rewrite()
