"""Notices of the cloud's metadata service that this machine will end.

| service | asked for | means |
|---|---|---|
| aws (IMDSv2) | `spot/instance-action` | the machine ends at a given time, two minutes ahead: stop |
| | `events/recommendations/rebalance` | it is likelier than usual to end soon: save, and go on |
| gce | `instance/preempted` | the machine is ending: stop |
| | `instance/maintenance-event` | its host is being maintained: save, and go on; live migrations need nothing |

The last of each pair stay set for long, also for the pods that come next, so a run that stopped for them would stop
repeatedly. `AWS_EC2_METADATA_SERVICE_ENDPOINT` and `GCE_METADATA_HOST` give other addresses, as in the clouds' own
clients.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

PERIOD_S = 2.0
_ANSWER_S = 2.0
_TOKEN_S = 21600
_AWS = "http://169.254.169.254"
_GCE = "metadata.google.internal"


@dataclass(frozen=True)
class Notice:
    """A notice that this machine will end, in `seconds`; None: unknown, or a warning only."""

    source: str
    seconds: float | None
    is_final: bool  # False: save, and continue


class MetadataService(Protocol):
    def ask(self) -> list[Notice]:
        """OSError if it does not answer."""
        ...


def metadata_service(
    name: str, environment: Mapping[str, str], grace_s: float, now: Callable[[], float] = time.time
) -> MetadataService | None:
    if name == "aws":
        return AwsMetadata((environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _AWS).rstrip("/"), now)
    if name == "gce":
        return GceMetadata(f"http://{environment.get('GCE_METADATA_HOST') or _GCE}", grace_s)
    return None


class AwsMetadata:
    def __init__(self, address: str, now: Callable[[], float] = time.time) -> None:
        self._address, self._now = address, now
        self._token: str | None = None

    def ask(self) -> list[Notice]:
        notices = []
        if (action := self._get("spot/instance-action")) is not None:
            notices.append(Notice("spot/instance-action", self._seconds_left(action), is_final=True))
        if self._get("events/recommendations/rebalance") is not None:
            notices.append(Notice("rebalance recommendation", None, is_final=False))
        return notices

    def _get(self, name: str) -> str | None:
        """None: there is no notice."""
        for _ in range(2):
            if self._token is None:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
                self._token = _request(f"{self._address}/latest/api/token", ttl, "PUT")
            try:
                return _request(f"{self._address}/latest/meta-data/{name}", {"X-aws-ec2-metadata-token": self._token})
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                if error.code != 401:
                    raise
                self._token = None  # it has expired
        raise OSError(f"{self._address} refuses the token that it has given")

    def _seconds_left(self, action: str) -> float | None:
        try:
            moment = datetime.fromisoformat(json.loads(action)["time"].replace("Z", "+00:00"))
            return max(0.0, moment.timestamp() - self._now())
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


class GceMetadata:
    def __init__(self, address: str, grace_s: float) -> None:
        self._address, self._grace_s = address, grace_s

    def ask(self) -> list[Notice]:
        notices = []
        if self._get("preempted").upper() == "TRUE":
            notices.append(Notice("preempted", self._grace_s, is_final=True))
        if self._get("maintenance-event").startswith("TERMINATE"):
            notices.append(Notice("maintenance-event", None, is_final=False))
        return notices

    def _get(self, name: str) -> str:
        return _request(f"{self._address}/computeMetadata/v1/instance/{name}", {"Metadata-Flavor": "Google"}).strip()


# Not through a proxy: the service is on a link of this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _request(address: str, headers: Mapping[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(address, headers=dict(headers), method=method)
    with _OPENER.open(request, timeout=_ANSWER_S) as answer:
        return str(answer.read(65536).decode("utf-8", "replace"))


def watch(
    service: MetadataService,
    report: Callable[[Notice], None],
    say: Callable[[str], None],
    wait: Callable[[float], bool],
) -> None:
    """Poll until `wait(seconds)` returns True, and report each kind of notice once."""
    seen: set[str] = set()
    has_complained = False
    while True:
        try:
            for notice in service.ask():
                if notice.source not in seen:
                    seen.add(notice.source)
                    report(notice)
            has_complained = False
        except OSError as error:
            if not has_complained:
                has_complained = True
                say(
                    f"the metadata service does not answer ({error}): of an interruption only SIGTERM will tell. On "
                    "EKS the node's metadataOptions need httpPutResponseHopLimit: 2"
                )
        if wait(PERIOD_S):
            return


def start_watch(service: MetadataService, report: Callable[[Notice], None], say: Callable[[str], None]) -> None:
    threading.Thread(
        target=watch, args=(service, report, say, threading.Event().wait), name="metadata", daemon=True
    ).start()
