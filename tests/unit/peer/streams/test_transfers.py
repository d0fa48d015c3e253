"""Frames of a transfer: what is refused, what is given up, and streams that meet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest

from atoll.collectives import RoundResult, get_codec, grid_for
from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import RemoteProtocolError, RoundTimeoutError
from atoll.peer.streams import transfers as module
from atoll.peer.streams.frames import DataHeader
from atoll.peer.streams.transfers import EncodedTransfer, TransferKind, Transfers, receive

KEY = (b"p" * 32, int(TransferKind.RESULT_COPY), 2, 1)


def frame_of(transfer: EncodedTransfer, result: RoundResult, chunk: int) -> DataHeader:
    return DataHeader(transfer.key[1], 0, 0, result.layout.size(chunk), b"", 0, 2, 1, chunk)


def take(
    transfer: EncodedTransfer,
    result: RoundResult,
    chunk: int,
    value: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """A frame with a chunk of this value arrives."""
    header = frame_of(transfer, result, chunk)
    target = transfer.reserve(header)
    assert target is not None
    values = np.full(result.grid.size(chunk), value, np.float32)
    result.codec.encode(values, np.frombuffer(target, np.uint8))
    meanwhile()
    transfer.received(header)


@pytest.fixture
def result() -> RoundResult:
    found = RoundResult(get_codec("int8"), grid_for(10_000))
    found.array.fill(0)
    return found


def test_an_aborted_copy_writes_no_more(result: RoundResult) -> None:
    """A reader thread may be in the middle of a frame when the transfer is given up."""
    transfer = EncodedTransfer(KEY, result)
    take(transfer, result, 0, 1.0)
    take(transfer, result, 1, 1.0, meanwhile=transfer.close)
    assert result.view(0).any()
    assert not result.array[result.layout.slice(1)[0] :].any()
    assert not transfer.ended.done()


def test_a_copy_takes_nothing_that_does_not_decode(result: RoundResult) -> None:
    """It would be committed, and then nobody could apply it."""
    transfer = EncodedTransfer(KEY, result)
    for chunk in range(result.grid.count - 1):
        take(transfer, result, chunk, 1.0)
    header = frame_of(transfer, result, result.grid.count - 1)
    target = transfer.reserve(header)
    assert target is not None
    target[:] = b"\xff" * len(target)  # a scale that is no number
    with pytest.raises(RemoteProtocolError, match="int8 scale"):
        transfer.received(header)
    assert not transfer.ended.done()
    take(transfer, result, result.grid.count - 1, 2.0)
    assert transfer.ended.result(0) == ""
    assert transfer.marks[0] == strong_digest(result.view(0))


def test_a_source_that_repeats_a_chunk_is_found_stalled(
    result: RoundResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL_TIMEOUT_S", 0.05)
    transfer = EncodedTransfer(KEY, result)
    take(transfer, result, 0, 1.0)
    header = frame_of(transfer, result, 0)

    async def wait() -> None:
        async def repeat() -> None:
            while True:
                assert transfer.reserve(header) is None
                await asyncio.sleep(0.001)

        repeating = asyncio.create_task(repeat())
        try:
            async with asyncio.timeout(20):
                with pytest.raises(RoundTimeoutError, match="sent no chunk"):
                    await receive(Transfers(), transfer)
        finally:
            repeating.cancel()

    asyncio.run(wait())


def test_two_streams_of_one_source_do_not_share_a_buffer(result: RoundResult) -> None:
    """A stream that broke may still be read when the next one brings the same chunk."""
    transfer = EncodedTransfer(KEY, result)
    header = frame_of(transfer, result, 0)
    old = transfer.reserve(header)
    assert old is not None
    other = threading.Thread(target=take, args=(transfer, result, 0, 1.0))
    other.start()
    other.join()
    before = result.view(0).tobytes()
    old[:] = bytes(len(old))  # decodes, and is not the same
    transfer.received(header)
    assert result.view(0).tobytes() == before
    assert any(before)
