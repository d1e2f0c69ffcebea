"""A job for Kubeflow Trainer v2: its runtime, and what Trainer makes of it with a TrainJob."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from kubeflow_trainer_api.models.trainer_v1alpha1_cluster_training_runtime import TrainerV1alpha1ClusterTrainingRuntime
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from manifests import Manifest, check_core, check_jobs, container_of, jobs_of, pod_of, refusals, rendered, the
from processes import kubelet, pods_of, told
from status_server import status_server
from test_pods import SCRIPT, secrets, wanted

from rallypoint.launch.kubernetes.trainer import JOBSET_NAME

__all__ = ["wanted"]  # a fixture

ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
WAYS: dict[str, dict[str, Any]] = {
    "least": {"workers": "1", "servers": 1},
    "more": {"workers": "2:8", "servers": 3, "replication": 2, "gpus": 1, "memory": "16Gi", "namespace": "ml"},
    "claim": {"claim": "mine"},
    "url": {"snapshots": "s3://bucket/gpt"},
}


@pytest.fixture(params=WAYS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered("train.py", "--my-option", "3", kind="trainer", **WAYS[request.param])


def as_trainer_makes_it(manifests: list[Manifest]) -> tuple[str, Manifest]:
    """The name and the spec of the JobSet that Trainer makes of a TrainJob and its runtime."""
    job, spec = the("TrainJob", manifests), copy.deepcopy(the("ClusterTrainingRuntime", manifests)["spec"])
    trainer, jobset = job["spec"]["trainer"], spec["template"]["spec"]
    for replicated in jobset["replicatedJobs"]:
        if replicated["template"].get("metadata", {}).get("labels", {}).get(ANCESTOR) == "trainer":
            inner = replicated["template"]["spec"]
            inner["parallelism"] = inner["completions"] = trainer["numNodes"]
            (node,) = [each for each in pod_of(replicated)["spec"]["containers"] if each["name"] == "node"]
            node.update(image=trainer["image"], args=trainer["args"])
    return job["metadata"]["name"], jobset


@pytest.mark.some("url")
def test_trainer_knows_all_that_they_say(manifests: list[Manifest]) -> None:
    runtime, job = the("ClusterTrainingRuntime", manifests), the("TrainJob", manifests)
    for model, manifest in ((TrainerV1alpha1ClusterTrainingRuntime, runtime), (TrainerV1alpha1TrainJob, job)):
        read = model.from_dict(manifest)
        assert read is not None
        assert read.to_dict() == manifest  # the model drops what it does not know
    check_jobs(runtime["spec"]["template"]["spec"])
    for manifest in manifests:
        if manifest not in (runtime, job):
            check_core(manifest)


def test_trainers_webhook_takes_the_runtime(manifests: list[Manifest]) -> None:
    for replicated in the("ClusterTrainingRuntime", manifests)["spec"]["template"]["spec"]["replicatedJobs"]:
        labels = replicated["template"].get("metadata", {}).get("labels", {})
        assert (ANCESTOR in labels) == (replicated["name"] == "node")
        if ANCESTOR in labels:
            assert (replicated["replicas"], container_of(replicated)["name"]) == (1, "node")


def test_the_train_job_uses_the_runtime_with_its_own_script(manifests: list[Manifest]) -> None:
    runtime, job = the("ClusterTrainingRuntime", manifests), the("TrainJob", manifests)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "namespace" not in runtime["metadata"]
    assert job["spec"]["trainer"]["args"] == ["train.py", "--my-option", "3"]
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"]


def test_jobset_takes_what_trainer_makes_of_it_under_any_name(manifests: list[Manifest]) -> None:
    name, spec = as_trainer_makes_it(manifests)
    assert list(refusals(name, spec)) == list(refusals("a" * 41, spec)) == []


def test_pods_find_the_coordinator_under_the_name_of_their_own_train_job(manifests: list[Manifest]) -> None:
    for replicated in the("ClusterTrainingRuntime", manifests)["spec"]["template"]["spec"]["replicatedJobs"]:
        first = container_of(replicated)["env"][0]  # before all that may use it
        assert first["name"] == "JOBSET_NAME"
        assert first["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{JOBSET_NAME}']"
        assert "gpt-coordinator" not in " ".join(container_of(replicated)["command"])


def test_each_train_job_has_a_volume_and_a_budget_of_its_own() -> None:
    manifests = rendered(kind="trainer", servers=3)
    spec = the("ClusterTrainingRuntime", manifests)["spec"]["template"]["spec"]
    (policy,) = spec["volumeClaimPolicies"]
    assert policy["retentionPolicy"] == {"whenDeleted": "Retain"}  # the snapshots outlive the job
    for job in spec["replicatedJobs"]:
        assert "job" in [mount["name"] for mount in container_of(job)["volumeMounts"]]
    assert the("PodDisruptionBudget", manifests)["spec"]["selector"]["matchLabels"][JOBSET_NAME] == "gpt"
    taken = jobs_of(the("ClusterTrainingRuntime", rendered(kind="trainer", claim="mine"))["spec"]["template"]["spec"])
    names = [volume["name"] for volume in pod_of(taken["coordinator"])["spec"]["volumes"]]
    assert "job" in names


@pytest.mark.slow
@pytest.mark.programs
def test_the_pods_of_a_train_job_make_the_same_bytes_and_tell_their_progress(tmp_path: Path, wanted: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "gate").touch()
    manifests = rendered("train.py", "digest", "20", kind="trainer", workers="2", servers=2, save=100)
    name, spec = as_trainer_makes_it(manifests)
    (tmp_path / "trainer").mkdir()
    with (
        status_server(tmp_path / "trainer") as server,
        kubelet(tmp_path, pods_of(name, spec), secrets(), {JOBSET_NAME: name}) as cluster,
    ):
        given = [{"name": key, "value": value} for key, value in server.env.items()]  # as Trainer does
        container_of(jobs_of(spec)["node"])["env"].extend(given)
        for pod in cluster.pods:
            cluster.start(pod)
        for pod in cluster.pods:
            assert cluster.running[pod.name].wait(100.0) == 0, told(cluster)
    assert (tmp_path / "volumes/job/gpt/digest").read_text() == wanted
    assert [status["progressPercentage"] for status in server.taken][-1] == 100
