"""The progress of a TrainJob, told to a server that speaks Kubeflow Trainer's protocol."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from kubeflow_trainer_api.models.trainer_v1alpha1_update_train_job_status_request import (
    TrainerV1alpha1UpdateTrainJobStatusRequest,
)
from status_server import StatusServer, status_server

from rallypoint.errors import UsageError
from rallypoint.launch.kubernetes.progress import Place, Teller, place_of, status_of, telling
from rallypoint.worker.loop.session import Progress

NOON = datetime(2026, 1, 31, 13, 0, 5, tzinfo=timezone(timedelta(hours=1)))
HALF = Progress(50, 100, True, {"val_loss": 0.25})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StatusServer]:
    with status_server(tmp_path) as made:
        yield made


def place(server: StatusServer) -> Place:
    return place_of(server.env)


def test_a_status_is_what_trainer_takes() -> None:
    status = status_of(HALF, 12.6, NOON)
    assert status == {"trainerStatus": {
        "progressPercentage": 50, "estimatedRemainingSeconds": 13,
        "metrics": [{"name": "step", "value": "50"}, {"name": "val_loss", "value": "0.25"}],
        "lastUpdatedTime": "2026-01-31T12:00:05Z",
    }}  # fmt: skip
    read: Any = TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(status)
    assert (read.trainer_status.progress_percentage, len(read.trainer_status.metrics)) == (50, 2)


def test_a_status_keeps_trainers_limits() -> None:
    many = {f"{number}-" + "m" * 100: float("nan") for number in range(400)}
    status: Any = status_of(Progress(0, 0, True, many), 1e30, NOON)["trainerStatus"]
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (0, 2**31 - 1)
    assert len(status["metrics"]) == 256
    assert all(1 <= len(each["name"]) <= 64 and 1 <= len(each["value"]) <= 64 for each in status["metrics"])
    assert "estimatedRemainingSeconds" not in status_of(HALF, None, NOON)["trainerStatus"]  # type: ignore[operator]


def test_the_lead_worker_tells_how_far_it_is_and_the_end(server: StatusServer) -> None:
    steps = iter([Progress(10, 100, True, {}), Progress(20, 100, True, {})])
    teller = Teller(place(server), lambda: next(steps, Progress(100, 100, True, {"val_loss": 0.1})), every_s=0.01)
    server.wait_for(3)
    teller.close()
    assert [status["progressPercentage"] for status in server.taken] == [10, 20, 100]
    assert server.taken[-1]["estimatedRemainingSeconds"] == 0
    assert server.taken[1]["estimatedRemainingSeconds"] >= 0


def test_the_end_is_told_though_the_next_moment_is_far(server: StatusServer) -> None:
    Teller(place(server), lambda: Progress(100, 100, True, {}), every_s=1000.0).close()
    assert [status["progressPercentage"] for status in server.taken] == [100]


@pytest.mark.parametrize("known", [None, Progress(50, 100, False, {})])
def test_other_workers_and_those_that_have_not_begun_tell_nothing(server: StatusServer, known: Progress | None) -> None:
    Teller(place(server), lambda: known, every_s=1000.0).close()
    assert server.answers == []


def test_a_token_that_changes_is_read_again(server: StatusServer) -> None:
    steps = iter([Progress(1, 100, True, {})])
    teller = Teller(place(server), lambda: next(steps, Progress(2, 100, True, {})), every_s=0.01)
    server.wait_for(1)
    server.token = "another"
    Path(server.env["KUBEFLOW_TRAINER_SERVER_TOKEN"]).write_text("another")
    server.wait_for(2)
    teller.close()
    assert [status["metrics"][0]["value"] for status in server.taken] == ["1", "2"]
    assert server.answers[-1] == 200


def test_a_refusal_is_said_once_and_nobody_else_is_told(
    server: StatusServer, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    server.token = "another"
    with caplog.at_level(logging.WARNING, "rallypoint"):
        teller = Teller(place(server), lambda: HALF, every_s=0.01)
        server.wait_for(3)
        teller.close()
    (record,) = caplog.records
    assert record.getMessage() == "Kubeflow Trainer does not take the progress: 403 Forbidden; the job goes on"


def test_a_server_with_another_ca_gets_no_token(
    server: StatusServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    with status_server(tmp_path / "other") as other:
        wrong = Place(other.env["KUBEFLOW_TRAINER_SERVER_URL"], place(server).ca, place(server).token)
        with caplog.at_level(logging.WARNING, "rallypoint"):
            Teller(wrong, lambda: HALF, every_s=1000.0).close()
        assert other.answers == []
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"KUBEFLOW_TRAINER_SERVER_URL": "http://127.0.0.1/x"}, "a token goes to https:// only"),
        ({"KUBEFLOW_TRAINER_SERVER_TOKEN": ""}, "KUBEFLOW_TRAINER_SERVER_TOKEN is not set"),
    ],
)
def test_what_is_wrong_with_the_place_is_said_and_the_job_goes_on(
    server: StatusServer, change: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with pytest.raises(UsageError, match=sentence):
        place_of({**server.env, **change})
    for name, value in {**server.env, **change}.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, "rallypoint"), telling(lambda: HALF):
        pass
    assert sentence in caplog.text
    assert server.answers == []
