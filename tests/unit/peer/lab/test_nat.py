"""What routers a lab may be asked for, where they stand, and how they are said in text."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.collectives.errors import ConfigError
from atoll.peer.cli import lab as lab_verb
from atoll.peer.cli.main import main
from atoll.peer.lab import lab, routers
from atoll.peer.lab.nat import Nat, check_lines, line_names, read_hosts, read_nat, routers_of
from atoll.peer.lab.settings import check_families


@pytest.mark.parametrize(
    ("text", "nat"),
    [
        ("full", Nat("full")),
        ("restricted", Nat()),
        ("symmetric,levels=2", Nat("symmetric", levels=2)),
        ("restricted,expires=30,expired=reset", Nat(expires_s=30, expired="reset")),
        ("restricted,lan=1,levels=1", Nat(lan=1)),
        ("full,hairpin=1", Nat("full", hairpin=1)),
    ],
)
def test_a_router_in_words(text: str, nat: Nat) -> None:
    assert read_nat(text) == nat


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("", "full, restricted or symmetric, not ''"),
        ("cone", "not 'cone'"),
        ("full,", "no option ''"),
        ("full,level=2", "no option 'level': levels, expires"),
        ("full,levels", "levels is a whole number, not ''"),
        ("full,levels=3", "1 or 2 levels of routers, not 3"),
        ("full,levels=0", "not 0"),
        ("full,expires=-1", "expires is a whole number, not '-1'"),
        ("full,expires=2.5", "not '2.5'"),
        ("full,expires=432001", "0 \\(never\\) to 432000 seconds, not 432001"),
        ("full,expired=refuse", "drop or reset, not 'refuse'"),
        ("full,lan=256", "from 0 to 255, not 256"),
        ("full,lan=1,lan=2", "lan is said twice"),
        ("full,hairpin=2", "hairpin is 0, or 1 for a full router, not 2 for a full one"),
        ("restricted,hairpin=1", "not 1 for a restricted one"),
    ],
)
def test_what_no_router_can_be_is_refused(text: str, about: str) -> None:
    with pytest.raises(ConfigError, match=about):
        read_nat(text)


def test_hosts_in_words() -> None:
    assert read_hosts("3") == (3,)
    assert read_hosts("2+3") == (2, 3)
    for wrong in ("", "+", "2+", "x", "-1", "2,3"):
        with pytest.raises(ConfigError, match="a host is a whole number"):
            read_hosts(wrong)


@pytest.mark.parametrize(
    ("nat", "about"),
    [
        ({4: "full"}, "no host 4"),
        ({(0, 4): "full"}, "no host 4"),
        ({0: "full", (1, 0): "full"}, "host 0 is named twice"),
        ({(1, 1): "full"}, "host 1 is named twice"),
        ({1: "fuller"}, "not 'fuller'"),
    ],
)
def test_hosts_that_cannot_be_behind_a_router(nat: Any, about: str) -> None:
    with pytest.raises(ConfigError, match=about):
        routers_of(nat, 4)


def test_where_routers_stand() -> None:
    one, two = routers_of({(3, 1): "restricted", 4: Nat("full", levels=2, lan=7)}, 6)
    assert line_names((one, two), 6) == ["h0", "r1", "h2", "-", "c4", "h5"]
    assert one.inside == ("h1", "h3")
    assert two.inside == ("h4", "r4")
    assert [one.address(host) for host in (1, 3)] == ["192.168.101.2", "192.168.101.3"]
    assert two.address(4) == "192.168.7.2"
    assert (one.gateway, two.gateway) == ("192.168.101.1", "192.168.7.1")
    assert two.carrier_side == ("100.64.4.1", "100.64.4.2")


def test_ip_versions() -> None:
    check_families({0: "4", 1: "6", 2: "46"}, 3)
    for wrong in ({0: "5"}, {0: ""}, {3: "4"}):
        with pytest.raises(ConfigError):
            check_families(wrong, 3)
    with pytest.raises(ConfigError, match="host 1 is behind a router"):
        check_lines(routers_of({1: "full"}, 3), {1: "46"})


def test_a_missing_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "TOOLS", {"no-such-tool": "no-such-package"})
    with pytest.raises(ConfigError, match="need the command no-such-tool") as caught:
        routers.check_tools()
    assert caught.value.fix == "apt-get install no-such-package"


def test_routers_need_the_forwarder() -> None:
    assert lab._choose("auto", plain=False) is lab.Forwarder
    with pytest.raises(ConfigError, match="not netem"):
        lab._choose("netem", plain=False)


# ---------------------------------------------------------------- atoll lab


def test_a_router_on_the_command_line() -> None:
    assert lab_verb.host_nat("3=full") == ((3,), Nat("full"))
    assert lab_verb.host_nat("2+3=symmetric,expires=30") == ((2, 3), Nat("symmetric", expires_s=30))
    assert lab_verb.host_families("3=46") == (3, "46")
    assert lab_verb.host_families("0=6") == (0, "6")


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--nat", "3"], "argument --nat: '3' names no kind of router (for example: --nat"),
        (["--nat", "x=full"], "argument --nat: a host is a whole number, not 'x'"),
        (["--nat", "3=cone"], "a router is full, restricted or symmetric, not 'cone'"),
        (["--nat", "3=full,level=2"], "no option 'level'"),
        (["--ip", "3"], "argument --ip: '3' is not HOST=4, HOST=6 or HOST=46"),
        (["--ip", "2+3=6"], "'2+3=6' is not HOST=4"),
        (["--ip", "3=5"], "'3=5' is not HOST=4"),
    ],
)
def test_usage_errors_say_what_is_wrong(
    arguments: list[str], about: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["lab", *arguments])
    assert about in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--nat", "4=full"], "no host 4"),
        (["--nat", "3=full", "--nat", "3=full"], "host 3 is behind a router twice"),
        (["--nat", "3=full", "--nat", "2+3=full"], "host 3 is named twice"),
        (["--ip", "3=6", "--ip", "3=4"], "host 3 is given IP versions twice"),
        (["--ip", "3=6", "--nat", "3=full"], "host 3 is behind a router"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_made(
    arguments: list[str], about: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *arguments, "--", "true"]) == 2
    shown = capsys.readouterr().err
    assert about in shown
    assert "ATOLL-E10" in shown
