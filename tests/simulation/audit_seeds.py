"""Seeds of audited attempts, from the command line:

make simulate-audits SEEDS=0..10000
"""

from __future__ import annotations

import argparse
import sys

from simulation.audits import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate-audits")
    parser.add_argument("--seeds", default="0..1000", help="FIRST..END")
    first, _, end = parser.parse_args().seeds.partition("..")
    failed = 0
    for seed in range(int(first), int(end)):
        try:
            run(seed)
        except AssertionError as error:
            failed += 1
            print(error, flush=True)
    print(f"{int(end) - int(first)} seeds, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
