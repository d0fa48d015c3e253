"""Settings of all tests."""

from hypothesis import settings

# These machines are shared and noisy: how long an example takes says nothing about the code.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
