"""Run one command on every host of a lab at once: its output by host, its end, its exit code."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO

from atoll.peer.lab.lab import Lab

GRACE_S = 5.0  # after an interrupt, to end by itself; then SIGKILL
READ_BYTES = 1 << 16
READS_AT_THE_END = 64  # a pipe holds no more, unless somebody goes on writing
LINE_BYTES_MAX = 1 << 16  # a longer one is shown in pieces: memory stays bounded
SIGNALLED = 128  # a shell's exit code for a command that a signal ended is this much more


class _Output:
    """Show one stream of one host, line by line."""

    def __init__(self, host: int, source: IO[bytes], target: IO[bytes]) -> None:
        self.source = source
        self._prefix = f"[{host}] ".encode()
        self._target = target
        self._held = b""
        os.set_blocking(source.fileno(), False)

    def pass_on(self) -> bool:
        """Show what one read gives; return False where there is nothing to read, now or ever."""
        try:
            data = os.read(self.source.fileno(), READ_BYTES)
        except BlockingIOError:
            return False
        *lines, self._held = (self._held + data).split(b"\n")
        if not data or len(self._held) > LINE_BYTES_MAX:
            lines, self._held = [*lines, *filter(None, [self._held])], b""
        self._show(lines)
        return bool(data)

    def finish(self) -> None:
        """Show the rest. A process in the background may still hold the stream: never wait."""
        for _ in range(READS_AT_THE_END):
            if not self.pass_on():
                break
        self._show([*filter(None, [self._held])])
        self.source.close()

    def _show(self, lines: Sequence[bytes]) -> None:
        for line in lines:
            self._target.write(self._prefix + line + b"\n")
        self._target.flush()


def run_everywhere(lab: Lab, command: Sequence[str]) -> int:
    """Run a command on every host and show what it says, each line after ``[HOST]``.

    Returns the exit code of the first that failed, or 0 when all have ended without a failure. On
    Ctrl+C all are interrupted, killed after GRACE_S, and KeyboardInterrupt goes on from here; a
    second Ctrl+C kills them at once. A command that cannot be found has exit code 127.
    """
    processes: list[subprocess.Popen[bytes]] = []
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        for host in range(lab.hosts):
            processes.append(lab.start(host, *command, **pipes))
        return _watch(processes)
    except KeyboardInterrupt:
        _end(processes)
        raise
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _watch(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    first_failure = 0
    outputs: list[_Output] = []
    running: dict[int, subprocess.Popen[bytes]] = {}  # by descriptor of the process
    with selectors.DefaultSelector() as selector:
        for host, process in enumerate(processes):
            assert process.stdout is not None
            assert process.stderr is not None
            for source, target in (
                (process.stdout, sys.stdout.buffer),
                (process.stderr, sys.stderr.buffer),
            ):
                outputs.append(_Output(host, source, target))
                selector.register(source, selectors.EVENT_READ, outputs[-1])
            handle = os.pidfd_open(process.pid)
            running[handle] = process
            selector.register(handle, selectors.EVENT_READ)
        try:
            while running:
                for key, _ in selector.select():
                    if isinstance(key.data, _Output):
                        if not key.data.pass_on():  # it was ready, so this is its end
                            selector.unregister(key.fileobj)
                        continue
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    code = running.pop(key.fd).wait()
                    first_failure = first_failure or (SIGNALLED - code if code < 0 else code)
        finally:
            for handle in running:
                os.close(handle)
            for output in outputs:
                output.finish()
    return first_failure


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt the processes, and kill them after GRACE_S or at a second Ctrl+C.

    They are found by process id, with all that each has started in its session.
    """
    deadline_s = time.monotonic() + GRACE_S
    try:
        for process in processes:
            _signal(process, signal.SIGINT)
        for process in processes:
            process.wait(max(deadline_s - time.monotonic(), 0.0))
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        for process in processes:
            _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:  # its id is still its own
        os.killpg(process.pid, number)
