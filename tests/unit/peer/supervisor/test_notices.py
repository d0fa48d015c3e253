"""Spot notices of three clouds, asked over HTTP of a server that speaks as theirs do."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from harness.metadata_server import MetadataServer

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.peer.supervisor import metadata
from atoll.peer.supervisor.metadata import MetadataService, watch_notices
from atoll.peer.supervisor.notices import (
    CLOUDS,
    LEFT_MIN_S,
    PREEMPTED_S,
    AzureNotices,
    Cloud,
    Http,
    SpotNotice,
)


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with MetadataServer() as found:
        yield found


def asking(cloud: str, server: MetadataServer) -> Callable[[], SpotNotice | None]:
    source, service = CLOUDS[cloud].source(), MetadataService(server.url)
    return lambda: source.ask(service.request, time.time())


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
def test_there_is_no_notice_and_then_there_is_one(cloud: str, server: MetadataServer) -> None:
    ask = asking(cloud, server)
    assert ask() is None
    server.gone_s = time.time() + 119.0
    notice = ask()
    assert notice is not None
    if cloud == "gcp":
        assert notice == SpotNotice("GCP preempts this machine", PREEMPTED_S)
    else:
        assert 110.0 < notice.left_s < 120.0
        assert notice.what.endswith(" UTC")


def test_aws_gives_another_token_when_one_is_too_old(server: MetadataServer) -> None:
    ask = asking("aws", server)
    assert ask() is None
    assert ask() is None
    assert server.asked["/latest/api/token"] == 1
    server.token = "another"
    server.action = "stop"
    server.gone_s = time.time() + 60.0
    notice = ask()
    assert notice is not None
    assert notice.what.startswith("AWS is to stop this machine")
    assert server.asked["/latest/api/token"] == 2


@pytest.mark.parametrize("event", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_events_that_end_this_machine(event: str, server: MetadataServer) -> None:
    server.event, server.gone_s = event, time.time() + 300.0
    notice = asking("azure", server)()
    assert notice is not None
    assert event in notice.what


def test_azure_events_of_other_machines_and_pauses_are_none(server: MetadataServer) -> None:
    server.gone_s = time.time() + 300.0
    server.machines = ["vm-1", "vm-2"]
    assert asking("azure", server)() is None
    server.machines, server.event = ["vm-7"], "Freeze"
    assert asking("azure", server)() is None


@pytest.mark.parametrize("cloud", ["aws", "azure"])
def test_a_time_that_is_over_still_leaves_a_moment(cloud: str, server: MetadataServer) -> None:
    server.gone_s = time.time() - 600.0
    notice = asking(cloud, server)()
    assert notice is not None
    assert notice.left_s == LEFT_MIN_S


@pytest.mark.parametrize("cloud", sorted(CLOUDS))
def test_an_answer_that_is_none_is_an_error_and_no_notice(
    cloud: str, server: MetadataServer
) -> None:
    ask = asking(cloud, server)
    assert ask() is None
    server.broken = True
    with pytest.raises(RemoteProtocolError, match="login page"):
        ask()


@pytest.mark.parametrize("token", ["<html>\n<body>", "two words", "t\x7fken", "tök", " \n"])
def test_a_token_that_is_not_one_printable_word_is_refused(
    token: str, server: MetadataServer
) -> None:
    server.token = token
    with pytest.raises(RemoteProtocolError, match="/latest/api/token was answered") as refused:
        asking("aws", server)()
    assert token not in refused.value.what


@pytest.mark.parametrize("kind", [["Preempt"], {"Preempt": 1}, 7, None])
def test_an_azure_event_of_no_kind_is_none_of_this_machine(
    kind: object, server: MetadataServer
) -> None:
    server.event, server.gone_s = cast(Any, kind), time.time() + 300.0
    assert asking("azure", server)() is None


@pytest.mark.parametrize("at", ["soon", "Fri, 31 Dec 9999 23:59:59 -1400"])
def test_an_azure_event_at_no_time_is_an_error(at: str) -> None:
    event = {"EventType": "Preempt", "Resources": ["vm"], "NotBefore": at}
    answers = {True: json.dumps({"Events": [event]}).encode(), False: b"vm"}
    with pytest.raises(RemoteProtocolError, match="the event Preempt has no time"):
        AzureNotices().ask(lambda _, path, __: (200, answers["events" in path]), time.time())


@pytest.mark.parametrize(
    "url", ["https://x", "169.254.169.254", "http://", "http://x:y", "http://[::1"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no address of a metadata service"):
        MetadataService(url)


def test_a_service_that_does_not_answer_is_asked_again_and_that_is_said_once(
    server: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(metadata.CLOUDS, "gcp", replace(CLOUDS["gcp"], poll_s=0.01))
    given: list[SpotNotice] = []
    said: list[str] = []
    server.broken = True
    path = "/computeMetadata/v1/instance/preempted"

    def say(line: str) -> None:
        said.append(line)

    def until_asked(count: int) -> None:
        while server.asked.get(path, 0) < count:
            time.sleep(0.01)

    def change() -> None:
        until_asked(3)
        server.broken = False
        until_asked(server.asked[path] + 3)
        server.gone_s = time.time()

    changing = threading.Thread(target=change)
    changing.start()
    asyncio.run(watch_notices("gcp", MetadataService(server.url), given.append, say))
    changing.join()
    assert given == [SpotNotice("GCP preempts this machine", PREEMPTED_S)]
    assert len(said) == 2
    assert said[0].startswith(f"notices of gcp cannot be had from {server.url}")
    assert said[1].endswith("answers: there are notices now")


@pytest.mark.parametrize("trouble", [ValueError("an invalid header"), TypeError(), KeyError("x")])
def test_no_answer_ends_the_watching(trouble: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that training goes on whatever a stranger's answer does; it is said once."""
    there = SpotNotice("GCP preempts this machine", PREEMPTED_S)
    answers: list[Exception | SpotNotice] = [trouble, trouble, there]

    class Odd:
        def ask(self, http: Http, unix_s: float) -> SpotNotice | None:
            if isinstance(answer := answers.pop(0), Exception):
                raise answer
            return answer

    monkeypatch.setitem(metadata.CLOUDS, "gcp", Cloud("http://x", 0.0, Odd))
    given, said = list[SpotNotice](), list[str]()
    service = MetadataService("http://127.0.0.1:1")
    asyncio.run(watch_notices("gcp", service, given.append, said.append))
    assert given == [there]
    assert len(said) == 2
    assert f"({str(trouble) or 'TypeError'}); asking again" in said[0]
