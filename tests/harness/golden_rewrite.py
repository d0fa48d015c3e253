"""Write golden files anew, all of them or those that are named: `make golden-rewrite`.

    python -m harness.golden_rewrite wire.txt help.txt

What is left out are the traces of the simulator: `make traces ARGS=--rewrite`. Read the difference
before you commit it: these files are what must not change without a reason.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import golden
from harness.golden_bytes import SIGNED_HEAD, WIRE_HEAD, signed_lines, wire_lines
from harness.golden_commands import EXIT_HEAD, HELP_HEAD, exit_lines, help_lines
from harness.golden_digests import DIGESTS_HEAD, digest_lines
from harness.golden_status import STATUS_HEAD, status_lines, statuses
from harness.golden_text import write

__all__ = ["REWRITE", "main"]


def _status() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write("status.txt", STATUS_HEAD, status_lines(statuses(Path(folder))))


REWRITE: dict[str, Callable[[], None]] = {
    "wire.txt": lambda: write("wire.txt", WIRE_HEAD, wire_lines()),
    "signed.txt": lambda: write("signed.txt", SIGNED_HEAD, signed_lines()),
    "digests.txt": lambda: write("digests.txt", DIGESTS_HEAD, digest_lines()),
    "help.txt": lambda: write("help.txt", HELP_HEAD, help_lines()),
    "exit_codes.txt": lambda: write("exit_codes.txt", EXIT_HEAD, exit_lines()),
    "status.txt": _status,
    "histories": golden.rewrite,
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in REWRITE]
    if unknown:
        print(f"no golden files of ours: {', '.join(unknown)}; there are {', '.join(REWRITE)}")
        return 2
    for name in names or REWRITE:
        REWRITE[name]()
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
