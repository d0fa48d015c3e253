"""What a signal does to a trainer that is to leave in order, and to handlers of a script's own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError, DaemonLostError
from atoll.optim import DiLoCo, GradientAverage, NoLoCo, Population, Swarm
from atoll.optim.leaving import Leaving, supervised_leaving
from atoll.optim.swarm import SwarmSession
from atoll.peer.client.supervised import SUPERVISOR_VARIABLE

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


@pytest.fixture(autouse=True)
def as_they_were() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (TERM, INT, USR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def nobody(_wait_s: float) -> None:
    """Hear how long a daemon is waited for; there is none here."""


def test_a_signal_is_noted_and_the_handler_before_is_called_and_put_back() -> None:
    called: list[int] = []

    def own(number: int, frame: object) -> None:
        called.append(number)

    signal.signal(TERM, own)
    leaving = Leaving((TERM, USR1), 20.0, nobody, exits=True)
    assert leaving.asked == ""
    signal.raise_signal(USR1)
    assert leaving.asked == "SIGUSR1"
    signal.raise_signal(TERM)
    signal.raise_signal(TERM)
    assert called == [TERM, TERM]
    assert leaving.asked == "SIGUSR1"  # the first that came
    leaving.close()
    assert signal.getsignal(TERM) is own
    assert signal.getsignal(USR1) == signal.SIG_DFL


def test_the_second_ctrl_c_interrupts_as_it_always_did() -> None:
    leaving = Leaving((INT,), 20.0, nobody, exits=True)
    signal.raise_signal(INT)
    assert leaving.asked == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(INT)


def test_a_handler_that_came_later_is_not_taken_away() -> None:
    leaving = Leaving((TERM,), 20.0, nobody, exits=True)
    signal.signal(TERM, signal.SIG_IGN)
    leaving.close()
    assert signal.getsignal(TERM) == signal.SIG_IGN


def test_another_thread_closes_it_and_the_next_signal_does_what_it_did_before() -> None:
    called: list[int] = []

    def own(number: int, frame: object) -> None:
        called.append(number)

    signal.signal(TERM, own)
    leaving = Leaving((TERM,), 20.0, nobody, exits=True)
    failed: list[BaseException] = []

    def closes() -> None:
        try:
            leaving.close()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=closes)
    thread.start()
    thread.join()
    assert not failed
    signal.raise_signal(TERM)
    assert called == [TERM]
    assert leaving.asked == ""
    assert signal.getsignal(TERM) is own


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("is_main", [True, False])
def test_a_forked_child_ends_by_a_signal_as_it_always_did(is_main: bool) -> None:
    """As workers of a DataLoader have to, and those of a multiprocessing.Pool."""
    leaving = Leaving((TERM, INT), 20.0, nobody, exits=True)
    found: list[int] = []

    def forks() -> None:
        child = os.fork()
        if child == 0:
            handlers = signal.getsignal(TERM), signal.getsignal(INT)
            os._exit(handlers != (signal.SIG_DFL, signal.default_int_handler))
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    if is_main:
        forks()
    else:
        thread = threading.Thread(target=forks)
        thread.start()
        thread.join()
    assert found == [0]
    signal.raise_signal(TERM)
    assert leaving.asked == "SIGTERM"  # here it still counts
    leaving.close()


def test_it_needs_the_main_thread() -> None:
    found: list[ConfigError] = []

    def elsewhere() -> None:
        try:
            Leaving((TERM,), 20.0, nobody, exits=True)
        except ConfigError as error:
            found.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(found) == 1


def test_scripts_without_handlers_leave_in_order_in_atoll_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert supervised_leaving(nobody) is None
    monkeypatch.setenv(SUPERVISOR_VARIABLE, "1")
    waits_s: list[float] = []
    leaving = supervised_leaving(waits_s.append)
    assert leaving is not None
    signal.raise_signal(TERM)
    assert leaving.asked == "SIGTERM"
    assert waits_s == [0.0]  # nobody starts the daemon again
    leaving.close()
    signal.signal(TERM, lambda *_: None)
    assert supervised_leaving(nobody) is None  # it has a handler of its own


def test_methods_of_every_step_have_nothing_to_hand_in() -> None:
    def train(session: SwarmSession) -> None:
        model = nn.Linear(4, 4)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = GradientAverage(model, inner, session)
        with pytest.raises(ConfigError, match="there are no steps to hand in"):
            outer.leave_on_signal()

    Swarm(1).run(train)


@pytest.mark.parametrize("exits", [False, True])
def test_a_daemon_that_has_gone_first_is_said_and_no_error(
    capsys: pytest.CaptureFixture[str], exits: bool
) -> None:
    def train(session: SwarmSession) -> None:
        model = nn.Linear(4, 4)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = DiLoCo(model, inner, 4, session)

        def check() -> None:
            raise DaemonLostError("the daemon has gone")

        session.channel.check = check  # type: ignore[method-assign]
        leaving: Any = SimpleNamespace(asked="SIGTERM", wait_s=1.0, exits=exits, close=list)
        outer._leaving = leaving
        if exits:
            with pytest.raises(SystemExit, match="0"):
                inner.step()
        else:
            inner.step()
        assert outer.has_left

    Swarm(1).run(train)
    said = capsys.readouterr().err
    assert "SIGTERM: its steps since the last round are lost: the daemon has gone" in said


Make = Callable[[nn.Module, torch.optim.Optimizer, SwarmSession], Any]


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (
            lambda m, i, s: NoLoCo(m, i, 4, s),
            "2 local steps in the middle of outer step 2 are lost",
        ),
        (
            lambda m, i, s: Population(m, i, s, lambda: 0.0, 4, {"lr": (0.01, 1.0)}),
            "2 local steps after turn 1 are lost",
        ),
    ],
)
def test_steps_that_can_be_handed_to_nobody_are_counted(
    capsys: pytest.CaptureFixture[str], make: Make, lost: str
) -> None:
    def train(session: SwarmSession) -> None:
        model = nn.Linear(4, 4)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = make(model, inner, session)
        for number in range(6):
            if number == 5:
                leaving: Any = SimpleNamespace(asked="SIGTERM", wait_s=1.0, exits=False, close=list)
                outer._leaving = leaving
            model(torch.ones(1, 4)).sum().backward()
            inner.step()
        assert outer.has_left

    Swarm(1).run(train)
    assert f"SIGTERM: {lost}" in capsys.readouterr().err


def test_a_worker_of_a_swarm_has_no_signals() -> None:
    def train(session: SwarmSession) -> None:
        model = nn.Linear(4, 4)
        outer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), 4, session)
        with pytest.raises(ConfigError, match="the main thread alone"):
            outer.leave_on_signal()

    Swarm(1).run(train)
