"""A guard that knows bans says what the guard behind it says, but to who is banned."""

from __future__ import annotations

from typing import Any, cast

import pytest

from atoll.collectives.errors import AddressFullError
from atoll.peer.authority.policy import OpenAdmission
from atoll.peer.net.connection_limits import MEMBERS_PER_ADDRESS_MAX
from atoll.peer.verify.admission_chain import AdmissionChain
from atoll.peer.verify.ban_list import BanList


def test_nothing_of_a_guard_is_left_to_its_base() -> None:
    asked = {
        name for name, value in vars(OpenAdmission).items() if callable(value) and name[0] != "_"
    }
    assert asked <= vars(AdmissionChain).keys()


def test_peers_of_one_address_are_counted_as_the_guard_says() -> None:
    admission = AdmissionChain(OpenAdmission(lambda: None), cast(Any, BanList))
    here = ["203.0.113.7"] * MEMBERS_PER_ADDRESS_MAX
    admission.check_address("203.0.113.7", here[1:])
    with pytest.raises(AddressFullError):
        admission.check_address("203.0.113.7", here)
