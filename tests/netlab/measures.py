"""What tests of a lab measure: round trips, arrivals, rates; and what they send for it.

Machines that run tests are busy. So moments of arrival are the kernel's, rates are of counters, and
of many round trips the median is taken.
"""

from __future__ import annotations

import socket
import statistics
import struct
import threading
import time
from collections.abc import Sequence

from atoll.peer.lab.lab import Lab

__all__ = [
    "PATIENCE_S",
    "PAYLOAD_SHARE",
    "PORT",
    "Flood",
    "arrived",
    "bound",
    "ping_ms",
    "received_mbit",
    "send_numbered",
    "tcp_mbit",
]

PORT = 5000
PATIENCE_S = 20.0  # only a hang ever takes this long
PAYLOAD_SHARE = 1448 / 1500  # TCP's of a full packet: 20 bytes IP, 20 TCP, 12 time stamps
SO_RCVBUFFORCE, SO_TIMESTAMPNS = 33, 35


def ping_ms(lab: Lab, source: int, target: int, times: int = 15) -> float:
    """Median round trip; the kernel of the target answers by itself."""
    found_ms = []
    with lab.socket(source, socket.SOCK_RAW, protocol=socket.IPPROTO_ICMP) as raw:
        raw.settimeout(PATIENCE_S)
        raw.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        for number in range(times):
            checksum = 0xFFFF - (0x0800 + number)
            request = struct.pack("!BBHHH", 8, 0, checksum, 0, number)
            answer = b""
            sent_s = time.time()
            raw.sendto(request, (lab.dialled_address(source, target), 0))
            while answer[20:28:7] != bytes((0, number)):  # others: nobody listens to a flood
                answer, extra, _, _ = raw.recvmsg(2000, 100)
            found_ms.append((stamped_s(extra) - sent_s) * 1e3)
    return statistics.median(found_ms)


def stamped_s(extra: Sequence[tuple[int, int, bytes]]) -> float:
    """The wall time at which the kernel took a packet in."""
    seconds, nanoseconds = struct.unpack("=qq", extra[0][2])
    return float(seconds + nanoseconds * 1e-9)


def bound(lab: Lab, host: int) -> socket.socket:
    """A UDP socket that holds all that these tests send, with the kernel's time of arrival."""
    made = lab.socket(host, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    made.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    made.bind((lab.address(host), PORT))
    return made


def arrived(receiver: socket.socket, quiet_s: float) -> list[tuple[int, float]]:
    """(number in the packet, wall time of arrival) until nothing comes for so long."""
    receiver.settimeout(quiet_s)
    found = []
    while True:
        try:
            data, extra, _, _ = receiver.recvmsg(2000, 100)
        except TimeoutError:
            return found
        found.append((int.from_bytes(data[:4], "big"), stamped_s(extra)))


def send_numbered(
    lab: Lab, source: int, target: int, count: int, gap_s: float = 0.0, every: int = 1
) -> list[float]:
    """Wall time at which each of ``count`` packets was sent; a pause after each ``every``."""
    sent_s = []
    with lab.socket(source, socket.SOCK_DGRAM) as sender:
        for number in range(count):
            sent_s.append(time.time())
            sender.sendto(number.to_bytes(4, "big"), (lab.address(target), PORT))
            if gap_s and number % every == every - 1:
                time.sleep(gap_s)
    return sent_s


class Flood:
    """UDP packets of 1,500 bytes, 48 Mbit/s, from one host to another, meanwhile."""

    def __init__(self, lab: Lab, source: int, target: int) -> None:
        self._socket = lab.socket(source, socket.SOCK_DGRAM)
        self._to = (lab.address(target), PORT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            for _ in range(20):
                self._socket.sendto(bytes(1472), self._to)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()


def received_mbit(lab: Lab, host: int, during_s: float = 0.4) -> float:
    before, since_s = lab.counters(host), time.perf_counter()
    time.sleep(during_s)
    after, took_s = lab.counters(host), time.perf_counter() - since_s
    return (after.received_bytes - before.received_bytes) * 8e-6 / took_s


def tcp_mbit(lab: Lab, source: int, target: int, warm_s: float, during_s: float) -> float:
    """What arrives of one TCP stream, after a time for its window to grow."""
    stop = threading.Event()
    with lab.socket(target) as listener, lab.socket(source) as sender:
        listener.bind((lab.address(target), PORT))
        listener.listen()
        sender.connect((lab.dialled_address(source, target), PORT))
        receiver, _ = listener.accept()

        def send() -> None:
            while not stop.is_set():
                sender.sendall(bytes(1 << 14))

        thread = threading.Thread(target=send)
        thread.start()
        with receiver:
            buffer = bytearray(1 << 18)
            begin_s = time.perf_counter()
            start_s = 0.0
            got = 0
            while (now_s := time.perf_counter()) < begin_s + warm_s + during_s:
                if not start_s and now_s > begin_s + warm_s:
                    start_s, got = now_s, 0
                got += receiver.recv_into(buffer)
            took_s = now_s - start_s
            stop.set()
            receiver.settimeout(0.5)
            while thread.is_alive():  # let the last send end
                try:
                    receiver.recv_into(buffer)
                except TimeoutError:
                    break
        thread.join()
    return got * 8e-6 / took_s
