"""A daemon with caps: what it says of them, and that a restart forgets no byte of the day."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from harness.processes import fleet

from atoll.peer.caps.caps import COUNT_FILE

CAPS = ("--up-mbit", "80", "--up-gb-per-day", "10", "--down-mbit", "unlimited")


def test_the_days_count_goes_on_after_a_restart_in_order(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.options = lambda name: CAPS if name == "b" else ()
        run.form("ab")
        for name in "ab":
            run.train(name, 1e5)
        peer = run.peers["b"]
        peer.reaches(3)
        before = peer.status()["caps"]
        sent = peer.status()["bytes"]["sent"]
        assert before["up"]["today_bytes"] > 0.9 * sum(sent.values())
        assert before["up"]["bytes_per_s"] == 10e6
        assert before["up"]["day_bytes_max"] == 10_000_000_000
        assert before["down"]["bytes_per_s"] is None
        assert run.peers["a"].status()["caps"] == {}
        port = peer.port
        peer.kill(signal.SIGTERM)
        assert peer.ends() == 0
        kept = json.loads((peer.home / COUNT_FILE).read_text())
        assert kept["up_bytes"] >= before["up"]["today_bytes"]
        again = run.again("b", port)
        after = again.reaches(run.peers["a"].status()["round"] + 1)["caps"]
        if time.strftime("%Y-%m-%d") == kept["day"]:  # not at midnight
            assert after["up"]["today_bytes"] > kept["up_bytes"]


def test_rounds_go_on_when_the_days_budget_is_nearly_spent(tmp_path: Path) -> None:
    day = time.strftime("%Y-%m-%d")
    spent = {"day": day, "up_bytes": 96_000_000_000, "down_bytes": 0}
    (tmp_path / "b").mkdir(0o700)
    (tmp_path / "b" / COUNT_FILE).write_text(json.dumps(spent))
    with fleet(tmp_path) as run:
        run.options = lambda name: ("--up-gb-per-day", "100") if name == "b" else ()
        run.form("ab")
        for name in "ab":
            run.train(name, 1e4)
        peer = run.peers["b"]
        up = peer.reaches(4)["caps"]["up"]
        if time.strftime("%Y-%m-%d") == day:  # not at midnight
            assert up["step"] == "spread"
            assert up["bytes_per_s"] < 4_000_000_000
            assert up["today_bytes"] > spent["up_bytes"]
            assert peer.text.count("up: 96 GB of 100 GB for today are used: what is left") == 1
