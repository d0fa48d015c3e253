"""Real daemons and trainers: training, joining, leaving, errors that a user meets."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import JOIN_LINE, Process, fleet, until

from atoll.peer.daemon.status import render
from atoll.peer.net.invite import Invite


@pytest.mark.parametrize("codec", ["int8", "int4_sr", "int2"])
def test_three_peers_train_and_agree_after_every_round(tmp_path: Path, codec: str) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name, codec=codec)
        for trainer in run.trainers.values():
            until(
                lambda trainer=trainer: (
                    sum(line.get("kind") == "committed" for line in trainer.lines) >= 10
                ),
                "everybody contributes",
                trainer,
            )
        assert run.agree("abc") >= 10


@pytest.mark.parametrize("names", ["abc", pytest.param("abcdefghijklmnop", marks=pytest.mark.slow)])
def test_within_a_machine_nothing_is_sent_to_measure_links(tmp_path: Path, names: str) -> None:
    elements, last = 2e5, 6
    with fleet(tmp_path) as run:
        run.form(names)
        for name in names:
            run.train(name, elements, rounds=last, inner_s=0.5)
        for name in names:
            run.peers[name].reaches(last)
        for name in names:
            status = run.peers[name].status()
            moved = status["bytes"]
            for way in ("sent", "received"):
                assert list(moved[way]) == ["rounds", "state", "probes", "control"]
                assert moved[way]["probes"] == 0
                assert moved[way]["rounds"] > 0
                assert moved[way]["control"] > 0
            assert all(member["you"] or member["local"] for member in status["members"])
            shown = render(status)
            assert "probes 0 B" in shown
            assert shown.count("on this machine") == len(names) - 1

        def total(way: str) -> dict[str, int]:
            each = [run.peers[name].status()["bytes"][way] for name in names]
            return {
                purpose: sum(found[purpose] for found in each) for purpose in ("rounds", "state")
            }

        # What one counts as sent the other counts as received, for the same purpose.
        until(lambda: total("sent") == total("received"), "nothing is under way")
        least = 4 * elements * (len(names) - 1)
        assert total("sent")["state"] >= least, "the first parameters, for all others"


def test_a_joiner_in_mid_run_gets_the_state_and_takes_part(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        for name in "ab":
            run.train(name)
        before = run.peers["a"].reaches(5)["round"]
        run.join("c")
        joined = run.peers["c"].reaches(before)
        assert joined["trainer"] is None  # a peer without a trainer follows and votes
        trainer = run.train("c")
        until(
            lambda: sum(line.get("kind") == "committed" for line in trainer.lines) >= 3,
            "the joiner contributes",
            trainer,
        )
        assert run.agree("abc") >= 3


@pytest.mark.parametrize(
    ("leaver", "number"),
    [
        pytest.param("a", signal.SIGINT, id="coordinator-SIGINT"),
        pytest.param("b", signal.SIGTERM, id="member-SIGTERM"),
        pytest.param("a", signal.SIGTERM, id="coordinator-SIGTERM", marks=pytest.mark.slow),
        pytest.param("b", signal.SIGINT, id="member-SIGINT", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_leaves_cleanly_in_under_five_seconds(
    tmp_path: Path, leaver: str, number: int
) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name)
        run.peers[leaver].reaches(3)
        run.peers[leaver].kill(number)
        assert run.peers[leaver].ends(5) == 0
        assert "left the run" in run.peers[leaver].text
        for name in "abc".replace(leaver, ""):
            status = run.sees(name, 2)
            run.peers[name].reaches(status["round"] + 2)


def test_leave_command_and_leaving_alone(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        peer = run.up("a")
        command = [sys.executable, "-m", "atoll.peer.cli", "leave", "--home", str(peer.home)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stdout) == (0, "left the run\n")
        assert peer.ends(5) == 0
        # The run ended with its last member: the same command may found it again.
        run.up("a")
        again = subprocess.run(command, capture_output=True, text=True, timeout=20)
        assert again.returncode == 0


def test_the_printed_join_line_works_verbatim(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        peer = run.up("a")
        line = JOIN_LINE.search(peer.text)
        assert line is not None
        words = shlex.split(line.group(1))
        assert words[:2] == ["atoll", "join"]
        atoll = Path(sys.executable).with_name("atoll")
        joiner = Process(
            [str(atoll), *words[1:]], tmp_path / "j.log", ATOLL_HOME=str(tmp_path / "j")
        )
        try:
            run.sees("a", 2)
        finally:
            joiner.kill(signal.SIGINT)
        assert joiner.ends(10) == 0


def test_a_restarted_daemon_rejoins_its_run(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name)
        number = run.peers["a"].reaches(3)["round"]
        run.peers["a"].kill()
        run.peers["b"].reaches(number + 1)
        again = run.up("a")  # the same `atoll up` line as at first
        again.reaches(number + 2)
        status = run.sees("a", 3)
        assert status["lineage"] == run.peers["b"].status()["lineage"]


def test_up_goes_on_with_a_run_of_one(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.up("a")
        run.train("a")
        before = run.peers["a"].reaches(3)
        run.peers["a"].kill()
        run.peers["a"].ends()
        run.again("a")
        after = run.peers["a"].reaches(before["round"] + 2)
        assert after["lineage"] == before["lineage"]


def test_up_does_not_found_a_second_run_over_a_lost_one(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        peer = run.up("a", "--durable", "off")
        peer.kill()
        peer.ends()
        again = run.start("a", "up", "--run", "demo", "--durable", "off")
        assert again.ends() == 2
        assert "--force-new-lineage" in again.text
        forced = run.start("a", "up", "--run", "demo", "--force-new-lineage")
        assert forced.invite


def test_a_wrong_token_or_run_is_refused_with_reasons(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        invite = Invite.parse(run.up("a").invite)
        wrong_token = Invite(invite.host, invite.port, invite.run, invite.fingerprint, b"x" * 32)
        stranger = run.join("b", str(wrong_token))
        assert stranger.ends(20) == 11
        assert "ATOLL-E21 not admitted to run demo" in stranger.text
        assert "x" * 32 not in stranger.text
        wrong_run = Invite(invite.host, invite.port, "other", invite.fingerprint, invite.secret)
        lost = run.join("c", str(wrong_run))
        assert lost.ends(20) == 11
        assert "other" in lost.text
        assert "demo" in lost.text
        assert len(run.peers["a"].status()["members"]) == 1


def test_commands_without_a_daemon_say_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atoll.peer.cli", "status", "--home", str(tmp_path / "no")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 14
    assert "ATOLL-E81" in done.stderr
    assert "atoll up" in done.stderr


def test_a_second_trainer_is_refused(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.up("a")
        run.train("a")
        run.peers["a"].reaches(2)
        second = run.train("a")
        assert second.ends(20) == 16
        assert second.lines[-1]["error"] == "E83"


def test_a_different_model_is_refused_with_the_differences(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        run.train("a", elements=1000)
        run.peers["b"].reaches(2)
        other = run.train("b", elements=1001)
        assert other.ends(20) == 23
        assert other.lines[-1]["error"] == "E40"
        assert "1000" in other.lines[-1]["what"]
        assert "1001" in other.lines[-1]["what"]
        run.peers["b"].reaches(run.peers["a"].status()["round"] + 2)


def test_a_stopped_peer_is_left_out_and_comes_back(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name)
        number = run.peers["b"].reaches(3)["round"]
        run.peers["c"].kill(signal.SIGSTOP)
        run.peers["b"].reaches(number + 5)
        run.peers["c"].kill(signal.SIGCONT)
        run.peers["c"].reaches(number + 6)
        assert run.agree("abc") >= 1


def test_two_bits_bear_a_death_a_return_and_a_newcomer(tmp_path: Path) -> None:
    """Hand on no more than the state: what others left out of their parts stays with them."""
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name, codec="int2")
        for name in "abc":
            run.peers[name].reaches(5)
        run.trainers["c"].kill()
        run.peers["c"].kill()
        run.peers["c"].ends()
        number = run.peers["a"].status()["round"]
        for name in "ab":
            run.peers[name].reaches(number + 3)
        run.restart("c")  # and its trainer
        run.join("d")
        run.train("d", codec="int2")
        for name in "abcd":
            run.sees(name, 4)
        number = max(run.peers[name].status()["round"] for name in "abcd")
        for name in "abcd":
            run.peers[name].reaches(number + 5)
        until(lambda: run.agree("abcd") >= 1, "all four have had one round", run.peers["a"])
        assert "what error feedback held before this start is lost" in run.peers["c"].text
