"""`atoll run`: a daemon and a script as one; it starts, restarts and ends both in order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.grids import rest_is_slow
from harness.metadata_server import MetadataServer
from harness.processes import DAEMON, Fleet, Process, fleet, until
from harness.supervised import SYNC_EVERY, joining, round_begins, supervise, trains

from atoll.peer.net.invite import Invite

PYTHON = (sys.executable, "-c")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Fleet]:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so would what starts here
    with fleet(tmp_path) as made:
        yield made


# ---------------------------------------------------------------- a script that ends, or dies


def test_a_script_that_is_done_leaves_the_run_in_order(run: Fleet) -> None:
    run.up("a")
    told = "import os, json; print(json.dumps({'home': os.environ['ATOLL_HOME']}))"
    peer = supervise(run, "b", *joining(run), command=(*PYTHON, told))
    assert peer.ends() == 0
    assert peer.last("home") == str(peer.home)
    assert "left the run" in peer.text
    assert peer.said == ["atoll run: the script is done"]
    run.sees("a", 1)


def test_a_script_that_dies_is_started_again_and_each_time_said(run: Fleet) -> None:
    flag = run.folder / "lives"
    dies = (
        "import os, sys, pathlib\n"
        f"flag = pathlib.Path({str(flag)!r})\n"
        "lives = int(flag.read_text()) + 1 if flag.exists() else 1\n"
        "flag.write_text(str(lives))\n"
        "if lives == 1: os.kill(os.getpid(), 9)\n"
        "sys.exit(0 if lives == 3 else 4)"
    )
    peer = supervise(run, "a", "--run", "demo", command=(*PYTHON, dies))
    assert peer.ends() == 0
    assert flag.read_text() == "3"
    lines = peer.said
    assert len(lines) == 3
    assert re.search(r"the script was killed by SIGKILL after .* in 1 s \(restart 1 of", lines[0])
    assert re.search(r"the script ended with exit code 4 after .* in 2 s \(restart 2 of", lines[1])


def test_restarts_have_a_limit_and_the_exit_code_is_the_script_s(run: Fleet) -> None:
    command = (*PYTHON, "import sys; sys.exit(7)")
    peer = supervise(run, "a", "--run", "demo", "--restarts", "1", command=command)
    assert peer.ends() == 7
    assert "after 1 restart within 60 min: giving up" in peer.text
    assert "left the run" in peer.text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "--run", "demo"), "no training script is given"),
        (("run", "--", "python"), "no run is named"),
        (("run", "--run", "demo", "--join", "x", "--", "python"), "--run and --join are given"),
        (("run", "--run", "demo", "--", "no-such-command"), "no command 'no-such-command'"),
        (
            ("run", "--run", "demo", "--notice-url", "http://x", "--", "python"),
            "without --on-notice",
        ),
        (("run", "--join", "INVITE", "--policy", "any", "--", "python"), "--policy is for --run"),
        (("run", "--run", "demo", "--nonsense", "--", "python"), "unrecognized arguments"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_started(
    words: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    invite = tmp_path / "invite"
    invite.write_text("atoll://127.0.0.1:1/demo#" + 60 * "a")
    given = [str(invite) if word == "INVITE" else word for word in words]
    at = given.index("--") if "--" in given else len(given)
    line = [*given[:at], "--home", str(tmp_path / "home"), *given[at:]]
    done = subprocess.run([sys.executable, *DAEMON, *line], capture_output=True, text=True)
    assert done.returncode == 2
    assert re.search(says, done.stderr), done.stderr
    assert not (tmp_path / "home").exists()


def test_a_second_daemon_of_one_home_is_refused(run: Fleet) -> None:
    home = run.up("a").home
    peer = supervise(run, "b", "--run", "demo", "--home", str(home), command=(*PYTHON, ""))
    assert peer.ends() == 2
    assert "ATOLL-E11" in peer.text


def test_a_daemon_that_cannot_be_helped_ends_with_its_code(run: Fleet) -> None:
    invite = Invite.parse(run.up("a").invite)
    wrong = Invite(invite.host, invite.port, invite.run, invite.fingerprint, b"x" * 32)
    (run.folder / "invite").write_text(str(wrong))
    command = (*PYTHON, "import time; time.sleep(600)")
    peer = supervise(run, "b", "--invite-file", str(run.folder / "invite"), command=command)
    assert peer.ends() == 11
    assert "ATOLL-E21" in peer.text
    assert "the daemon ended with exit code 11, and to start it again would not help" in peer.text


# ---------------------------------------------------------------- signals


def test_the_steps_of_a_trainer_that_is_told_to_end_count_as_they_are(run: Fleet) -> None:
    """The survivor's parameters move by the mean of what both have done, weighed by steps.

    Rounds of 4 s: trainers of a busy machine are waited for, three times as long.
    """
    run.up("a")
    log = run.folder / "trainer-a.log"
    stays = Process(list(trains(step_s=0.1)), log, ATOLL_HOME=str(run.peers["a"].home))
    run.trainers["a"] = stays
    peer = supervise(run, "b", *joining(run), command=trains(step_s=0.1))
    until(lambda: peer.last("round") and peer.last("since") == 10, "it trains", peer, stays)
    peer.kill(signal.SIGTERM)
    assert peer.ends() == 0
    assert "left the run" in peer.text
    found = re.search(r"SIGTERM: its last (\d+) local steps counted in round (\d+)", peer.text)
    assert found is not None, peer.text
    steps, number = int(found[1]), int(found[2])
    assert 10 <= steps < SYNC_EVERY
    until(lambda: stays.lines[-1].get("round", 0) > number, "the other goes on", stays)
    begins = round_begins(stays)
    moved = begins[number - 1] - begins[number]
    mean = (SYNC_EVERY**2 + steps**2) / (SYNC_EVERY + steps)
    assert moved == pytest.approx(mean, rel=1e-4)
    assert run.sees("a", 1)


@pytest.mark.parametrize("number", rest_is_slow([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], 1))
def test_a_run_of_one_goes_on_where_a_signal_has_ended_it(run: Fleet, number: int) -> None:
    options = ("--run", "demo")
    peer = supervise(run, "a", *options, command=trains())
    peer.takes_steps(5)
    peer.kill(number)
    assert peer.ends() == 0
    found = re.search(r"local steps? counted in round (\d+)", peer.text)
    assert found is not None, peer.text
    assert "it ends without leaving" in peer.text
    again = supervise(run, "a", *options, command=trains(rounds=int(found[1]) + 1))
    assert again.ends() == 0
    assert again.last("attached") == int(found[1])
    assert "left the run" in again.text  # a script that is done has no reason to come back


@pytest.mark.parametrize(
    "method", rest_is_slow(["streaming", "co2", "eager", "async", "noloco"], 2)
)
def test_every_method_hands_in_what_it_has(run: Fleet, method: str) -> None:
    peer = supervise(run, "a", "--run", "demo", command=trains(method))
    peer.is_at_round(1 if method == "noloco" else 3)
    peer.takes_steps(3)
    peer.kill(signal.SIGTERM)
    assert peer.ends() == 0
    outcome = {
        "async": r"local steps? counted in round",
        "noloco": r"\d+ local steps? in the middle of outer step \d+ are lost",
    }.get(method, r"(\d) of \1 submissions? counted")
    assert re.search(f"SIGTERM: .*{outcome}.*; this script ends", peer.text), peer.text


def test_a_peer_that_keeps_its_place_comes_back_into_it(run: Fleet) -> None:
    run.form("abc")
    command = (*PYTHON, "import time\nprint('ready', flush=True)\ntime.sleep(600)")
    peer = supervise(run, "d", *joining(run), "--on-term", "keep", command=command)
    run.sees("a", 4)
    until(lambda: "ready" in peer.text, "the script runs", peer)
    peer.kill(signal.SIGTERM)
    assert peer.ends() == 0
    assert "left the run" not in peer.text
    again = supervise(run, "d", *joining(run), "--on-term", "keep", command=command)
    until(lambda: "back in run demo" in again.text, "it is back", again)
    run.sees("a", 4)


def test_options_come_from_the_environment_too_and_flags_count_more(run: Fleet) -> None:
    """An invite that a container gets is on no command line, and the daemon finds the rest."""
    invite = run.up("a").invite
    environment = {"ATOLL_INVITE": invite, "ATOLL_ON_TERM": "keep", "ATOLL_GRACE_S": "20"}
    command = (*PYTHON, "import time\nprint('ready', flush=True)\ntime.sleep(600)")
    peer = supervise(run, "b", command=command, **environment)
    run.sees("a", 2)
    until(lambda: "ready" in peer.text, "the script runs", peer)
    peer.kill(signal.SIGTERM)
    assert peer.ends() == 0
    assert "within 20 s" in peer.said[0]
    assert "keeps its place" in peer.said[1]
    own = supervise(run, "c", "--run", "other", command=(*PYTHON, ""), **environment)
    assert own.ends() == 0
    assert "of run other" in own.text


def test_what_would_begin_a_run_anew_at_each_restart_has_to_be_a_flag(run: Fleet) -> None:
    environment = {"ATOLL_FORCE_NEW_LINEAGE": "1"}
    peer = supervise(run, "a", "--run", "demo", command=(*PYTHON, ""), **environment)
    assert peer.ends() == 2
    assert "force-new-lineage stands in ATOLL_FORCE_NEW_LINEAGE" in peer.text


def test_a_second_signal_kills_both(run: Fleet) -> None:
    command = (
        *PYTHON,
        "import signal, time\nsignal.signal(15, lambda *_: print('told', flush=True))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(1)",
    )
    peer = supervise(run, "a", "--run", "demo", command=command)
    until(lambda: "ready" in peer.text, "the script runs", peer)
    daemon = peer.children()["daemon"]
    peer.kill(signal.SIGTERM)
    until(lambda: "told" in peer.text, "the script is told", peer)
    peer.kill(signal.SIGTERM)
    assert peer.ends() == 130
    until(lambda: not Path(f"/proc/{daemon}").exists(), "the daemon has ended")


def test_a_script_that_does_not_end_is_killed_and_the_daemon_leaves(run: Fleet) -> None:
    run.up("a")
    command = (
        *PYTHON,
        "import signal, time, os\nsignal.signal(15, signal.SIG_IGN)\n"
        "print('ready', flush=True)\nwhile True: time.sleep(1)",
    )
    options = (*joining(run), "--grace-s", "8")
    peer = supervise(run, "b", *options, command=command)
    until(lambda: "ready" in peer.text, "the script runs", peer)
    run.sees("a", 2)
    peer.kill(signal.SIGTERM)
    assert peer.ends() == 137
    assert "the script has not ended in time: killing it" in peer.text
    assert "left the run" in peer.text


def test_a_handler_of_the_script_s_own_is_left_alone(run: Fleet) -> None:
    peer = supervise(run, "a", "--run", "demo", command=trains("diloco", "own"))
    peer.takes_steps(3)
    peer.kill(signal.SIGTERM)
    assert peer.ends() == 0  # everything has ended in order, as it was told to
    assert peer.last("own") is True
    assert "counted" not in peer.text


def test_a_loop_can_end_by_itself_after_it_has_handed_in(run: Fleet) -> None:
    peer = supervise(run, "a", "--run", "demo", command=trains("diloco", "stays"))
    peer.takes_steps(3)
    peer.kill(signal.SIGTERM)
    assert peer.ends() == 0
    assert re.search(r"SIGTERM: its last \d+ local steps counted in round \d+\n", peer.text)
    assert peer.last("left") is True


def test_what_a_loop_saves_when_it_leaves_is_there_when_it_comes_back(run: Fleet) -> None:
    for said in ("nothing is saved in ", "this trainer goes on with the same bits"):
        peer = supervise(run, "a", "--run", "demo", command=trains("co2", "saves"))
        peer.takes_steps(3)
        peer.kill(signal.SIGTERM)
        assert peer.ends() == 0
        assert said in peer.text
        assert peer.last("left") is True


def test_steps_whose_round_does_not_come_in_time_are_lost_and_that_is_said(run: Fleet) -> None:
    options = ("--run", "demo", "--min-trainers", "2")
    peer = supervise(run, "a", *options, command=trains("diloco", "hurries"))
    peer.takes_steps(3)
    peer.kill(signal.SIGTERM)
    assert peer.ends() == 0
    # Within one second in all, of which handing them in takes a part.
    lost = r"SIGTERM: its steps since the last round are lost: no commit for (1 s|\d+ ms)"
    assert re.search(lost, peer.text), peer.text
    assert peer.last("left") is True


def test_signals_to_all_processes_of_a_job_end_the_script_first(run: Fleet) -> None:
    """As Slurm and systemd's default send them: the daemon does not go by itself."""
    peer = supervise(run, "a", "--run", "demo", command=trains())
    peer.takes_steps(3)
    for pid in (peer.children()["daemon"], peer.last("pid"), peer.pid):
        os.kill(pid, signal.SIGTERM)
    assert peer.ends() == 0
    assert re.search(r"local steps counted in round", peer.text), peer.text
    assert "`atoll run` says when to leave" in peer.text


def test_a_shell_around_the_script_does_not_cost_its_steps(run: Fleet) -> None:
    line = " ".join(map(repr, trains()))
    peer = supervise(run, "a", "--run", "demo", command=("sh", "-c", f"{line}; echo after"))
    peer.takes_steps(3)
    peer.kill(signal.SIGTERM)
    assert peer.ends() == 0
    assert re.search(r"local steps counted in round", peer.text), peer.text


def test_what_a_script_has_started_ends_with_it(run: Fleet) -> None:
    starts = (
        "import json, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'child': child.pid}), flush=True)\nsys.exit(5)"
    )
    peer = supervise(run, "a", "--run", "demo", "--restarts", "0", command=(*PYTHON, starts))
    assert peer.ends() == 5
    assert not Path(f"/proc/{peer.last('child')}").exists()


# ---------------------------------------------------------------- a daemon that dies


def test_a_daemon_that_dies_comes_back_and_the_run_goes_on(run: Fleet) -> None:
    peer = supervise(run, "a", "--run", "demo", command=trains())
    peer.is_at_round(2)
    os.kill(peer.children()["daemon"], signal.SIGKILL)
    until(lambda: "the daemon was killed by SIGKILL" in peer.text, "it is noticed", peer)
    before = peer.last("round")
    until(lambda: (peer.last("round") or 0) > before + 1, "rounds go on", peer)
    assert sum("the daemon was killed" in line for line in peer.said) == 1
    assert "back in run demo" in peer.text
    peer.kill(signal.SIGTERM)
    assert peer.ends() == 0


def test_a_daemon_ends_with_an_atoll_run_that_is_killed(run: Fleet) -> None:
    command = (*PYTHON, "import time\nprint('ready', flush=True)\ntime.sleep(600)")
    peer = supervise(run, "a", "--run", "demo", command=command)
    until(lambda: "ready" in peer.text, "the script runs", peer)
    children = peer.children()
    peer.kill(signal.SIGKILL)
    try:
        until(lambda: not Path(f"/proc/{children['daemon']}").exists(), "it is gone", peer)
        assert "`atoll run` is gone, and so this daemon ends" in peer.text
        assert "stopped; its place in run demo is kept" in peer.text
    finally:
        os.kill(children["script"], signal.SIGKILL)  # it would wait for a daemon to come back


def test_a_script_does_not_outlive_an_atoll_run_that_is_killed(run: Fleet) -> None:
    """It would be in the way of the next one's."""
    peer = supervise(run, "a", "--run", "demo", command=trains())
    peer.takes_steps(3)
    script = peer.last("pid")
    peer.kill(signal.SIGKILL)
    until(lambda: not Path(f"/proc/{script}").exists(), "it is gone", peer)
    assert "and so was the `atoll run` that has started this script" in peer.text


def test_a_daemon_that_is_told_to_leave_ends_the_script_too(run: Fleet) -> None:
    command = (*PYTHON, "import time\nprint('ready', flush=True)\ntime.sleep(600)")
    peer = supervise(run, "a", "--run", "demo", command=command)
    until(lambda: "ready" in peer.text, "the script runs", peer)
    line = [sys.executable, *DAEMON, "leave", "--home", str(peer.home)]
    assert subprocess.run(line, capture_output=True, timeout=30).returncode == 0
    assert peer.ends() == 0
    assert "the daemon has left the run" in peer.text


@pytest.mark.parametrize("options", [(), ("stays",)])
def test_a_trainer_whose_daemon_is_told_to_leave_does_not_wait_for_the_next(
    run: Fleet, options: tuple[str, ...]
) -> None:
    peer = supervise(run, "a", "--run", "demo", command=trains("diloco", *options))
    peer.takes_steps(3)
    line = [sys.executable, *DAEMON, "leave", "--home", str(peer.home)]
    assert subprocess.run(line, capture_output=True, timeout=30).returncode == 0
    assert peer.ends() == 0  # and was not killed, which gives 137
    assert "its steps since the last round are lost" in peer.text
    assert "Traceback" not in peer.text
    assert peer.last("left") is (True if options else None)


# ---------------------------------------------------------------- notices


@pytest.mark.parametrize("cloud", rest_is_slow(["aws", "gcp", "azure"], 1))
def test_a_notice_of_the_cloud_ends_everything_in_order(run: Fleet, cloud: str) -> None:
    with MetadataServer() as server:
        options = ("--run", "demo", "--on-notice", cloud, "--notice-url", server.url)
        peer = supervise(run, "a", *options, command=trains())
        peer.takes_steps(3)
        assert peer.popen.poll() is None
        server.gone_s = time.time() + 100.0
        assert peer.ends() == 0
    name = {"aws": "AWS is to terminate", "gcp": "GCP preempts", "azure": "Azure has scheduled"}
    assert name[cloud] in peer.said[0]
    assert re.search(r"local steps? counted in round", peer.text), peer.text


# ---------------------------------------------------------------- ranks


@pytest.mark.slow
def test_all_ranks_of_torchrun_leave_after_the_same_step(run: Fleet) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    peer = supervise(run, "a", "--run", "demo", command=(*torchrun, *trains()[1:]))
    peer.is_at_round(2)
    peer.takes_steps(3)
    peer.kill(signal.SIGTERM)
    assert peer.ends() == 0
    assert re.search(r"local steps? counted in round", peer.text), peer.text
