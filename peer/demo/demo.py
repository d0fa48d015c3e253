"""Run `atoll demo`: real peers on this machine train, lose one, gain another, and are judged.

The script reads from top to bottom in ``Demo.run``. Between its lines ``_tick`` runs four times a
second: it asks every daemon for its status, looks after every process and redraws the view. So
every wait shows what it waits for, ends at the deadline, and ends at once when a process dies that
should not, or when the user interrupts.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.collectives.errors import AtollError, ConfigError, DaemonLostError
from atoll.peer.client.ipc_client import ask
from atoll.peer.demo.figures import DemoFigures, Happening, ProcessEnding
from atoll.peer.demo.peers import Child, DemoPeer, end_all
from atoll.peer.demo.summary import LEAVE_MAX_S, ORPHANED_MAX_S, checks, summary
from atoll.peer.demo.text import load_text
from atoll.peer.demo.view import DemoDisplay, make_view

RUN = "demo"
SYNC_EVERY = 40  # local steps per round
PEERS_MAX = 16  # each is two processes, with 0.4 GB of memory together
ROUNDS_MIN = 2  # round 1 of a run only hands out the initial parameters
POLL_S = 0.25
DEADLINE_S = 170.0  # of 3 peers and 24 rounds; more of either get more
DEADLINE_PEERS, DEADLINE_ROUNDS = 3, 24
START_MAX_S = 30.0  # a daemon answers within a second on an idle machine
MARGIN_ROUNDS = 2  # after the newcomer's first: nobody can be past a round that is named so early
TAIL_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    peers: int = 3
    rounds: int = 24
    data: str | None = None  # absolute, folder of UTF-8 text; None: the Python library's source
    chaos: bool = True
    plain: bool = False


def run_demo(options: DemoOptions) -> int:
    """Run the demo; return 0 if everything was as it must be, 1 if not.

    Raises the errors of collectives/errors.py.
    """
    _check(options)
    with _signals() as interrupted:
        folder = Path(tempfile.mkdtemp(prefix="atoll-demo-"))
        demo = Demo(options, folder, make_view(plain=options.plain), interrupted)
        try:
            return demo.run()
        finally:
            try:
                demo.close()
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if interrupted:
                print("atoll demo: interrupted; all its processes have ended", file=sys.stderr)


def _check(options: DemoOptions) -> None:
    """Raise ConfigError or DataError for wrong options, before anything is started."""
    if not 1 <= options.peers <= PEERS_MAX:
        raise ConfigError(
            f"--peers is {options.peers}", fix=f"give a number of peers from 1 to {PEERS_MAX}"
        )
    if options.rounds < ROUNDS_MIN:
        raise ConfigError(
            f"--rounds is {options.rounds}",
            fix=f"give at least {ROUNDS_MIN}: round 1 only hands out the initial parameters",
        )
    load_text(Path(options.data) if options.data is not None else None)


class Demo:
    """Run one demo: its peers, its figures and its script."""

    def __init__(
        self, options: DemoOptions, folder: Path, view: DemoDisplay, interrupted: list[int]
    ) -> None:
        self._folder = folder
        self._data = options.data
        self._view = view
        self._interrupted = interrupted
        self._started_s = time.monotonic()
        scale = max(1.0, options.peers / DEADLINE_PEERS)
        self._limit_s = DEADLINE_S * scale * max(1.0, options.rounds / DEADLINE_ROUNDS)
        self._last_round_file = folder / "last-round"
        self._expected: dict[int, int] = {}  # pid -> exit code, of processes that may end now
        self.peers: list[DemoPeer] = []
        self.figures = DemoFigures(
            founders=options.peers,
            rounds=options.rounds,
            chaos=options.chaos and options.peers > 1,
            started_unix_s=time.time(),
        )
        if options.chaos and options.peers == 1:
            self._say("", "one peer alone: nobody is killed, because nobody would survive")

    # ------------------------------------------------------------ the script

    def run(self) -> int:
        """Run the script and return the exit code: 0 if all checks hold, 1 if not.

        Raises AtollError if it could not come to its end.
        """
        figures = self.figures
        try:
            self._start_founders()
            if figures.chaos:
                half = max(ROUNDS_MIN, figures.rounds // 2)
                self._until(
                    lambda: _all_reached(figures, half),
                    f"round {half}; then the first peer's daemon is killed",
                )
                self._kill_first()
                self._bring_newcomer()
            self._until(self._trainers_ended, "the trainers to finish")
            self._until(self._digests_known, "all daemons to say the final state's digest")
            self._leave()
        except AtollError:
            self._show_tails()
            raise
        figures.duration_s = time.monotonic() - self._started_s
        figures.doing = "done"
        self._view.show(figures, figures.duration_s)
        verdict = checks(figures)
        self._view.finish(summary(figures), verdict)
        return 0 if all(check.ok for check in verdict) else 1

    def _start_founders(self) -> None:
        for _ in range(self.figures.founders):
            self._add_peer()
        first, *others = self.peers
        first.start_daemon("up", "--run", RUN)
        for peer in self.peers:
            self._start_trainer(peer)  # it loads torch while the daemons meet
        self._until(lambda: first.status is not None, "the first daemon", START_MAX_S)
        self._say("join", f"{first.name} founds the run")
        invite = str(ask(first.home, "invite"))
        for peer in others:
            peer.start_daemon("join", invite=invite)
            self._say("join", f"{peer.name} joins by the invite of {first.name}")
        self._until(lambda: self.figures.round >= 1, "the first trainer's initial parameters")

    def _kill_first(self) -> None:
        victim, figures = self.peers[0], self.figures
        assert victim.daemon is not None
        assert victim.trainer is not None
        self._expected |= {
            victim.daemon.pid: -signal.SIGKILL,
            victim.trainer.pid: DaemonLostError.exit_code,
        }
        figures.killed_round = figures.round
        figures.killed_coordinator = victim.figures.state == "coordinator"
        victim.figures.killed = True  # from here on nobody asks it anything
        figures.killed_unix_s = time.time()
        victim.daemon.kill()
        role = "the coordinator" if figures.killed_coordinator else "a member"
        victim.figures.state = "killed"
        self._say("kill", f"SIGKILL to the daemon of {victim.name}, {role}")
        self._until(lambda: figures.committed_s is not None, "the survivors' next commit")
        self._say(
            "good", f"the survivors have committed, {figures.committed_s:.2f} s after the kill"
        )
        self._until(
            _has_ended(victim.trainer), f"the trainer of {victim.name} to notice", ORPHANED_MAX_S
        )

    def _bring_newcomer(self) -> None:
        figures = self.figures
        host = next(peer for peer in self.peers if not peer.figures.killed)
        figures.joined_round = figures.round
        peer = self._add_peer(newcomer=True)
        peer.start_daemon("join", invite=str(ask(host.home, "invite")))
        self._start_trainer(peer)
        self._say("join", f"{peer.name} is new and joins by an invite of {host.name}")
        self._until(lambda: peer.figures.round > 0, f"{peer.name} to have the state")
        self._say("join", f"{peer.name} has the state of round {peer.figures.round}")
        self._until(lambda: peer.figures.contributed > 0, f"the first contribution of {peer.name}")
        self._say("good", f"{peer.name} is part of round {figures.round}")
        last = max(figures.rounds, figures.round + MARGIN_ROUNDS)
        if last > figures.rounds:
            self._say("", f"the run goes on until round {last}, because {peer.name} came late")
        partial = self._last_round_file.with_suffix(".partial")
        partial.write_text(str(last), "ascii")
        partial.replace(self._last_round_file)

    def _trainers_ended(self) -> bool:
        return all(peer.figures.activity == "ended" for peer in self.peers)

    def _digests_known(self) -> bool:
        living = self.figures.living
        return len({peer.round for peer in living}) == 1 and all(peer.digest for peer in living)

    def _leave(self) -> None:
        """Let all peers leave in turn, so that each leave is a view change of the others."""
        for peer in self.peers:
            if peer.figures.killed or peer.daemon is None:
                continue
            daemon = peer.daemon
            started_s = time.monotonic()
            self._expected[daemon.pid] = 0
            peer.leaving = True
            ask(peer.home, "leave")
            # Twice the promise: the summary tells a slow leave from one that never ends.
            self._until(_has_ended(daemon), f"{peer.name} to leave", 2 * LEAVE_MAX_S)
            self.figures.left_s = max(self.figures.left_s, time.monotonic() - started_s)
            peer.figures.state = "left"
        for child in self._children():
            wanted = self._expected.get(child.pid, 0)
            self.figures.endings.append(ProcessEnding(child.name, wanted, child.code))

    # ------------------------------------------------------------ its parts

    def _add_peer(self, *, newcomer: bool = False) -> DemoPeer:
        peer = DemoPeer(len(self.peers) + 1, self._folder, newcomer=newcomer)
        self.peers.append(peer)
        self.figures.peers.append(peer.figures)
        return peer

    def _start_trainer(self, peer: DemoPeer) -> None:
        arguments = ["--rounds", str(self.figures.rounds), "--sync-every", str(SYNC_EVERY)]
        if self.figures.chaos:
            arguments += ["--last-round-file", str(self._last_round_file)]
        if self._data is not None:
            arguments += ["--data", self._data]
        peer.start_trainer(arguments)
        assert peer.trainer is not None
        self._expected[peer.trainer.pid] = 0

    def _until(self, reached: Callable[[], bool], what: str, limit_s: float = float("inf")) -> None:
        """Tick until ``reached()``. Raise AtollError when ``limit_s`` or the demo's time is up."""
        self.figures.doing = what
        since_s = time.monotonic()
        while not reached():
            self._tick()
            now_s = time.monotonic()
            if now_s - since_s > limit_s or now_s - self._started_s > self._limit_s:
                raise AtollError(
                    f"the demo waited {now_s - since_s:.0f} s for: {what}",
                    fix="fewer --peers or --rounds if this machine is busy; see the output above",
                )

    def _tick(self) -> None:
        time.sleep(POLL_S)
        if self._interrupted:
            if self._interrupted[0] == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + self._interrupted[0])
        for peer in self.peers:
            status = peer.ask_status() if not peer.figures.killed else None
            if status is not None:
                self.figures.observe(peer.figures, status)
            trainer = peer.trainer
            if trainer and trainer.code is not None and peer.figures.activity != "ended":
                self._on_trainer_end(peer, trainer)
        for child in self._children():
            code = child.code
            if code is not None and code != self._expected.get(child.pid):
                raise AtollError(f"the {child.name} ended with exit code {code}")
        self._view.show(self.figures, time.monotonic() - self._started_s)

    def _on_trainer_end(self, peer: DemoPeer, trainer: Child) -> None:
        peer.figures.activity = "ended"
        last = trainer.tail(4)
        if trainer.code == 0:  # the daemon forgets it, but its output repeats the last report
            report = next((line for line in reversed(last) if line.startswith("{")), "{}")
            self.figures.observe_metrics(peer.figures, json.loads(report))
        elif peer.figures.killed and self.figures.killed_unix_s is not None:
            self.figures.orphaned_s = time.time() - self.figures.killed_unix_s
            line = next((line for line in last if line.startswith("ATOLL-")), "without a word")
            self._say("error", f"trainer of {peer.name}: {line.replace(f'at {peer.home} ', '')}")

    def _children(self) -> list[Child]:
        return [child for peer in self.peers for child in peer.children]

    def _say(self, kind: str, text: str) -> None:
        at_s = time.monotonic() - self._started_s
        self.figures.happenings.append(Happening(at_s, kind, text))

    def _show_tails(self) -> None:
        """Print the ends of the logs, which are about to be removed."""
        self._view.close()
        for child in self._children():
            print(f"--- {child.name} (exit code {child.code})", file=sys.stderr)
            print("\n".join(child.tail(TAIL_LINES)), file=sys.stderr)

    def close(self) -> None:
        """Leave nothing behind. Harmless after a demo that came to its end."""
        try:
            end_all(self._children())
            for peer in self.peers:
                peer.remove_sockets()
        finally:
            self._view.close()  # after it, because a vanished terminal makes this fail


def _all_reached(figures: DemoFigures, number: int) -> bool:
    """Return whether the run has the round, with its loss, and every peer was part of one."""
    measured = max(figures.losses, default=0) >= number
    return measured and all(peer.contributed for peer in figures.peers)


def _has_ended(child: Child) -> Callable[[], bool]:
    return lambda: child.code is not None


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask for the end; the next tick acts on the first.

    An exception out of a handler could fall between a fork and the note of its pid.
    """
    numbers: list[int] = []
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda got, _frame: numbers.append(got)) for number in wanted
    }
    try:
        yield numbers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
