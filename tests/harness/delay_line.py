"""Links with a delay: packets between the two ends of each are handed over that much later.

    delay_line.py MTU [NETNS:DEVICE NETNS:DEVICE SECONDS]...

Makes both TUN devices of every link, prints "ready" and runs until killed. Packets keep their order
and are neither lost nor changed, except that a link holds no more than PACKETS_MAX in flight.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
PACKETS_MAX = 20_000  # of 1500 bytes: 800 Mbit/s at 300 ms of round trip
LATE_S = 0.0005  # packets due this soon go now: a poll cannot wait for less


class Direction:
    """What one end has sent and the other has not got yet."""

    def __init__(self, source: int, target: int, delay_s: float, mtu: int) -> None:
        self.source, self.target, self.delay_s, self.mtu = source, target, delay_s, mtu
        self.waiting: deque[tuple[float, bytes]] = deque()

    def take(self, now_s: float) -> None:
        while True:
            try:
                packet = os.read(self.source, self.mtu)
            except BlockingIOError:
                return
            if len(self.waiting) < PACKETS_MAX:
                self.waiting.append((now_s + self.delay_s, packet))

    def give(self, now_s: float) -> float:
        """Hand over what is due; when the next is (infinity: none waits)."""
        while self.waiting and self.waiting[0][0] <= now_s + LATE_S:
            try:
                os.write(self.target, self.waiting.popleft()[1])
            except OSError:  # the device is down or its queue full: a lost packet, as anywhere
                continue
        return self.waiting[0][0] if self.waiting else float("inf")


def open_tun(where: str, mtu: int) -> int:
    """A TUN device in that namespace; its descriptor works from any other."""
    path, _, device = where.rpartition(":")
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as home, open(path) as space:
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = IFF_TUN | IFF_NO_PI
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
        settings = ["mtu", str(mtu), "txqueuelen", str(PACKETS_MAX)]
        subprocess.run(["ip", "link", "set", device, *settings], check=True)
        if libc.setns(home.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot leave the namespace")
    return descriptor


def main() -> None:
    mtu = int(sys.argv[1])
    directions = []
    for position in range(2, len(sys.argv), 3):
        one, other = (open_tun(sys.argv[position + end], mtu) for end in (0, 1))
        delay_s = float(sys.argv[position + 2])
        directions += [Direction(one, other, delay_s, mtu), Direction(other, one, delay_s, mtu)]
    by_source = {direction.source: direction for direction in directions}
    poll = select.poll()
    for source in by_source:
        poll.register(source, select.POLLIN)
    print("ready", flush=True)
    while True:
        next_s = min(direction.give(time.monotonic()) for direction in directions)
        wait_s = min(max(next_s - time.monotonic(), 0.0), 60.0)
        for source, _ in poll.poll(wait_s * 1000):
            by_source[source].take(time.monotonic())


if __name__ == "__main__":
    main()
