"""Run a daemon and a training script as one, and end both in order: ``atoll run``."""
