"""Find what lets a daemon into its run: the secret, and in a run with an authority its pass."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Any, NamedTuple

from atoll.collectives.errors import ConfigError, PassForgedError, PassMissingError, PassRunError
from atoll.peer.cli.proxy import VARIABLE, hide_password
from atoll.peer.net.connection_limits import MEMBERS_PER_ADDRESS_MAX
from atoll.peer.net.identity import Home, RunRecord
from atoll.peer.net.invite import SECRET_BYTES, Invite

COUNT_DIGITS_MAX = 4  # a run has 1024 members at most
INVITE_BYTES_MAX = 4096  # of a file or a line that holds one; the longest has 1.9 KB
_SCHEME = "atoll://"
# A word of a command line that has an invite with a secret in it, whatever stands around that.
_INVITE_WORD = re.compile(rf"(--[a-z-]+=)?.*?({_SCHEME}\S*#\S+).*", re.DOTALL)
_DESCRIPTOR = re.compile(r"/proc/self/fd/(\d+)")


def hide_secrets() -> None:
    """Start this very process again, if there is a secret among its arguments, without it.

    Every user of a machine can read the command lines of all processes, and an invite lets whoever
    has it into the run. The new life reads it from a pipe, and a proxy with a password from its
    environment. It has the same process id, folder and signals; nothing happens where the words of
    the command line are not known.
    """
    words, proxy = hide_password(sys.orig_argv)
    found = bool(proxy)
    for number, word in enumerate(words):
        match = _INVITE_WORD.fullmatch(word)
        if match is not None:
            reader, writer = os.pipe()
            os.write(writer, os.fsencode(match[2])[:INVITE_BYTES_MAX])  # a pipe takes 64 KiB
            os.close(writer)
            os.set_inheritable(reader, True)
            words[number] = f"{match[1] or ''}/proc/self/fd/{reader}"
            found = True
    if found and sys.executable:
        environment = os.environ | ({VARIABLE: proxy} if proxy else {})
        os.execve(sys.executable, [sys.executable, *words[1:]], environment)


def given_invite(parsed: argparse.Namespace) -> Invite:
    """Return the invite of ``join`` or ``follow``: as an argument or in a file, not both."""
    if (parsed.address is None) == (parsed.invite_file is None):
        what = "two invites are given" if parsed.address is not None else "no invite is given"
        raise ConfigError(what, fix="give one: --invite-file FILE, or - to read standard input")
    return read_invite(parsed.invite_file or parsed.address)


def read_invite(given: str) -> Invite:
    """Return the invite that is given as itself, in a file or on standard input.

    ``given`` is the invite, the name of a file that holds it, or "-" for standard input. Raises
    ConfigError, which never shows what may be a secret.
    """
    shown = repr(given.partition("#")[0][:80])
    if given.startswith(_SCHEME):
        return Invite.parse(given)
    descriptor = _DESCRIPTOR.fullmatch(given)
    try:
        if given == "-":
            text = _invite_line()
        else:
            with open(int(descriptor[1]) if descriptor else given, "rb") as file:
                text = file.read(INVITE_BYTES_MAX).decode("utf-8", "replace")
    except OSError as error:
        what = f"{shown} is no invite (atoll://...) and no file that holds one: {error.strerror}"
        raise ConfigError(what, fix="get one: `atoll invite > FILE` on a member") from error
    found = next((word for word in text.split() if word.startswith(_SCHEME)), None)
    if found is None:
        what = f"{'standard input' if given == '-' else shown} holds no invite (atoll://...)"
        raise ConfigError(what, fix="get one: `atoll invite > FILE` on a member")
    return Invite.parse(found)


def _invite_line() -> str:
    """Read as far as the line with an invite: whoever pastes one need not end the input."""
    read = 0
    while read < INVITE_BYTES_MAX and (line := sys.stdin.readline(INVITE_BYTES_MAX)):
        if _SCHEME in line:
            return line
        read += len(line)
    return ""


class Entry(NamedTuple):
    """Hold what lets a peer into a run: secret, authority and credential.

    ``authority`` and ``credential`` are empty in a run that has none.
    """

    secret: bytes
    authority: bytes = b""
    credential: bytes = b""

    def record(self, run: str, known: tuple[str, ...] = ()) -> RunRecord:
        return RunRecord(run, self.secret, known, self.authority, self.credential)


def add_address_option(verb: Any) -> None:
    verb.add_argument(
        "--per-address",
        type=_count,
        metavar="N",
        help="how many peers of the run may be linked from one IP address, 0 for any number; by"
        f" default {MEMBERS_PER_ADDRESS_MAX} in a run with probation, private networks exempt",
    )


def _count(text: str) -> int:
    """Parse a whole number, 0 or more, of at most COUNT_DIGITS_MAX digits.

    Raises ValueError, of which argparse makes a usage error, for anything else.
    """
    if not text.isascii() or not text.isdigit() or len(text) > COUNT_DIGITS_MAX:
        raise ValueError(text)
    return int(text)


def add_admission_options(up: Any) -> None:
    admission = up.add_argument_group("a run with an authority, see docs/admission.md")
    admission.add_argument(
        "--authority", metavar="PUBKEY", help="what `atoll authority new` printed"
    )
    admission.add_argument(
        "--pass",
        dest="invite",
        metavar="FILE",
        help="a file with what the authority gave this peer, or - for standard input",
    )


def entry_of_up(
    parsed: argparse.Namespace, run: str, home: Home, record: RunRecord | None
) -> Entry:
    """Return what lets ``atoll up`` in: what is asked for, else what the home remembers.

    Raises AdmissionError or ConfigError.
    """
    if parsed.authority is None and parsed.invite is None:
        secret = _secret(parsed.secret, parsed.secret_file, record)
        return Entry(secret, record.authority, record.credential) if record else Entry(secret)
    from atoll.peer.authority.key import parse_id

    if parsed.secret_file or parsed.secret:
        fix = "leave --secret-file and ATOLL_SECRET out: the secret is in the pass"
        raise ConfigError("--secret-file is for runs without an authority", fix=fix)
    authority = parse_id(parsed.authority) if parsed.authority else b""
    if record is not None and authority not in (b"", record.authority):
        has = f"the authority {record.authority.hex()}" if record.authority else "no authority"
        raise ConfigError(f"the run of this home has {has}", fix="use another --home")
    if parsed.invite is None:
        if record is None:
            fix = "ask the authority for an invite, and give it with --pass"
            raise PassMissingError(f"run {run} has an authority, and no --pass is given", fix=fix)
        return Entry(record.secret, record.authority, record.credential)
    invite = read_invite(parsed.invite)
    if not invite.authority:
        fix = "give what `atoll authority invite` printed"
        raise PassMissingError("the invite of --pass is not an authority's", fix=fix)
    if invite.authority != (authority or (record.authority if record else b"")):
        fix = "give --authority as `atoll authority new` printed it"
        raise PassForgedError("--pass is not of the authority that this peer is to trust", fix=fix)
    if invite.run != run:
        fix = f"use --run {invite.run}, or an invite for {run}"
        raise PassRunError(f"this pass is for run {invite.run}, not for {run}", fix=fix)
    return entry_of_join(invite, home, record)


def entry_of_join(invite: Invite, home: Home, record: RunRecord | None) -> Entry:
    """Return what lets a peer into the run of an invite.

    Raises ConfigError if the home is another run's; PassForgedError if the grant is no good;
    PassRunError if it is for another run than the invite.
    """
    if record is not None and (record.run, record.secret) != (invite.run, invite.secret):
        what = "another run" if record.run != invite.run else "an older run of the same name"
        raise ConfigError(
            f"this home belongs to {what}: {record.run}",
            fix="use another --home, or remove this one's run.json to move it to the new run",
        )
    if not invite.authority:
        return Entry(invite.secret)
    from atoll.peer.authority.grants import Credential, Grant

    grant = Grant.parse(invite.grant, invite.authority)
    if grant.run != invite.run:
        fix = "copy the whole invite again"
        raise PassRunError(f"this pass is for run {grant.run}, not for {invite.run}", fix=fix)
    credential = Credential.bind(grant, invite.authority, home.private_key, invite.seed)
    return Entry(invite.secret, invite.authority, credential.encode())


def _secret(given: str | None, path: str | None, record: RunRecord | None) -> bytes:
    """Return the run's secret: as it is given, in the file at ``path``, of the home, or a new one.

    Raises ConfigError for one that is none, or not that of the home.
    """
    if given is not None and path is not None:
        raise ConfigError("two secrets are given", fix="give --secret-file, or ATOLL_SECRET alone")
    if given is None and path is None:
        return record.secret if record is not None else secrets.token_bytes(SECRET_BYTES)
    name = path or "ATOLL_SECRET (or `secret` in atoll.toml)"
    try:
        text = Path(path).read_text("ascii") if path is not None else given or ""
        secret = bytes.fromhex(text.strip())
    except ValueError:
        # `from None`: the cause's message could quote the secret.
        raise ConfigError(f"{name} does not hold a secret", fix="make one: atoll secret") from None
    if len(secret) != SECRET_BYTES:
        what = f"{name} holds {len(secret)} bytes, not {SECRET_BYTES}"
        raise ConfigError(what, fix="make one: atoll secret")
    if record is not None and record.secret != secret:
        fix = "leave it out, or use another --home"
        raise ConfigError(f"{name} is not the secret that this home has for its run", fix=fix)
    return secret
