"""The 40 bytes in front of every bulk frame."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.peer.streams.frames import (
    DATA_FRAME_BYTES_MAX,
    DATA_HEADER_BYTES,
    DataHeader,
    pack_header,
    unpack_header,
)

HEADER = DataHeader(1, 2, 3, 4, b"lineage8", 5, 6, 7, 8)


def unsigned(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, (1 << bits) - 1)


@given(
    st.builds(
        DataHeader,
        kind=unsigned(8),
        flags=unsigned(8),
        fragment=unsigned(16),
        length=st.integers(0, DATA_FRAME_BYTES_MAX),
        lineage8=st.binary(min_size=8, max_size=8),
        view=unsigned(32),
        round=unsigned(64),
        attempt=unsigned(32),
        chunk=unsigned(32),
        offset=st.integers(0, 2**32 - 1),
    )
)
def test_a_header_comes_back_as_it_was(header: DataHeader) -> None:
    assert unpack_header(pack_header(header)) == header


def test_the_layout_is_pinned() -> None:
    assert DATA_HEADER_BYTES == 40
    assert pack_header(HEADER).hex() == (
        "01" "02" "0003" "00000004" "6c696e6561676538"
        "00000005" "0000000000000006" "00000007" "00000008" "00000000"
    )  # fmt: skip


@given(st.binary(min_size=40, max_size=40))
@example(b"\0" * 40)
def test_any_bytes_are_a_header_or_one_error(data: bytes) -> None:
    length = int.from_bytes(data[4:8], "big")
    if length <= DATA_FRAME_BYTES_MAX:
        assert unpack_header(data).length == length
    else:
        with pytest.raises(RemoteProtocolError, match=f"of {length:,} bytes; at most"):
            unpack_header(data)


@pytest.mark.parametrize(
    "wrong",
    [{"kind": 256}, {"round": -1}, {"lineage8": b"short"}, {"length": DATA_FRAME_BYTES_MAX + 1}],
)
def test_what_does_not_fit_is_our_defect(wrong: dict[str, object]) -> None:
    with pytest.raises(LocalProtocolError):
        pack_header(HEADER._replace(**wrong))  # type: ignore[arg-type]  # wrong on purpose
