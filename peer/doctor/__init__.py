"""Find out whether a machine can train in a run, and what to do if not: ``atoll doctor``."""
