"""Read the notices that clouds give a machine before they take it back: AWS, GCP, Azure.

Each cloud has a metadata service at an address of its own, which only the machine can reach. What
is asked and what the answers mean is here; who asks is in metadata.py, which gives ``http``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol, TypeAlias

from atoll.collectives.errors import RemoteProtocolError

# (method, path, headers) -> (status, body)
Http: TypeAlias = Callable[[str, str, Mapping[str, str]], tuple[int, bytes]]

OK, UNAUTHORIZED, NOT_FOUND = 200, 401, 404
LEFT_MIN_S = 5.0  # where the time of a notice is over: as long as the machine is there, it is used
TOKEN_LIFE_S = 21_600  # the longest that AWS gives
TOKEN = re.compile(rb"[!-~]+")  # one printable word: it is to be the value of a header
PREEMPTED_S = 30.0  # GCP names no time: it gives so long at least
# Of Azure's kinds of events those that end or reboot the machine; Freeze is a pause of seconds.
ENDING_EVENTS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})


@dataclass(frozen=True, slots=True)
class SpotNotice:
    """Say that this machine is to go, and in how many seconds."""

    what: str
    left_s: float


class NoticeSource(Protocol):
    """Describe the metadata service of a cloud."""

    def ask(self, http: Http, unix_s: float) -> SpotNotice | None:
        """Return the notice that there is, or None.

        Raises RemoteProtocolError for an answer that cannot be understood.
        """
        ...


class AwsNotices:
    """Ask for the interruption of a spot instance, with a token (IMDSv2)."""

    def __init__(self) -> None:
        self._token = ""

    def ask(self, http: Http, unix_s: float) -> SpotNotice | None:
        path = "/latest/meta-data/spot/instance-action"
        status, body = http("GET", path, self._headers(http))
        if status == UNAUTHORIZED:  # the token is too old
            self._token = ""
            status, body = http("GET", path, self._headers(http))
        if status == NOT_FOUND:
            return None
        said = _json(path, status, body)
        action, at = said.get("action"), said.get("time")
        if not isinstance(action, str) or not isinstance(at, str):
            raise _not_understood(path, status, body)
        try:
            when = datetime.strptime(at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        except ValueError as error:
            raise _not_understood(path, status, body) from error
        return _notice(f"AWS is to {action[:20]} this machine", when, unix_s)

    def _headers(self, http: Http) -> dict[str, str]:
        if not self._token:
            life = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFE_S)}
            path = "/latest/api/token"
            status, body = http("PUT", path, life)
            token = TOKEN.fullmatch(body.strip())
            if status != OK or token is None:  # what it says is not shown: it may hold a token
                raise RemoteProtocolError(f"{path} was answered with status {status} and no token")
            self._token = token[0].decode("ascii")
        return {"X-aws-ec2-metadata-token": self._token}


class GcpNotices:
    """Ask whether a spot (or preemptible) virtual machine is being preempted."""

    def ask(self, http: Http, unix_s: float) -> SpotNotice | None:
        path = "/computeMetadata/v1/instance/preempted"
        status, body = http("GET", path, {"Metadata-Flavor": "Google"})
        said = body.strip()
        if status != OK or said not in (b"TRUE", b"FALSE"):
            raise _not_understood(path, status, body)
        return SpotNotice("GCP preempts this machine", PREEMPTED_S) if said == b"TRUE" else None


class AzureNotices:
    """Ask for scheduled events that concern this machine, of those of its group."""

    def __init__(self) -> None:
        self._name = ""

    def ask(self, http: Http, unix_s: float) -> SpotNotice | None:
        if not self._name:
            self._name = self._own_name(http)
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        status, body = http("GET", path, {"Metadata": "true"})
        events = _json(path, status, body).get("Events")
        if not isinstance(events, list):
            raise _not_understood(path, status, body)
        notices = [self._of_event(event, unix_s) for event in events if isinstance(event, dict)]
        mine = [notice for notice in notices if notice is not None]
        return min(mine, key=lambda notice: notice.left_s, default=None)

    def _own_name(self, http: Http) -> str:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        status, body = http("GET", path, {"Metadata": "true"})
        if status != OK or not body.strip():
            raise _not_understood(path, status, body)
        return body.decode("utf-8", "replace").strip()

    def _of_event(self, event: Mapping[str, object], unix_s: float) -> SpotNotice | None:
        kind, machines, at = (event.get(n) for n in ("EventType", "Resources", "NotBefore"))
        is_mine = isinstance(machines, list) and self._name in machines
        if not isinstance(kind, str) or kind not in ENDING_EVENTS or not is_mine:
            return None
        what = f"Azure has scheduled for this machine: {kind}"
        if not at:
            return SpotNotice(what, LEFT_MIN_S)  # it has begun
        try:
            return _notice(what, parsedate_to_datetime(str(at)), unix_s)
        except (ValueError, OverflowError) as error:
            raise RemoteProtocolError(f"the event {kind} has no time: {str(at)[:40]!r}") from error


@dataclass(frozen=True, slots=True)
class Cloud:
    """Hold where a cloud's metadata service is, how often to ask it, and how."""

    url: str
    poll_s: float
    source: Callable[[], NoticeSource]


# AWS asks to be asked every five seconds; where the notice is of 30 s, each one counts.
CLOUDS = {
    "aws": Cloud("http://169.254.169.254", 5.0, AwsNotices),
    "gcp": Cloud("http://metadata.google.internal", 1.0, GcpNotices),
    "azure": Cloud("http://169.254.169.254", 1.0, AzureNotices),
}


def _notice(what: str, when: datetime, unix_s: float) -> SpotNotice:
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    left_s = max(LEFT_MIN_S, when.timestamp() - unix_s)
    return SpotNotice(f"{what} at {when.astimezone(UTC):%H:%M:%S} UTC", left_s)


def _json(path: str, status: int, body: bytes) -> Mapping[str, object]:
    try:
        said = json.loads(body) if status == OK else None
    except (ValueError, RecursionError) as error:
        raise _not_understood(path, status, body) from error
    if not isinstance(said, dict):
        raise _not_understood(path, status, body)
    return said


def _not_understood(path: str, status: int, body: bytes) -> RemoteProtocolError:
    shown = body[:80].decode("utf-8", "replace")
    return RemoteProtocolError(f"{path} was answered with status {status} {shown!r}")
