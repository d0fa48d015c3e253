"""What every peer of a run records of all: events and rows, with real daemons and trainers."""

from __future__ import annotations

from pathlib import Path

from harness.processes import WAIT_S, fleet, until

from atoll.peer.client.ipc_client import ask
from atoll.peer.telemetry.event_file import read

PARAMETERS = 1e4
INNER_S = 0.3


def rows(home: Path) -> dict[tuple[str, int], dict[str, object]]:
    """The rows in a home's file, by peer and round."""
    return {(e["peer"], e["last"]): e for e in read(home) if e["kind"] == "row"}


def test_every_peer_has_the_rows_of_all_and_they_add_up(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.up("a")
        for name in "bc":
            run.join(name).invite  # noqa: B018 -- once it answers
        for name in "abc":
            run.train(name, PARAMETERS, inner_s=INNER_S)
        homes = {name: run.peers[name].home for name in "abc"}
        names = {run.peers[name].status()["peer"] for name in "abc"}

        def common() -> set[tuple[str, int]]:
            known = [set(rows(home)) for home in homes.values()]
            both = set.intersection(*known)
            return both if {peer for peer, _ in both} == names and len(both) >= 12 else set()

        both = until(common, "all have rows of all", *run.peers.values(), timeout_s=WAIT_S)
        kept = [rows(home) for home in homes.values()]
        for row in (row for each in kept for row in each.values()):
            assert abs(row.pop("heard_unix_s") - row["unix_s"]) < WAIT_S  # type: ignore[operator]
        for key in both:
            assert kept[0][key] == kept[1][key] == kept[2][key]
        later = [row for (_, number), row in kept[0].items() if number > 3]
        assert later
        for row in later:
            parts = sum(float(row.get(name, 0.0)) for name in ("compute_s", "wait_s", "exchange_s"))  # type: ignore[arg-type]
            assert 0 <= parts <= float(row["took_s"]) + 0.1  # type: ignore[arg-type]
            assert row["peer"] not in row.get("waited_for", ())  # type: ignore[operator]
            assert sum(row["sent"]) > 0  # type: ignore[arg-type, call-overload]
        assert any(float(row.get("compute_s", 0.0)) > INNER_S / 2 for row in later)  # type: ignore[arg-type]
        told = ask(homes["b"], "rows", last=1)
        assert {row["peer"] for row in told} == names
