"""Seeds through the machines that ship: `python -m simulation --help`, with tests/ in its path."""
