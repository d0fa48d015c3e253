"""Settings of all tests."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from atoll.peer.daemon.process import cap_arenas

cap_arenas()  # as every daemon does: tests of parts of one judge memory too

# These machines are shared and noisy: how long an example takes says nothing about the code.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Add in one order: how many threads there are decides the last bits."""
    import torch  # not where no test needs it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_configure() -> None:
    """Whoever starts the tests in the background of a script leaves SIGINT ignored, and so it would
    be in every process that they start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
