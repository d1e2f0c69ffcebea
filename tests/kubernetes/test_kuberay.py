"""A job for KubeRay: what its operator (v1.7) asks of a RayJob, and what its entrypoint does."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from manifests import Manifest, check_core, rendered, the

from rallypoint.errors import UsageError
from rallypoint.launch.options import RunOptions

WAYS: dict[str, dict[str, Any]] = {
    "least": {"workers": "1", "servers": 1},
    "more": {"workers": "2:8", "servers": 3, "gpus": 1, "memory": "16Gi", "spot": "pool=spot", "heartbeat": 5.0},
    "url": {"snapshots": "s3://bucket/gpt", "claim": "mine"},
}


@pytest.fixture(params=WAYS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered("train.py", "--text", "two words", kind="kuberay", **WAYS[request.param])


def groups_of(job: Manifest) -> list[Manifest]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_kubernetes_knows_all_that_the_pods_say(manifests: list[Manifest]) -> None:
    job = the("RayJob", manifests)
    for group in groups_of(job):
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        check_core({**pod, "metadata": {**pod["metadata"], "name": "pod"}})
    for manifest in manifests:
        if manifest is not job:
            check_core(manifest)


def test_the_operator_takes_it(manifests: list[Manifest]) -> None:
    job = the("RayJob", manifests)
    assert job["spec"].keys() == {
        "entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec",
    }  # fmt: skip
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster.keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    (nodes,) = cluster["workerGroupSpecs"]
    assert nodes.keys() - {"minReplicas"} == {"groupName", "replicas", "maxReplicas", "rayStartParams", "template"}
    assert 0 <= nodes["minReplicas"] <= nodes["replicas"] <= nodes["maxReplicas"]  # both are asked for
    assert all(isinstance(value, str) for group in groups_of(job) for value in group["rayStartParams"].values())
    assert len(job["metadata"]["name"]) <= 47


def test_the_nodes_have_room_for_every_process_also_when_they_are_few() -> None:
    for workers, servers, threads in (("2:8", 3, 1), ("4", 4, 4), ("1", 5, 2)):
        job = the("RayJob", rendered(kind="kuberay", workers=workers, servers=servers, threads=threads))
        head, nodes = groups_of(job)
        least = nodes["minReplicas"]
        assert int(nodes["rayStartParams"]["num-cpus"]) * least >= least * threads + servers
        (container,) = nodes["template"]["spec"]["containers"]
        assert container["resources"]["requests"]["cpu"] == nodes["rayStartParams"]["num-cpus"]
        assert head["rayStartParams"]["num-cpus"] == "0"  # the coordinator needs none, and nothing else goes there


def test_the_entrypoint_is_a_run_that_the_command_line_takes(manifests: list[Manifest]) -> None:
    words = shlex.split(the("RayJob", manifests)["spec"]["entrypoint"])
    assert words[:4] == ["rallypoint", "run", "--engine=ray", "--address=auto"]
    assert words[-3:] == ["train.py", "--text", "two words"]
    known = {field.replace("_", "-") for field in RunOptions.__dataclass_fields__} | {"set"}
    options = [word.removeprefix("--").partition("=")[0] for word in words[2:-3]]
    assert not {option for option in options if option not in known} - {"address", "gpus"}


def test_all_pods_share_the_runs_folder(manifests: list[Manifest]) -> None:
    for group in groups_of(the("RayJob", manifests)):
        (container,) = group["template"]["spec"]["containers"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/rallypoint"]
        assert mount["name"] in [volume["name"] for volume in group["template"]["spec"]["volumes"]]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"name": "a" * 41 + "b" * 7}, "too long"), ({"tls": "x"}, "are not for --kind kuberay")],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        rendered(kind="kuberay", **options)
