"""The status page in a headless Chromium: what a person reads on it, of real runs and recorded."""

from __future__ import annotations

import contextlib
import re
import time
import urllib.request
from pathlib import Path

import pytest
from harness.browser import Tab, page_of, tab
from harness.grids import rest_is_slow
from harness.long_history import write
from harness.netns import Net
from harness.processes import Peer, fleet, until

from atoll.peer.telemetry.event_file import EVENTS_FILE, EventFile
from atoll.peer.telemetry.page.history import History
from atoll.peer.telemetry.page.server import PageServer

QUICK_S, SLOW_S = 0.3, 1.2
PARAMETERS = 2e4


def url_of(peer: Peer) -> str:
    def said() -> str:
        found = re.search(r"page: (http://\S+)", peer.text)
        return found[1] if found else ""

    return until(said, f"{peer.name} says where its page is", peer)


def at_time(unix_s: float) -> str:
    """Return a moment as a person types it, in the time zone of browser and machine."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(unix_s))


def look_at_events(tab: Tab, since_unix_s: float, until_unix_s: float) -> None:
    tab.page.fill("#from", at_time(since_unix_s))
    tab.page.fill("#to", at_time(until_unix_s))


@pytest.mark.timeout(900)
def test_what_a_person_reads_of_a_real_run(tmp_path: Path) -> None:
    """Four peers, one of which trains slowly; one is killed, one joins, and the daemon of the page
    is started again."""
    with fleet(tmp_path) as run, tab() as seen:
        run.options = lambda name: ("--page", "127.0.0.1:0") if name == "b" else ()
        run.up("a")
        for name in "bcd":
            run.join(name).invite  # noqa: B018 -- once it answers
        for name in "abcd":
            inner_s = SLOW_S if name == "d" else QUICK_S
            run.train(name, PARAMETERS, inner_s=inner_s, method="reporting")
        names = {name: run.peers[name].status()["peer"] for name in "abcd"}
        run.peers["b"].reaches(12)
        url = url_of(run.peers["b"])
        seen.open(url)
        assert seen.text("#run") == "run demo"
        # Who is slow and why.
        slow = seen.shows("#slow", f"{names['d']} is slow", "because it trains")
        assert "of each" in slow
        assert names["d"] in seen.text("#peers tr.slow")
        seen.shows("#glance", "Peers", "4", "Predicted", " %)")
        assert {*names.values()} <= {*re.findall(r"[0-9a-f]{8}", seen.text("#peers"))}
        # When it is done.
        seen.page.fill("#goal", "1000")
        assert re.search(
            r"in \d.* at \d\d:\d\d:\d\d, at .* per round", seen.shows("#eta", "per round")
        )
        seen.page.select_option("#goal-kind", "tokens")
        seen.page.fill("#goal", "1000000")
        assert "tokens per second" in seen.shows("#eta", "tokens per second")
        # How much was sent, for what, and what the alternative would have cost.
        seen.shows(
            "#all-reduce", "All have sent", "all-reduce of float32 gradients", "times as much"
        )
        seen.page.click("text=Peer by peer")
        assert re.search(rf"{names['a']}.*[kM]B", seen.shows("#byte-table", names["a"], "rounds"))
        # One is killed: what happened then?
        killed_s = time.time()
        run.peers["c"].kill()
        before = run.peers["b"].status()["round"]
        run.peers["b"].reaches(before + 2)
        look_at_events(seen, killed_s - 1, killed_s + 30)
        seen.shows("#events", names["c"])
        look_at_events(seen, killed_s - 3600, killed_s - 3000)
        seen.shows("#event-note", "no events")
        seen.page.click("#any-time")
        seen.page.check("#kind-round")
        seen.shows("#events", f"round {before}", "4 peers")
        # One joins, and is shown without anybody reloading the page.
        run.join("e").invite  # noqa: B018
        run.train("e", PARAMETERS, inner_s=QUICK_S, method="reporting")
        late = run.peers["e"].status()["peer"]
        seen.shows("#peers", late)
        seen.shows("#chips", late)
        assert seen.complaints == []
        # The daemon of the page is started again: what was before is there.
        run.peers["b"].kill()
        run.peers["b"].ends()
        seen.shows("#link-state", "no answer from the daemon")
        again = run.again("b")
        again.reaches(before + 4)
        seen.open(url_of(again))
        seen.complaints.clear()  # the browser's own, of an answer that the kill cut short
        look_at_events(seen, killed_s - 1, killed_s + 30)
        seen.shows("#events", names["c"])
        assert seen.complaints == []
        assert {address.split("/")[2] for address in seen.asked} == {
            url.split("/")[2],
            url_of(again).split("/")[2],
        }


def test_prometheus_scrapes_the_page(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.options = lambda name: ("--page", "127.0.0.1:0")
        peer = run.up("a")
        run.train("a", inner_s=QUICK_S)
        row = f'atoll_peer_round{{peer="{peer.status()["peer"]}"}} '

        def scraped() -> bool:
            with urllib.request.urlopen(f"{url_of(peer)}metrics", timeout=60) as answer:
                return row in answer.read().decode()

        until(scraped, "the row of a round", peer)


@pytest.mark.timeout(600)
def test_a_fork_is_said_and_kept(tmp_path: Path) -> None:
    """Two of four go on without a majority, and meet the others again."""
    with fleet(tmp_path, Net("abcd")) as run, tab() as seen:
        assert run.net is not None
        run.up("a", "--policy", "any")
        for name in "bcd":
            run.join(name).invite  # noqa: B018 -- once it answers
        for name in "abcd":
            run.sees(name, 4)
            run.train(name, inner_s=QUICK_S)
        for name in "abcd":
            run.peers[name].reaches(4)
        run.net.split("ab", "cd")
        peers = list(run.peers.values())
        fork = until(lambda: next((p for p in peers if p.status()["fork"]), None), "a fork", *peers)
        with page_of(fork) as url:
            seen.open(url)
            lineage = fork.status()["lineage"]
            seen.shows("#alarm", f"This is a fork: lineage {lineage} went on without a majority.")
            seen.shows("#history", f"goes on as {lineage[:16]}")
            run.net.heal()
            seen.shows("#history", "met lineage")
        assert seen.complaints == []


@pytest.fixture
def recorded(tmp_path: Path) -> PageServer:
    names = write(tmp_path, peers=20, hours=0.3, round_s=5.0)
    file = EventFile(tmp_path / EVENTS_FILE, print)
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    file.append({"unix_s": time.time(), "kind": "link", "text": evil})
    file.append({"unix_s": time.time(), "kind": "fork", "text": f"lineage of {names[0]}"})
    file.close()
    return PageServer("0.0.0.0", 0, History(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("width", "scheme"),
    rest_is_slow([(1280, "light"), (390, "dark"), (1280, "dark"), (390, "light")], 2),
)
@pytest.mark.timeout(600)
def test_anybody_can_use_it(recorded: PageServer, scheme: str, width: int) -> None:
    """With the keyboard, a screen reader, a phone; axe-core finds nothing against WCAG AA."""
    recorded.start(lambda: None)
    try:
        with tab(width, scheme) as refused:  # the browser complains of it, now or later
            refused.page.goto(f"http://127.0.0.1:{recorded.port}/")
            assert refused.text("body").strip() == "this page needs its token"
        with tab(width, scheme) as seen:
            seen.open(recorded.url("127.0.0.1"))
            assert recorded.token not in seen.page.url
            assert seen.violations() == []
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
            # Markup in the words of peers is text.
            assert "<img src=x onerror" in seen.text("#events")
            assert "lineage of" in seen.text("#history")
            # Arrow keys read a chart, and a peer is made to stand out.
            seen.page.focus("#loss .chart-box")
            seen.page.keyboard.press("Home")
            first = seen.text("#loss .reading")
            seen.page.keyboard.press("ArrowRight")
            assert re.match(r"\d\d:\d\d:\d\d", first)
            assert seen.text("#loss .reading") != first
            seen.page.focus("#chips button")
            seen.page.keyboard.press("Enter")
            assert seen.page.get_attribute("#chips button", "aria-pressed") == "true"
            assert seen.page.locator("#loss .strong").count() == 1
            seen.page.select_option("#theme", "dark" if scheme == "light" else "light")
            assert seen.violations() == []
            assert seen.complaints == []
    finally:
        recorded.close()


def test_the_time_of_rounds_ends_with_the_last_one(tmp_path: Path) -> None:
    """Draw no rounds for the time after a run has come to a stand, or has ended."""
    write(tmp_path, peers=4, hours=0.3, round_s=5.0)
    with contextlib.closing(History(tmp_path)) as history:
        rounds = history.summary(0.0, 0)["rounds"]
    last_s = max(found[-1]["unix_s"] for found in rounds.values())
    file = EventFile(tmp_path / EVENTS_FILE, print)
    file.append({"unix_s": last_s + 600, "kind": "leave", "text": "leaving the run"})
    file.close()
    page = PageServer("127.0.0.1", 0, History(tmp_path), tmp_path)
    page.start(lambda: None)
    try:
        with tab() as seen:
            seen.open(page.url(""))

            def end_of(chart: str) -> str:
                seen.page.focus(f"{chart} .chart-box")
                seen.page.keyboard.press("End")
                return seen.text(f"{chart} .reading").split()[0]

            assert end_of("#share") == time.strftime("%H:%M:%S", time.localtime(last_s // 5 * 5))
            assert end_of("#memory") > end_of("#share")
            assert not seen.complaints
    finally:
        page.close()


def test_held_out_loss_is_told_from_that_of_training(tmp_path: Path) -> None:
    """By its line, the legend, the table and what is read, of a recorded run; it comes seldom."""
    names = write(tmp_path, peers=4, hours=0.3, round_s=5.0, heldout_every=20)
    page = PageServer("127.0.0.1", 0, History(tmp_path), tmp_path)
    page.start(lambda: None)
    try:
        with tab() as seen:
            seen.open(page.url(""))
            legend = seen.page.locator("#loss .legend .item").all_inner_texts()
            assert [text.strip() for text in legend] == ["training", "held-out"]
            seen.shows("#glance", "Training loss, mean", "Held-out loss, mean")
            heads = seen.page.locator("#peers th[scope=col]").all_inner_texts()
            cells = seen.page.locator(f"#peers tr:has(th:text('{names[0]}')) td").all_inner_texts()
            of = dict(zip(heads[1:], cells, strict=True))
            assert float(of["Held-out loss"]) > float(of["Training loss"]) > 2
            # Four lines of each kind; one that is seldom is in one piece, and dashed.
            assert seen.page.locator("#loss .chart .line").count() == 8
            drawn = seen.page.locator("#loss .chart .seldom")
            assert drawn.count() == 4
            assert drawn.first.evaluate("line => getComputedStyle(line).strokeDasharray") != "none"
            line = str(drawn.first.get_attribute("d"))
            assert (line.count("M"), line.count("L")) == (1, 216 // 20 - 1)
            assert seen.page.locator("#loss .chart .dots").count() == 4
            # What screen readers and the arrow keys are told; between two points the last one.
            label = str(seen.page.get_attribute("#loss svg.chart", "aria-label"))
            assert label.startswith("Training and held-out loss that each trainer has reported")
            assert re.search(rf" training: .*{names[0]} \d.*; held-out: .*{names[0]} \d", label)
            seen.page.focus("#loss .chart-box")
            seen.page.keyboard.press("Home")
            assert "held-out" not in seen.text("#loss .reading")  # none was measured by then
            seen.page.keyboard.press("End")
            said = seen.text("#loss .reading")
            trained, _, held_out = said.partition("; held-out: ")
            assert re.search(rf" training: .*{names[0]} \d[\d.]*( · |$)", trained)
            assert re.search(rf"{names[0]} \d[\d.]* at \d\d:\d\d:\d\d", held_out)
            assert seen.violations() == []
            assert seen.complaints == []
    finally:
        page.close()
