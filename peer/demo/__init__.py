"""Run ``atoll demo``: a run on this machine, a kill in the middle of it, and what became of it."""
