"""Carry out ``atoll checkpoint inspect``, ``verify`` and ``export``.

The options of daemons for checkpoints are here too.
"""

from __future__ import annotations

import argparse
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from atoll.optim.manifest import Manifest
    from atoll.peer.checkpoint.reader import Checkpoint


EVERY_DEFAULT = 10  # rounds between two checkpoints of one peer; peers take turns
LISTED_MAX = 20  # parameters that still fit on one screen
_PATH_HELP = "a checkpoint, or a folder of them: then the latest that is whole"


def add_checkpoint_options(daemon: argparse.ArgumentParser) -> None:
    """Add ``--checkpoint DIR --every N`` to a command that starts a daemon."""
    daemon.add_argument("--checkpoint", metavar="DIR", help="write checkpoints into this folder")
    daemon.add_argument(
        "--every",
        type=_rounds,
        metavar="N",
        help=f"rounds between two of this peer's (default {EVERY_DEFAULT}); peers take turns",
    )


def add_checkpoint_verbs(verbs: Any) -> None:
    """Add ``checkpoint`` to the sub-commands of ``atoll``."""
    checkpoint = verbs.add_parser("checkpoint", help="look at, check or export a checkpoint")
    actions = checkpoint.add_subparsers(required=True, metavar="ACTION")

    inspect = actions.add_parser("inspect", help="say what it is; of one, without reading it all")
    inspect.set_defaults(command=_inspect)

    verify = actions.add_parser("verify", help="read every byte and say whether it is whole")
    verify.add_argument(
        "--invite", metavar="FILE", help="check that it is of the run of the invite in this file"
    )
    verify.set_defaults(command=_verify)

    export = actions.add_parser("export", help="plain safetensors of the outer parameters")
    export.add_argument("--out", metavar="FILE", help="default RUN-ROUND.safetensors, here")
    export.set_defaults(command=_export)

    for action in (inspect, verify, export):
        action.add_argument("path", metavar="PATH", help=_PATH_HELP)


def _rounds(text: str) -> int:
    number = int(text)  # argparse makes a usage error of ValueError
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number of rounds")
    return number


# ---------------------------------------------------------------- inspect, verify


def _inspect(parsed: argparse.Namespace) -> int:
    from atoll.peer.checkpoint.reader import MANIFEST_FILE, open_checkpoint, open_latest

    path = Path(parsed.path)
    opener = open_checkpoint if (path / MANIFEST_FILE).exists() else open_latest
    with opener(path) as checkpoint:
        _say_passed_over(checkpoint.passed_over)
        print(_describe(checkpoint), flush=True)
    return 0


def _say_passed_over(passed_over: tuple[str, ...]) -> None:
    """Print the later checkpoints that are not whole: the next one must not hide them."""
    for what in passed_over:
        print(f"passed over: {what}")


def _verify(parsed: argparse.Namespace) -> int:
    from atoll.peer.checkpoint.reader import open_latest
    from atoll.peer.cli.admission import read_invite
    from atoll.peer.membership.view import short

    invite = read_invite(parsed.invite) if parsed.invite else None
    run, secret = (invite.run, invite.secret) if invite else (None, None)
    with open_latest(parsed.path, run=run, secret=secret) as checkpoint:
        _say_passed_over(checkpoint.passed_over)
        manifest = checkpoint.manifest
        print(
            f"OK {checkpoint.path.name}: run {manifest.run}, round {manifest.round},"
            f" {manifest.chunks} chunks, signed by {short(manifest.peer)}"
        )
    if invite is None:
        print("   not checked: whether a member of the run wrote it (--invite checks that)")
    return 0


def _describe(checkpoint: Checkpoint) -> str:
    from atoll.optim.run_spec import parse_blob
    from atoll.peer.membership.view import plain, short

    manifest = checkpoint.manifest
    spec, parameters = parse_blob(manifest.blob)
    names = ", ".join(short(peer) for peer in manifest.members)
    written = datetime.fromtimestamp(manifest.unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lines = {
        "checkpoint": checkpoint.path.name,
        "run": f"{manifest.run} ({spec.method}, sync_every {spec.sync_every}, {spec.codec})",
        "round": manifest.round,
        "chain": manifest.chain.hex(),
        "digest": manifest.digest.hex(),
        "lineage": manifest.lineage.hex(),
        "members": f"{len(manifest.members)} in view {manifest.view}: {names}",
        "writer": f"{short(manifest.peer)}, incarnation {manifest.incarnation}",
        "time": f"{written}, atoll {plain(manifest.version)}",
        "size": f"{manifest.file_bytes:,} bytes, {manifest.chunks} chunks",
        "parameters": f"{parameters.elements:,} in {len(parameters.parameters)} tensors",
    }
    text = [f"{key:<11} {value}" for key, value in lines.items()]
    text += [f"{'':<11} {p.name}: {p}" for p in parameters.parameters[:LISTED_MAX]]
    more = len(parameters.parameters) - LISTED_MAX
    return "\n".join([*text, *([f"{'':<11} ... and {more} more"] if more > 0 else [])])


# ---------------------------------------------------------------- export


def _export(parsed: argparse.Namespace) -> int:
    from atoll.peer.checkpoint.reader import first_whole

    def export(checkpoint: Checkpoint) -> Path:
        manifest = checkpoint.manifest
        out = Path(parsed.out or ".")
        if out.is_dir():
            out /= f"{manifest.run}-{manifest.round}.safetensors"
        export_parameters(checkpoint, out)
        return out

    checkpoint, out, passed_over = first_whole(Path(parsed.path), None, None, export)
    _say_passed_over(passed_over)
    total, number = checkpoint.layout.grid.total, checkpoint.manifest.round
    print(f"{out}: {total:,} parameters of round {number}")
    return 0


def export_parameters(checkpoint: Checkpoint, out: Path) -> None:
    """Write the outer parameters with their own names, shapes and dtypes, as safetensors.

    The state is read once, chunk by chunk, each written from the memory in which it was checked.
    float32 is rounded to nearest even where the dtype is narrower. ``out`` is replaced when all of
    it is on the disk. Raises CheckpointError and OSError.
    """
    import numpy as np

    from atoll.peer.checkpoint.format import export_header

    layout = checkpoint.layout
    header = export_header(layout.manifest, checkpoint.manifest.round)
    places = _ParameterPlaces(layout.manifest, len(header))
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with temporary.open("xb") as file:
            file.write(header)
            for chunk, data in checkpoint.chunks(checkpoint.buffer()):
                lo, hi = layout.grid.bounds(chunk)
                theta = np.frombuffer(data[: 4 * (hi - lo)], np.float32)
                for start, end, dtype, at in places.within(lo, hi):
                    file.seek(at)
                    file.write(CASTS[dtype](theta[start - lo : end - lo]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class _ParameterPlaces:
    """Find where the parameters of a stretch of θ lie in an export.

    ``header_bytes`` is the length of the export's header.
    """

    def __init__(self, manifest: Manifest, header_bytes: int) -> None:
        from atoll.peer.checkpoint.format import DTYPE_BYTES, export_order

        self._at: dict[str, tuple[int, int]] = {}  # first byte, bytes of an element
        for parameter in export_order(manifest):
            self._at[parameter.name] = header_bytes, DTYPE_BYTES[parameter.dtype]
            header_bytes += DTYPE_BYTES[parameter.dtype] * parameter.size
        # In the order of θ.
        self._parameters = [p for p in manifest.parameters if p.size and not p.is_padding]
        self._bounds = [manifest.offsets[p.name] for p in self._parameters]
        self._ends = [end for _, end in self._bounds]

    def within(self, lo: int, hi: int) -> Iterator[tuple[int, int, str, int]]:
        """Yield (start, end, dtype, first byte in the export) of each parameter in θ[lo:hi].

        ``start`` and ``end`` are elements of θ, within the stretch.
        """
        for i in range(bisect_right(self._ends, lo), len(self._ends)):
            first, last = self._bounds[i]
            if first >= hi:
                return
            start, end = max(lo, first), min(hi, last)
            parameter = self._parameters[i]
            at, element_bytes = self._at[parameter.name]
            yield start, end, parameter.dtype, at + element_bytes * (start - first)


def _bfloat16(values: NDArray[np.float32]) -> bytes:
    import numpy as np

    from atoll.optim.pseudo_gradient import round_to_working

    rounded = np.empty_like(values)
    round_to_working(values, "bfloat16", rounded)
    return (rounded.view(np.uint32) >> 16).astype("<u2").tobytes()


def _float16(values: NDArray[np.float32]) -> bytes:
    import numpy as np

    with np.errstate(over="ignore"):  # becomes Inf, as in torch
        return values.astype("<f2").tobytes()


CASTS: dict[str, Callable[[NDArray[np.float32]], bytes]] = {
    "bfloat16": _bfloat16,
    "float16": _float16,
    "float32": lambda values: values.astype("<f4").tobytes(),
    "float64": lambda values: values.astype("<f8").tobytes(),
}
