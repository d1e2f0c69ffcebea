"""A TrainJob's progress, told to Kubeflow Trainer: its protocol ``trainerStatus`` (v2.2, feature gate TrainJobStatus).

Trainer gives each worker a URL, its CA and a token, in KUBEFLOW_TRAINER_SERVER_*. The lead worker posts there how far
the job is, and ``kubectl get trainjob`` shows it. Nothing of this can fail the job: what goes wrong is said once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rallypoint.errors import UsageError
from rallypoint.launch import environment
from rallypoint.observe.lines import Once, printable
from rallypoint.worker.loop.session import Progress

log = logging.getLogger("rallypoint")
CA_FILE, TOKEN_FILE = "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN"
EVERY_S = 10.0  # seconds between two posts; Trainer asks for at least 5
_ANSWER_S = 5.0
_MOST_METRICS, _LONGEST = 256, 64  # characters of a name and of a value: Trainer refuses more


@dataclass(frozen=True, slots=True)
class Place:
    """Where the progress of a TrainJob is posted.

    Attributes:
        url: of the job's status; https only, because the token goes there.
        ca: the file with the certificate of who answers there.
        token: the file with this pod's token. It changes while the job runs.
    """

    url: str
    ca: Path
    token: Path

    def __post_init__(self) -> None:
        """Raises UsageError if the URL is no https one."""
        if urlsplit(self.url).scheme != "https" or not urlsplit(self.url).hostname:
            raise UsageError(f"{environment.KUBEFLOW_TRAINER} is {self.url}: a token goes to https:// only")


def place_of(env: Mapping[str, str]) -> Place:
    """Return what Trainer has put into this environment. Raises UsageError if a part is missing or wrong."""
    missing = [name for name in (environment.KUBEFLOW_TRAINER, CA_FILE, TOKEN_FILE) if not env.get(name)]
    if missing:
        raise UsageError(f"{missing[0]} is not set: Kubeflow Trainer sets all three")
    return Place(env[environment.KUBEFLOW_TRAINER], Path(env[CA_FILE]), Path(env[TOKEN_FILE]))


def status_of(progress: Progress, remaining_s: float | None, now: datetime) -> dict[str, object]:
    """Return what is posted. `remaining_s`: seconds that the rest will take; None if that is not known yet."""
    metrics = [(name[:_LONGEST], f"{value:.6g}") for name, value in progress.metrics.items() if name]
    status: dict[str, object] = {"progressPercentage": 100 * progress.step // max(1, progress.steps)}
    if remaining_s is not None:
        status["estimatedRemainingSeconds"] = min(2**31 - 1, max(0, round(remaining_s)))
    told = [("step", str(progress.step)), *metrics][:_MOST_METRICS]
    status["metrics"] = [{"name": name, "value": value} for name, value in told]
    status["lastUpdatedTime"] = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"trainerStatus": status}


def post(place: Place, status: dict[str, object]) -> None:
    """Post a status. Raises OSError, ssl.SSLError or HTTPException if it is not taken, in a few seconds."""
    where = urlsplit(place.url)
    context = ssl.create_default_context(cafile=place.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    connection = HTTPSConnection(where.hostname or "", where.port, timeout=_ANSWER_S, context=context)
    try:
        connection.request("POST", where.path, msgspec.json.encode(status), {
            "Authorization": f"Bearer {place.token.read_text().strip()}", "Content-Type": "application/json",
        })  # fmt: skip
        answer = connection.getresponse()
        if answer.status != 200:
            raise HTTPException(f"{answer.status} {answer.reason}")
    finally:
        connection.close()


class Teller:
    """Posts the progress every `every_s` seconds while this worker leads, and at the end. `close` ends its thread."""

    def __init__(self, place: Place, progress: Callable[[], Progress | None], *, every_s: float = EVERY_S) -> None:
        self._place, self._progress, self._every_s = place, progress, every_s
        self._began: tuple[float, int] | None = None  # when the first step was seen, and which
        self._told: Progress | None = None
        self._said = Once()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Post the last state, if it is new, and end. It takes a few seconds at most."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            self._tell()
        self._tell()

    def _tell(self) -> None:
        now, progress = time.monotonic(), self._progress()
        if progress is None:
            return
        remaining = self._remaining(progress, now)
        if not progress.lead or progress == self._told:
            return
        try:
            post(self._place, status_of(progress, remaining, datetime.now(UTC)))
            self._told = progress
        except (OSError, HTTPException, ValueError) as error:  # (an SSLError is an OSError)
            if self._said.is_new(str(error)):
                log.warning("Kubeflow Trainer does not take the progress: %s; the job goes on", printable(str(error)))

    def _remaining(self, progress: Progress, now: float) -> float | None:
        if progress.step >= progress.steps:
            return 0.0
        if self._began is None:
            self._began = now, progress.step
        began, step = self._began
        made = progress.step - step
        return (now - began) / made * (progress.steps - progress.step) if made > 0 else None


@contextlib.contextmanager
def telling(progress: Callable[[], Progress | None]) -> Iterator[None]:
    """In the body, tell Trainer the progress, as the environment says where. What is wrong with that is only said."""
    try:
        teller = Teller(place_of(os.environ), progress)
    except UsageError as error:
        log.warning("%s; the progress is not told", error)
        yield
        return
    try:
        yield
    finally:
        teller.close()
