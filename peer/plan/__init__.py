"""Predict the rounds of a run, and choose its method and settings by that: ``atoll plan``."""
