"""What is of TLS alone in a data stream; the rest is in test_stream.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.wires import receive, sockets, tls_ends

from atoll.collectives.errors import ConnectError
from atoll.peer.streams import stream


def test_damaged_bytes_end_the_stream(tmp_path: Path) -> None:
    with sockets() as wires:
        sender, receiver = tls_ends(wires, tmp_path)
        sender._sock.send(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record with a wrong tag
        with pytest.raises(ConnectError, match=r"from b: TLS: .*bad record mac"):
            receive(receiver, 1)


def test_a_stream_wears_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ssl` cannot renew its keys."""
    monkeypatch.setattr(stream, "KEY_BYTES_MAX", 100)
    with sockets() as wires:
        sender, receiver = tls_ends(wires, tmp_path)
        for count, worn in ((100, False), (1, True)):
            sender.sendall(bytes(count))
            receive(receiver, count)
            assert (sender.worn, receiver.worn) == (worn, worn)
