"""What `atoll top`, `events` and `trace` show of a run with a slow peer, alive and dead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.processes import WAIT_S, Fleet, Process, fleet, until

from atoll.peer.client.ipc_client import ask
from atoll.peer.telemetry.metrics import metrics_text

PARAMETERS = 1e4
FAST_S, SLOW_S = 0.2, 1.2
ROUND = 4  # from here on rows are of whole rounds
SO_FAR = re.compile(r" \(this peer\)| \([^()]* so far\)")


def atoll(home: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "atoll.peer.cli", *arguments, "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def same_words(run: Fleet, slow: str) -> dict[str, str] | None:
    """Return what all say of one round that waits for the slow peer, asked together."""
    said = {name: peer.status() for name, peer in run.peers.items()}
    texts = {name: SO_FAR.sub("", status["waiting"]) for name, status in said.items()}
    rounds = {status["round"] for status in said.values()}
    waits = all(text.endswith(f"waits for the training of {slow}") for text in texts.values())
    return texts if len(rounds) == 1 and waits else None


def test_everybody_names_the_slow_one_and_the_file_outlives_the_daemon(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.up("a")
        for name in "bc":
            run.join(name).invite  # noqa: B018 -- once it answers
        for name in "abc":
            run.train(name, PARAMETERS, inner_s=SLOW_S if name == "c" else FAST_S)
        home = run.peers["b"].home
        slow = run.peers["c"].status()["peer"]
        texts = until(lambda: same_words(run, slow), "one cause", *run.peers.values())
        assert len(set(texts.values())) == 1

        def blamed() -> str:
            shown = atoll(home, "top", "--once", "--until-rounds", "9999")
            told = " ".join(shown.split())
            return shown if f"{slow} is slow" in told and "because it trains" in told else ""

        shown = until(blamed, "top names the slow one", *run.peers.values(), timeout_s=WAIT_S)
        assert max(map(len, shown.splitlines())) <= 80
        assert "round 9999 in " in shown
        others = [run.peers[name].status()["peer"] for name in "ab"]
        assert all(f"\n{name}" in shown for name in (*others, slow))
        for row in ask(home, "rows", last=240):
            if row["last"] > ROUND:
                assert row["peer"] not in row.get("waited_for", ())
        metrics = metrics_text(run.peers["b"].status(), ask(home, "rows", last=1)).decode()
        assert f'atoll_peer_round_phase_seconds{{peer="{slow}",phase="compute"}}' in metrics

        pid = run.trainers["b"].pid
        run.trainers["b"].kill()
        until(lambda: run.peers["b"].said("trainer") >= 2, "it is said", *run.peers.values())
        run.peers["c"].kill()
        until(lambda: run.peers["a"].said("dead"), "c is missed", *run.peers.values())
        run.peers["a"].kill()
        check_events(run.peers["a"].home, slow)
        trainer = [e["text"] for e in events(home, "--kind", "trainer")]
        assert trainer == [f"process {pid} trains from now on", f"process {pid} trains no more"]
        check_trace(run.peers["a"].home, tmp_path / "trace.json", slow)


def events(home: Path, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in atoll(home, "events", "--json", *arguments).splitlines()]


def check_events(home: Path, slow: str) -> None:
    """Check the events of a dead daemon: kinds, types, rows, times, and as lines."""
    every = events(home)
    assert {"view", "round", "trainer"} <= {e["type"] for e in every}
    assert not [e for e in every if e["kind"] == "row"]
    dead = events(home, "--kind", "dead")
    assert [e["peer"] for e in dead] == [slow]
    assert {e["kind"] for e in events(home, "--kind", "row")} == {"row"}
    assert events(home, "--kind", "view", "--until", "10m") == []
    assert f"  dead        {slow} is gone" in atoll(home, "events", "--kind", "view")


def check_trace(home: Path, path: Path, slow: str) -> None:
    said = atoll(home, "trace", "--rounds", "3", "-o", str(path))
    assert said.startswith(f"{path}: 3 peers")
    found = json.loads(path.read_text("utf-8"))["traceEvents"]
    process = {e["args"]["name"]: e["pid"] for e in found if e["ph"] == "M"}[f"peer {slow}"]
    assert [e["pid"] for e in found if e["ph"] == "i" and e["name"] == "dead"] == [process]
    assert [e for e in found if e["ph"] == "X" and e["name"] == f"wait for {slow}"]


def test_follow_goes_on_with_what_happens(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        home = run.up("a").home
        run.peers["a"].status()
        command = [sys.executable, "-m", "atoll.peer.cli", "events", str(home), "--follow"]
        follower = Process([*command, "--kind", "round,view"], tmp_path / "follow.log")
        try:
            until(lambda: "  view  " in follower.text, "what was before", *run.peers.values())
            run.train("a", PARAMETERS, inner_s=FAST_S)
            until(lambda: "  round       3  " in follower.text, "rounds", *run.peers.values())
            lines = follower.text.splitlines()
            assert len(set(lines)) == len(lines)
        finally:
            follower.kill()
            follower.ends()
