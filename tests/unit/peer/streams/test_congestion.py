"""The congestion control of data streams, as the kernel tells it of real connections."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from harness.wires import Call, receive

from atoll.collectives.errors import ConfigError
from atoll.peer.streams.congestion import AUTO, BBR, CUBIC, Congestion, ask, check, suited
from atoll.peer.streams.keys import CIPHERS
from atoll.peer.streams.stream import LOCAL_BUFFER_BYTES, PlainStream

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_CONGESTION"), reason="this system does not let one choose"
)
SAME, OTHER = "127.0.0.1", "127.0.0.2"  # to the stream the second one is another machine


def kernel_has(name: str) -> bool:
    with socket.socket() as sock:
        return not ask(sock, name)


@contextlib.contextmanager
def stream_to(address: str) -> Iterator[tuple[PlainStream, PlainStream]]:
    """The sending and the receiving end."""
    with socket.create_server((address, 0)) as listening:
        dialled = socket.create_connection(listening.getsockname(), source_address=(SAME, 0))
        accepted, _ = listening.accept()
    with dialled, accepted:
        yield PlainStream(dialled, "a"), PlainStream(accepted, "b")


def test_what_is_asked_for_depends_on_the_way() -> None:
    said: list[str] = []
    congestion = Congestion(AUTO, said.append)
    for address, wanted in ((SAME, CUBIC), (OTHER, BBR)):
        with stream_to(address) as (sender, receiver):
            before = receiver.congestion
            congestion.apply(sender)
            assert sender.is_local == (address == SAME)
            if kernel_has(wanted):
                assert sender.congestion == wanted
            assert receiver.congestion == before, "it sends nothing"
    assert len(said) == sum(not kernel_has(name) for name in (CUBIC, BBR))


def test_a_plan_is_told_whether_losses_slow_what_is_sent() -> None:
    wanted = {AUTO: kernel_has(BBR), "bbr": True, "bbr3": True, CUBIC: False}
    assert {name: Congestion(name, print).bbr for name in wanted} == wanted


def test_what_the_user_wants_beats_what_is_chosen() -> None:
    said: list[str] = []
    for address in (SAME, OTHER):
        with stream_to(address) as (sender, _):
            Congestion("reno", said.append).apply(sender)
            assert sender.congestion == "reno"
            assert sender.pace(1e6, "cubic"), "a plan's wish"
            assert (sender.congestion, sender.pace_bytes_per_s) == ("reno", 1e6)
    assert not said


def test_a_plan_may_choose_where_the_user_has_not() -> None:
    with stream_to(OTHER) as (sender, _):
        Congestion(AUTO, print).apply(sender)
        assert sender.pace(1e6, "reno")
        assert sender.congestion == "reno"


@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize("lossy", [False, True])
def test_a_pace_on_a_way_without_losses_goes_without_bbr(paced: bool, lossy: bool) -> None:
    with stream_to(OTHER) as (sender, _):
        assert suited(sender, paced=paced, lossy=lossy) == (CUBIC if paced > lossy else BBR)
    with stream_to(SAME) as (sender, _):
        assert suited(sender, paced=paced, lossy=lossy) == CUBIC


def test_what_the_kernel_refuses_is_said_once_and_does_no_harm() -> None:
    said: list[str] = []
    congestion = Congestion("never-heard-of", said.append)
    for _ in range(3):
        with stream_to(OTHER) as (sender, receiver):
            before = sender.congestion
            congestion.apply(sender)
            assert sender.congestion == before
            assert sender.pace(1e9, "reno"), "what could not be had does not bind"
            assert sender.congestion == "reno"
            sending = Call(lambda stream=sender: stream.sendall(bytes(100_000)))
            assert len(receive(receiver, 100_000)) == 100_000
            sending.end()
    assert said == [f"data streams use {before}: this kernel has no never-heard-of"]


def test_a_stream_that_has_ended_is_no_error() -> None:
    with stream_to(OTHER) as (sender, _):
        sender.close()
        Congestion(AUTO, print).apply(sender)
        assert sender.congestion == ""


def test_a_name_is_checked_before_the_daemon_starts() -> None:
    assert check(AUTO) == AUTO
    assert check("reno") == "reno"
    with pytest.raises(ConfigError, match="this kernel has no cubik") as caught:
        check("cubik")
    assert "reno" in caught.value.fix


def test_the_kernel_sizes_the_buffers_of_far_streams() -> None:
    """They grow with what is on the way, which they would not if a size had been asked for."""

    def buffer_bytes(stream: PlainStream) -> int:
        return int(stream._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))

    with stream_to(SAME) as (sender, _):
        assert buffer_bytes(sender) == 2 * LOCAL_BUFFER_BYTES  # Linux doubles, for its own use
    with stream_to(OTHER) as (sender, receiver):
        before = buffer_bytes(sender)
        sending = Call(lambda: sender.sendall(bytes(32 << 20)))
        receive(receiver, 32 << 20)
        sending.end()
        assert buffer_bytes(sender) > before


@pytest.mark.parametrize("ciphers", [CIPHERS, ()], ids=["sealed", "tls"])
def test_all_streams_of_a_daemon_are_asked_for_it(net: Net, ciphers: tuple[str, ...]) -> None:
    async def scenario() -> None:
        a, b = await net.linked(ciphers)
        stream = await b.host.open_data(a.id, a.address)
        assert stream.is_local
        assert stream.congestion == (CUBIC if kernel_has(CUBIC) else stream.congestion)
        stream.close()

    net.run(scenario())
