"""These tests make networks: without root, TUN devices or a C compiler they are skipped.

Those with routers are skipped without nftables.
"""

from __future__ import annotations

import shutil

import pytest

from atoll.collectives.errors import ConfigError
from atoll.peer.lab.forwarder import COMPILERS
from atoll.peer.lab.routers import check_tools
from atoll.peer.lab.spaces import check_possible


@pytest.fixture(scope="session", autouse=True)
def _possible() -> None:
    try:
        check_possible()
    except ConfigError as error:
        pytest.skip(error.what)


@pytest.fixture(autouse=True)
def _forwarder(request: pytest.FixtureRequest) -> None:
    """Networks of the kernel's own netem need none."""
    if request.path.name != "test_netem.py" and not any(map(shutil.which, COMPILERS)):
        pytest.skip(f"a lab needs a C compiler, one of {', '.join(COMPILERS)}")


@pytest.fixture(scope="session")
def routers() -> None:
    """Skip where no router can be made."""
    try:
        check_tools()
    except ConfigError as error:
        pytest.skip(error.what)
