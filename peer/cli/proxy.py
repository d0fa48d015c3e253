"""Take the options of a machine that is shut in: a SOCKS5 proxy, and the router at home.

The password of a proxy is kept from whoever looks at command lines.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from atoll.collectives.errors import ConfigError
from atoll.peer.net.proxy import Proxy, parse_proxy
from atoll.peer.net.upnp import is_installed

VARIABLE = "ATOLL_PROXY"
_OPTION = re.compile(r"--p[a-z]*")  # --proxy, also abbreviated
_WITH_PASSWORD = re.compile(r"socks5h?://.*@.*", re.DOTALL)


def add_proxy_option(verb: Any) -> None:
    verb.add_argument(
        "--proxy",
        type=proxy_url,
        metavar="URL",
        help="dial all other machines through this SOCKS5 proxy, which resolves names, too:"
        " socks5://[USER:PASSWORD@]HOST:PORT; better in ATOLL_PROXY where there is a password",
    )


def add_upnp_option(verb: Any) -> None:
    verb.add_argument(
        "--upnp",
        choices=("on", "off"),
        help="on: at the start, ask the router at home to forward the port to this peer; the"
        " default where atoll[upnp] is installed. Without a private address, with --advertise or"
        " --proxy nothing is asked",
    )


def wants_upnp(parsed: argparse.Namespace) -> bool:
    """Return whether a router is to be asked. Raises ConfigError where the library is missing."""
    if parsed.upnp == "on" and not is_installed():
        what = "--upnp on needs the library miniupnpc, which is not installed"
        raise ConfigError(what, fix="pip install 'atoll[upnp]', or leave --upnp out")
    return parsed.upnp != "off" and is_installed()


def proxy_url(text: str) -> str:
    """Return the URL of a proxy as it is. Raises argparse's error, which does not quote it."""
    try:
        parse_proxy(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{error.what}: {error.fix}") from None
    return text


def given_proxy(parsed: argparse.Namespace) -> Proxy | None:
    return parse_proxy(parsed.proxy) if parsed.proxy else None


def hide_password(words: Sequence[str]) -> tuple[list[str], str]:
    """Return a command line without a proxy whose password stands in it, and that proxy, or "".

    Every user of a machine can read the command lines of all processes, and the environment only
    of processes of his own. What stands behind ``--`` is another program's.
    """
    kept: list[str] = []
    found = ""
    own = words.index("--") if "--" in words else len(words)
    for word in words[:own]:
        option, equals, url = word.partition("=")
        if equals and _OPTION.fullmatch(option) and _WITH_PASSWORD.fullmatch(url):
            found = url
        elif kept and _OPTION.fullmatch(kept[-1]) and _WITH_PASSWORD.fullmatch(word):
            found = word
            del kept[-1]
        else:
            kept.append(word)
    return [*kept, *words[own:]], found
