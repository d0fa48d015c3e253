"""What the forwarder of `atoll lab` manages: packets a second, rate, delay, loss. Needs root.

    python tests/benchmarks/netlab.py [--seconds 2]

The senders and receivers share the cores with the forwarder. Its own share is what the kernel
accounts to it, and that includes the receiving hosts' TCP, which runs where a packet is delivered.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from atoll.peer.lab.lab import Lab
from atoll.peer.lab.settings import Counters

PORT = 5000
UDP_SEGMENT = 103  # one call, many packets: Python alone would be slower than what it measures
PAYLOAD_SHARE = 1448 / 1500  # TCP's of a full packet
RATE_MBIT, RTT_MS = 100.0, 50.0
PINGS = 100
SENDER = """
import socket, sys, time
end_s = time.monotonic() + 60
while True:
    try:
        link = socket.create_connection((sys.argv[1], {port}))
        break
    except OSError:
        time.sleep(0.05)
while time.monotonic() < end_s:
    link.sendall(bytes(1 << 16))
"""
RECEIVER = """
import os, socket
link, _ = socket.create_server((os.environ["ATOLL_LAB_ADDRESS"], {port})).accept()
space = bytearray(1 << 18)
while link.recv_into(space):
    pass
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    seconds = parser.parse_args().seconds
    load = os.getloadavg()[0]
    print(
        f"{os.cpu_count()} cores, load {load:.1f} at the start; core: the forwarder's share of one"
    )
    flood(seconds, 64)
    flood(seconds, 1472)
    streams(seconds, 2)
    streams(seconds, 4)
    delays()
    loss()


def say(what: str, found: str) -> None:
    print(f"{what:<66} {found}", flush=True)


def cpu_s(lab: Lab) -> float:
    """Of the forwarder, so far."""
    name = lab.space(0).removesuffix("-h0").encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if name in (entry / "cmdline").read_bytes().split(b"\0")[1:2]:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
        except FileNotFoundError:
            continue
    raise RuntimeError("there is no forwarder")


def watch(lab: Lab, seconds: float) -> tuple[list[Counters], list[Counters], float, float]:
    """(counters before, after, seconds between, the forwarder's share of a core)."""
    before, used_s, begin_s = [lab.counters(h) for h in range(lab.hosts)], cpu_s(lab), time.time()
    time.sleep(seconds)
    after, took_s = [lab.counters(h) for h in range(lab.hosts)], time.time() - begin_s
    return before, after, took_s, (cpu_s(lab) - used_s) / took_s


def flood(seconds: float, size: int) -> None:
    """As many packets as can be sent, without a rate or a delay."""
    stop = threading.Event()
    with Lab(2) as lab, lab.socket(1, socket.SOCK_DGRAM) as receiver:
        receiver.bind((lab.address(1), PORT))
        with lab.socket(0, socket.SOCK_DGRAM) as sender:
            sender.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, size)
            data = bytes(size * min(64, 65_000 // size))

            def send() -> None:
                while not stop.is_set():
                    sender.sendto(data, (lab.address(1), PORT))

            thread = threading.Thread(target=send)
            thread.start()
            time.sleep(0.2)
            before, after, took_s, core = watch(lab, seconds)
            stop.set()
            thread.join()
    packets = (after[1].received_packets - before[1].received_packets) / took_s
    bits = (after[1].received_bytes - before[1].received_bytes) * 8 / took_s
    found = f"{packets:10,.0f} packets/s, {bits / 1e9:.2f} Gbit/s, {core:.0%} core"
    say(f"UDP, {size + 28} bytes, no rate, no delay", found)


def streams(seconds: float, hosts: int) -> None:
    """One TCP stream from each host to the next (of two: one stream), when windows have grown."""
    senders = range(1 if hosts == 2 else hosts)
    with Lab(hosts, rate_mbit=RATE_MBIT, rtt_ms=RTT_MS) as lab:
        for host in senders:
            to = (host + 1) % hosts
            lab.start(to, sys.executable, "-c", RECEIVER.format(port=PORT))
            lab.start(host, sys.executable, "-c", SENDER.format(port=PORT), lab.address(to))
        time.sleep(4)
        before, after, took_s, core = watch(lab, seconds)
    shares = []
    for host in senders:
        to = (host + 1) % hosts
        bits = (after[to].received_bytes - before[to].received_bytes) * 8e-6 / took_s
        shares.append(bits / RATE_MBIT)
    packets = sum(
        a.received_packets - b.received_packets for a, b in zip(after, before, strict=True)
    )
    kinds = f"{hosts} hosts, {RATE_MBIT:g} Mbit/s, {RTT_MS:g} ms, {len(senders)} TCP streams"
    found = f"{min(shares):.1%} to {max(shares):.1%} of the rate with headers, "
    say(kinds, found + f"{packets / took_s:,.0f} packets/s, {core:.0%} core")


def delays() -> None:
    """Round trips that the kernel answers, on an idle network and beside a full link."""
    for rtt_ms in (0.0, 10.0, RTT_MS):
        with Lab(2, rtt_ms=rtt_ms, rate_mbit=RATE_MBIT) as lab:
            say(f"round trip of {rtt_ms:g} ms, idle", describe(pings_ms(lab, 0, 1)))
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(4, rtt_ms=RTT_MS, rate_mbit=RATE_MBIT))
        lab.start(1, sys.executable, "-c", RECEIVER.format(port=PORT))
        lab.start(0, sys.executable, "-c", SENDER.format(port=PORT), lab.address(1))
        time.sleep(2)
        what = f"round trip of {RTT_MS:g} ms, two other hosts fill a link"
        say(what, describe(pings_ms(lab, 2, 3)))


def pings_ms(lab: Lab, source: int, target: int) -> list[float]:
    found_ms = []
    with lab.socket(source, socket.SOCK_RAW, protocol=socket.IPPROTO_ICMP) as raw:
        raw.settimeout(10)
        for number in range(PINGS):
            request = struct.pack("!BBHHH", 8, 0, 0xFFFF - (0x0800 + number), 0, number)
            time.sleep(0.005)
            sent_s = time.perf_counter()
            raw.sendto(request, (lab.address(target), 0))
            raw.recv(100)
            found_ms.append((time.perf_counter() - sent_s) * 1e3)
    return sorted(found_ms)


def describe(found_ms: list[float]) -> str:
    low, high = (found_ms[int(share * (len(found_ms) - 1))] for share in (0.1, 0.9))
    return f"median {statistics.median(found_ms):.2f} ms, 10 % {low:.2f}, 90 % {high:.2f}"


def loss() -> None:
    count, percent = 50_000, 1.0
    with Lab(2, loss=percent) as lab, lab.socket(0, socket.SOCK_DGRAM) as sender:
        for number in range(count):
            sender.sendto(b"?", (lab.address(1), PORT))
            if number % 500 == 499:
                time.sleep(0.005)
        time.sleep(0.2)
        counted = lab.counters(0)
    lost = counted.dropped_loss / counted.sent_packets
    sigma = (percent / 100 * (1 - percent / 100) / count) ** 0.5
    kept = counted.sent_packets / count
    say(
        f"loss of {percent:g} %, {count:,} packets",
        f"{lost:.3%} lost (one standard deviation: {sigma:.3%}), {kept:.2%} of the packets seen",
    )


if __name__ == "__main__":
    main()
