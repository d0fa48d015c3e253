"""Run the command line as ``python -m atoll.peer.cli``."""

import sys

from atoll.peer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
