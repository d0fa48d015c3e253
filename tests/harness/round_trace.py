"""One committed round, traced in two daemons and two trainers: through which functions it runs.

    python tests/harness/round_trace.py [--functions]

Prints, for a trainer, a member and the coordinator, how many functions of ours in how many files
ran between the last inner step of a round and its commit, and how often the trainer waited for an
answer of its daemon. Functions that also run while nothing happens (heartbeats, timers) are counted
apart. ``--functions`` lists the others.

The processes run this file as well: ``daemon`` and ``trainer`` in place of ``--functions``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.processes import Fleet, Peer, Process, until

ROOT = Path(__file__).parents[2]
FOLDERS = tuple(
    f"{ROOT}{os.sep}{name}{os.sep}" for name in ("peer", "collectives", "optim", "atoll")
)
WARM_ROUNDS = 2  # the first is INIT, and what runs once runs in them
IDLE_S = 2.0  # two heartbeats and more
ELEMENTS = 64  # parameters: one chunk
ASKS = ("ipc_client.py", "IpcClient.ask")  # each call of it waits for the daemon


# ---------------------------------------------------------------- in each process


class Tracer:
    """Counts calls of our functions of all threads from one SIGUSR2 to the next."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._on = False
        self._calls: Counter[CodeType] = Counter()
        signal.signal(signal.SIGUSR2, self._toggle)
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if self._on and event == "call":
            self._calls[frame.f_code] += 1

    def _toggle(self, *_: object) -> None:
        self._on = not self._on
        if self._on:
            self._calls.clear()
            self._out.with_suffix(".on").touch()
        else:
            self._write()

    def _write(self) -> None:
        calls: Counter[str] = Counter()
        for code, count in list(self._calls.items()):
            path = os.path.realpath(code.co_filename)
            if path.startswith(FOLDERS):
                calls[f"{path.removeprefix(f'{ROOT}{os.sep}')}:{code.co_qualname}"] += count
        whole = self._out.with_suffix(".part")
        whole.write_text(json.dumps(calls))
        whole.rename(self._out)


def daemon(arguments: list[str]) -> int:
    from atoll.peer.cli import main as cli

    Tracer(Path(os.environ["ROUND_TRACE_OUT"]))
    return cli.main(arguments)


def trainer(home: str, go: str) -> int:
    import torch

    import atoll

    Tracer(Path(os.environ["ROUND_TRACE_OUT"]))
    session = atoll.connect(home)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(ELEMENTS // 2 - 1, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    atoll.DiLoCo(model, inner, sync_every=1, peer=session, min_trainers=2)
    while not Path(go, "end").exists():
        if not Path(go, str(session.round + 1)).exists():
            time.sleep(0.01)
            continue
        loss = model(torch.ones(1, ELEMENTS // 2 - 1)).square().sum()
        loss.backward()
        inner.step()
        inner.zero_grad()
        print(json.dumps({"round": session.round}), flush=True)
    session.close()
    return 0


# ---------------------------------------------------------------- the four of them


@dataclass(frozen=True)
class Trace:
    """Hold what one process ran through: calls by "file:function", in a round and while idle."""

    in_round: dict[str, int]
    idle: dict[str, int]

    @property
    def of_the_round(self) -> list[str]:
        return sorted(self.in_round.keys() - self.idle.keys())

    @property
    def files(self) -> set[str]:
        return {name.partition(":")[0] for name in self.in_round}

    @property
    def asks(self) -> int:
        """How often it waited for an answer of its daemon."""
        file, function = ASKS
        return sum(n for name, n in self.in_round.items() if name.endswith(f"{file}:{function}"))


def trace_round(folder: Path) -> dict[str, Trace]:
    """Trace the third round of two peers. Keys: "coordinator", "member", "trainer"."""
    program = (__file__, "daemon")
    outs = {name: folder / f"{name}.json" for name in ("a", "b", "trainer-a", "trainer-b")}
    go = folder / "go"
    go.mkdir()
    run = Fleet(folder)
    try:
        run.peers["a"] = up = Peer(
            folder / "a",
            "up",
            "--run",
            "traced",
            "--listen",
            "127.0.0.1:0",
            "--probes",
            "off",
            program=program,
            ROUND_TRACE_OUT=str(outs["a"]),
        )
        invite = up.invite
        word = folder / "invite"
        word.write_text(invite)
        run.peers["b"] = Peer(
            folder / "b",
            "join",
            "--invite-file",
            str(word),
            "--listen",
            "127.0.0.1:0",
            "--probes",
            "off",
            program=program,
            ROUND_TRACE_OUT=str(outs["b"]),
        )
        run.sees("a", 2)
        processes: dict[str, Process] = {**run.peers}
        for name in "ab":
            out = outs[f"trainer-{name}"]
            command = [sys.executable, __file__, "trainer", str(folder / name), str(go)]
            log = folder / f"trainer-{name}.log"
            processes[f"trainer-{name}"] = Process(command, log, ROUND_TRACE_OUT=str(out))
        try:
            for number in range(1, WARM_ROUNDS + 2):
                (go / str(number)).touch()
            _reached(processes, 1 + WARM_ROUNDS)
            idle = _recorded(processes, outs, lambda: time.sleep(IDLE_S))

            def one_round() -> None:
                (go / str(WARM_ROUNDS + 2)).touch()
                _reached(processes, 2 + WARM_ROUNDS)

            found = _recorded(processes, outs, one_round)
            leads = run.coordinator
        finally:
            (go / "end").touch()
            for name in ("trainer-a", "trainer-b"):
                if name in processes:
                    processes[name].ends()
    finally:
        run.close()
    other = "b" if leads == "a" else "a"
    names = {"coordinator": leads, "member": other, "trainer": f"trainer-{leads}"}
    return {role: Trace(found[name], idle[name]) for role, name in names.items()}


def _reached(processes: Mapping[str, Process], number: int) -> None:
    for name in ("trainer-a", "trainer-b"):

        def there(trainer: Process = processes[name]) -> bool:
            assert trainer.popen.poll() is None, trainer.text
            return any(line.get("round") == number for line in trainer.lines)

        until(there, f"{name} reaches round {number}", processes[name])


def _recorded(
    processes: Mapping[str, Process], outs: Mapping[str, Path], act: Callable[[], None]
) -> dict[str, dict[str, int]]:
    for name, process in processes.items():
        outs[name].unlink(missing_ok=True)
        outs[name].with_suffix(".on").unlink(missing_ok=True)
        process.kill(signal.SIGUSR2)
    for name in processes:
        until(lambda name=name: outs[name].with_suffix(".on").exists(), f"{name} traces")
    act()
    for process in processes.values():
        process.kill(signal.SIGUSR2)
    for name in processes:
        until(lambda name=name: outs[name].exists(), f"{name} writes its trace")
    return {name: json.loads(outs[name].read_text()) for name in processes}


def main() -> int:
    if sys.argv[1:2] == ["daemon"]:
        return daemon(sys.argv[2:])
    if sys.argv[1:2] == ["trainer"]:
        return trainer(*sys.argv[2:])
    with tempfile.TemporaryDirectory() as folder:
        traces = trace_round(Path(folder))
    for role, trace in traces.items():
        print(
            f"{role:<12} {len(trace.in_round):4} functions in {len(trace.files):3} files,"
            f" {len(trace.of_the_round):3} of them for the round alone; waits for the daemon:"
            f" {trace.asks}"
        )
        if "--functions" in sys.argv:
            print("".join(f"    {name}\n" for name in trace.of_the_round))
    every = set().union(*(trace.in_round for trace in traces.values()))
    files = {name.partition(":")[0] for name in every}
    print(f"{'together':<12} {len(every):4} functions in {len(files):3} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
