"""Routers of a lab that forward a port when they are asked by UPnP: miniupnpd, as on real ones."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from atoll.peer.lab.lab import Lab
from atoll.peer.lab.routers import add_rules
from atoll.peer.lab.spaces import enter_command
from harness.labnet import router_before
from harness.processes import Process, until

__all__ = ["COMMAND", "PUBLIC_IP", "forwarded", "start_upnp"]

COMMAND = "miniupnpd"
# What it says that its address is. The lab's own are private, and such a router refuses.
PUBLIC_IP = "8.8.4.4"
CONFIG = """
ext_ifname=eth0
ext_ip={public}
listening_ip={gateway}/24
ipv6_disable=yes
enable_upnp=yes
enable_natpmp=no
secure_mode=yes
system_uptime=yes
uuid=6d1a1c9e-0f0e-4c2d-9c1f-0a7011a70110
upnp_table_name=upnp
upnp_nat_table_name=upnp
upnp_forward_chain=forwarded
upnp_nat_chain=inwards
upnp_nat_postrouting_chain=outwards
lease_file={leases}
{allow}
deny 0-65535 0.0.0.0/0 0-65535
"""
ALLOW = "allow 1024-65535 0.0.0.0/0 1024-65535"
# Its chains, and questions that the lab's router lets in from its hosts.
RULES = """
table inet upnp {
    chain forward {
        type filter hook forward priority filter - 1; policy accept
        jump forwarded
    }
    chain prerouting {
        type nat hook prerouting priority dstnat - 1
        jump inwards
    }
    chain postrouting {
        type nat hook postrouting priority srcnat + 1
        jump outwards
    }
    chain forwarded { }
    chain inwards { }
    chain outwards { }
}
table ip filtering {
    chain here {
        iifname "to-*" accept
    }
}
"""


def start_upnp(
    lab: Lab, host: int, folder: Path, *, allow: str = ALLOW, leased: str = ""
) -> Process:
    """Run it on the router of a host, until it is killed. ``allow``: "" lets it refuse all.

    ``leased``: what it forwards already, a line each: TCP:29600:192.168.102.9:29600:0:another
    """
    router, space = router_before(lab, host)
    add_rules(space, RULES)
    config = folder / f"upnp{host}.conf"
    leases = folder / f"upnp{host}.leases"
    leases.write_text(leased)
    config.write_text(
        CONFIG.format(public=PUBLIC_IP, gateway=router.gateway, allow=allow, leases=leases)
    )
    command = shutil.which(COMMAND) or COMMAND
    pid_file = folder / f"upnp{host}.pid"
    words = [command, "-d", "-f", str(config), "-P", str(pid_file)]
    process = Process(enter_command(space, words), folder / f"upnp{host}.log")
    until(lambda: "HTTP listening on port" in process.text, "the router answers", process)
    return process


def forwarded(lab: Lab, host: int) -> str:
    """Return what the router of a host forwards, as its kernel has it."""
    _, space = router_before(lab, host)
    words = ["nft", "list", "chain", "inet", "upnp", "inwards"]
    return subprocess.check_output(enter_command(space, words), text=True)
