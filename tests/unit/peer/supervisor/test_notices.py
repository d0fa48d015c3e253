"""Spot notices of three clouds, asked over HTTP of a server that speaks as theirs do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from harness.metadata_server import MetadataServer

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.peer.supervisor import metadata
from atoll.peer.supervisor.metadata import MetadataService, watch_notices
from atoll.peer.supervisor.notices import CLOUDS, LEFT_MIN_S, PREEMPTED_S, SpotNotice


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


@pytest.mark.parametrize("url", ["https://x", "169.254.169.254", "http://", "http://x:y"])
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
    asyncio.run(watch_notices("gcp", server.url, given.append, say))
    changing.join()
    assert given == [SpotNotice("GCP preempts this machine", PREEMPTED_S)]
    assert len(said) == 2
    assert said[0].startswith(f"notices of gcp cannot be had from {server.url}")
    assert said[1].endswith("answers: there are notices now")
