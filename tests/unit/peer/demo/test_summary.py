"""The demo's figures, summary, verdict and page, from made-up statuses."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
from rich.console import Console

from atoll.peer.demo.figures import DemoFigures, PeerFigures, ProcessEnding
from atoll.peer.demo.summary import all_reduce_bytes, checks, summary
from atoll.peer.demo.view import LiveView, loss_chart, page

PARAMETERS = 400_000


def status(peer: PeerFigures, number: int, commit_unix_s: float, **changes: Any) -> dict[str, Any]:
    """What a daemon in round ``number`` answers."""
    metrics = {
        "untrained_loss": 5.5,
        "heldout_loss": 5.5 - number / 2,
        "heldout_round": number,
        "steps": 20.0 * number,
        "contributed": number - 1.0,
        "waited_s": 1.0 * number,
        "elapsed_s": 10.0 * number,
    }
    return {
        "peer": f"{crc32(peer.name.encode()):08x}",
        "phase": "member",
        "synced": True,
        "round": number,
        "digest": f"digest of {number}",
        "bytes": {
            "sent": {"rounds": 900_000, "state": 98_000, "probes": 0, "control": 2000},
            "received": {"rounds": 900_000, "state": 1_098_000, "probes": 0, "control": 2000},
        },
        "spec": {"sync_every": 20, "codec": "int8"},
        "parameters": PARAMETERS,
        "last_commit_unix_s": commit_unix_s,
        "trainer": {"waiting": False, "metrics": metrics},
        "events": [],
        **changes,
    }


def event(unix_s: float, kind: str, text: str) -> dict[str, Any]:
    return {"unix_s": unix_s, "kind": kind, "text": text}


@pytest.fixture
def figures() -> DemoFigures:
    """A demo that went well: killed at 104.5, noticed at 104.6, committed again at 107 and 107.2"""
    found = DemoFigures(founders=3, rounds=6, chaos=True, started_unix_s=100.0)
    found.peers = [PeerFigures(f"peer {number}") for number in (1, 2, 3)]
    found.peers.append(PeerFigures("peer 4", newcomer=True))
    first, second, third, newcomer = found.peers
    for number, unix_s in ((2, 102.0), (3, 104.0)):
        for peer in (first, second, third):
            found.observe(peer, status(peer, number, unix_s))
    first.killed, first.state = True, "killed"
    found.killed_unix_s, found.killed_round, found.killed_coordinator = 104.5, 3, True
    for peer, delay_s in ((second, 0.0), (third, 0.2)):
        death = [
            event(104.6 + delay_s, "dead", f"{first.ident} is gone"),
            event(104.7 + delay_s, "view", "view 2: two members"),
        ]
        found.observe(peer, status(peer, 3, 104.0, events=death))
        found.observe(peer, status(peer, 4, 107.0 + delay_s, events=death))
    found.joined_round, found.orphaned_s = 4, 1.5
    for peer in found.living:
        found.observe(peer, status(peer, 6, 112.0))
    found.endings = [
        ProcessEnding("daemon of peer 1", -9, -9),
        ProcessEnding("trainer of peer 1", 15, 15),
    ]
    found.endings += [ProcessEnding(f"daemon of {peer.name}", 0, 0) for peer in found.living]
    found.left_s, found.duration_s = 0.3, 13.0
    assert newcomer.contributed == 5
    return found


def failed(figures: DemoFigures) -> list[str]:
    return [check.name for check in checks(figures) if not check.ok]


def text_of(figures: DemoFigures) -> str:
    return "\n".join(f"{label}: {line}" for label, line in summary(figures))


def test_good_demo_passes_all_checks(figures: DemoFigures) -> None:
    assert failed(figures) == []
    assert len(checks(figures)) == 5


def test_a_loss_that_is_no_number_any_more_is_none(figures: DemoFigures) -> None:
    """Show that nothing of it is kept."""
    peer = figures.living[0]
    told = status(peer, 7, 115.0)
    del told["trainer"]["metrics"]["heldout_loss"]
    figures.observe(peer, told)
    assert (peer.steps, peer.contributed) == (140, 6)
    assert figures.last_loss == pytest.approx(2.5)


def test_all_reduce_is_the_ring_formula() -> None:
    assert all_reduce_bytes(3, 300, 10) == 16_000  # 2 * 2/3 * 4 bytes * 300 * 10
    assert all_reduce_bytes(2, 100, 1) == 400
    assert all_reduce_bytes(1, 100, 1) == 0


def test_times_after_the_kill(figures: DemoFigures) -> None:
    assert figures.noticed_s == pytest.approx(0.1)  # the first survivor
    assert figures.reformed_s == pytest.approx(0.4)  # the last one
    assert figures.committed_s == pytest.approx(2.7)  # the last one
    assert figures.usual_s == pytest.approx(2.0)


def test_commit_before_the_news_of_the_death_is_not_recovery() -> None:
    """The dead coordinator's last COMMIT may arrive after the kill."""
    found = DemoFigures(founders=2, rounds=6, chaos=True, killed_unix_s=100.0)
    found.peers = [PeerFigures("peer 1", killed=True), PeerFigures("peer 2")]
    survivor = found.peers[1]
    found.observe(survivor, status(survivor, 3, 100.01))
    found.observe(survivor, status(survivor, 3, 100.01, events=[event(100.02, "dead", "it")]))
    assert found.committed_s is None
    found.observe(survivor, status(survivor, 4, 103.0))
    assert found.committed_s == pytest.approx(3.0)


def test_waiting_share_is_of_all_trainers_time(figures: DemoFigures) -> None:
    assert figures.waiting_share == pytest.approx(0.1)


def test_summary_says_what_the_issue_asks_for(figures: DemoFigures) -> None:
    text = text_of(figures)
    assert "untrained loss: 5.500" in text
    assert "final held-out loss: 2.500 nats per byte after round 6" in text
    assert "peer 2       1 MB     256 MB, 256 times" in text
    assert "rounds state probes control" in " ".join(text.split())
    assert "peer 2 900 kB 98 kB 0 B 2 kB" in " ".join(text.split())
    assert text.count("        120\n") == 3
    assert "daemon of peer 1, the coordinator, after round 3" in text
    assert "noticed after 100 ms, all survivors in a new view after 400 ms" in text
    assert "next round committed after 2.7 s" in text
    assert "equal on peers 2, 3, 4 after round 6: digest of 6" in text
    assert "10.0% of the training time" in text
    assert "all 5 ended as expected" in text


def test_loss_that_did_not_fall_fails(figures: DemoFigures) -> None:
    figures.losses[6] = 0.76 * 5.5
    assert failed(figures) == ["loss fell"]
    figures.losses.clear()
    assert failed(figures) == ["loss fell"]
    assert "unknown" in text_of(figures)


def test_survivor_that_stood_still_fails(figures: DemoFigures) -> None:
    figures.survivors[0].commits_unix_s = [102.0, 104.0]
    assert failed(figures) == ["survivors went on"]


def test_idle_newcomer_fails(figures: DemoFigures) -> None:
    assert figures.newcomer is not None
    figures.newcomer.contributed = 0
    assert failed(figures) == ["newcomer took part"]


@pytest.mark.parametrize("change", ["differs now", "differed then", "other round", "unknown"])
def test_unequal_state_fails(figures: DemoFigures, change: str) -> None:
    peer = figures.living[1]
    if change == "differs now":
        peer.digest = "other"
    elif change == "differed then":
        figures.digests[3][peer.name] = "other"
    elif change == "other round":
        peer.round = 5
    else:
        peer.digest = ""
    assert failed(figures) == ["digests equal"]
    assert "NOT EQUAL" in text_of(figures)


@pytest.mark.parametrize("got", [0, 1, None])
def test_unexpected_end_fails(figures: DemoFigures, got: int | None) -> None:
    figures.endings.append(ProcessEnding("trainer of peer 9", 15, got))
    assert failed(figures) == ["processes ended as expected"]
    assert "trainer of peer 9" in text_of(figures)


def test_slow_leave_and_slow_notice_fail(figures: DemoFigures) -> None:
    figures.left_s = 5.1
    assert failed(figures) == ["processes ended as expected"]
    figures.left_s, figures.orphaned_s = 0.1, 10.1
    assert failed(figures) == ["processes ended as expected"]


def test_without_chaos_nobody_must_have_died(figures: DemoFigures) -> None:
    calm = DemoFigures(founders=1, rounds=6, chaos=False)
    calm.peers = [PeerFigures("peer 1")]
    calm.observe(calm.peers[0], status(calm.peers[0], 2, 102.0))
    calm.observe(calm.peers[0], status(calm.peers[0], 6, 112.0))
    calm.endings = [ProcessEnding("daemon of peer 1", 0, 0)]
    assert failed(calm) == []
    assert "SIGKILL" not in text_of(calm)
    assert "nothing to compare" in text_of(calm)
    assert "all-reduce at every step" in text_of(calm)


def test_events_are_shown_once_and_with_names(figures: DemoFigures) -> None:
    deaths = [h for h in figures.happenings if h.kind == "dead"]
    assert [figures.with_names(h.text) for h in deaths] == ["peer 1 is gone"]
    assert deaths[0].at_s == pytest.approx(4.6)


def test_status_before_the_run_has_state() -> None:
    found = DemoFigures(founders=1, rounds=6, chaos=False)
    peer = PeerFigures("peer 1")
    found.peers = [peer]
    void = status(peer, 0, 0.0, spec=None, digest="", trainer=None, phase="out")
    found.observe(peer, void)
    assert (peer.state, found.round, found.last_loss, found.usual_s) == ("joining", 0, None, None)
    assert peer.commits_unix_s == []
    found.observe(peer, void | {"synced": False})
    assert peer.state == "loading"


def test_chart_falls_from_the_top_left_to_the_bottom_right() -> None:
    rows = loss_chart({1: 5.0, 9: 1.0}, 9, 20, 5, {5: "kill"})
    assert [len(row) for row in rows] == [20] * 5
    assert rows[0][0][0] != " "
    assert rows[-1][-1][0] != " "
    assert rows[0][-1][0] == " "
    assert ("┊", "kill") in rows[0]


@pytest.mark.parametrize("losses", [{}, {1: 5.0}, {1: 5.0, 2: 5.0}])
def test_chart_of_almost_nothing(losses: dict[int, float]) -> None:
    assert len(loss_chart(losses, 6, 30, 4, {0: "kill"})) == 4


@pytest.mark.parametrize("width", [80, 100])
def test_page_fits(figures: DemoFigures, width: int) -> None:
    console = Console(width=width, height=40, force_terminal=True, color_system=None, record=True)
    with console.capture() as captured:
        console.print(page(figures, 75, width, 6))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for wanted in ("peer 4", "coordinator" if width > 100 else "member", "1:15", "5.500 → 2.500"):
        assert wanted in text


def test_live_summary_shows_the_failed_check(figures: DemoFigures) -> None:
    figures.losses[6] = 5.4
    console = Console(width=100, force_terminal=True, color_system=None)
    with console.capture() as captured:
        view = LiveView(console)
        view.finish(summary(figures), checks(figures))
    assert "✗ loss fell: 5.400 is not below 75% of 5.500" in captured.get()
    assert "✓ digests equal" in captured.get()
