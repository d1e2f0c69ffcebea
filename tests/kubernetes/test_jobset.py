"""A job as a JobSet: what Kubernetes, JobSet's webhook and a careful reader ask of its manifests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from manifests import (
    Manifest,
    check_core,
    check_jobs,
    container_of,
    jobs_of,
    pod_of,
    refusals,
    rendered,
    text_of,
    the,
)
from processes import expanded

from rallypoint.errors import ConfigError, UsageError
from rallypoint.launch.commands.by_hand import FAILED
from rallypoint.launch.engines.kubernetes import certificates, new_secret
from rallypoint.net.certificates import make_certificates

sys.path.insert(0, str(Path(__file__).parents[1]))

from odd_words import WORDS

EVERYTHING: dict[str, Any] = {
    "workers": "2:8", "servers": 3, "replication": 2, "threads": 2, "cpu": "4", "memory": "16Gi",
    "gpus": 1, "server_memory": "4Gi", "spot": "cloud.google.com/gke-spot=true",
    "save": 900, "storage": "50Gi", "secret": "other",
    "sets": ["steps=50"], "heartbeat": 5.0, "backup_tasks": True,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "least": {"workers": "1", "servers": 1}, "everything": EVERYTHING, "url": {"snapshots": "s3://bucket/gpt"},
    "claim": {"claim": "mine", "snapshots": "none"}, "tls": {"tls": "gpt-tls"},
}


@pytest.fixture(params=WAYS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered("train.py", "--my-option", "3", **WAYS[request.param])


@pytest.mark.slow
def test_kubernetes_knows_all_that_its_own_kinds_say(manifests: list[Manifest]) -> None:
    jobset = the("JobSet", manifests)
    for manifest in manifests:
        if manifest is not jobset:
            check_core(manifest)
    check_jobs(jobset["spec"])


def test_jobset_knows_all_that_it_says(manifests: list[Manifest]) -> None:
    jobset = the("JobSet", manifests)
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet  # 400 modules

    model = JobsetV1alpha2JobSet.from_dict(jobset)
    assert model.to_dict() == jobset  # the model drops what it does not know


def test_jobsets_webhook_takes_it(manifests: list[Manifest]) -> None:
    jobset = the("JobSet", manifests)
    assert list(refusals(jobset["metadata"]["name"], jobset["spec"])) == []


def test_each_server_is_a_job_of_its_own_and_each_job_replaces_its_own_pods() -> None:
    jobs = jobs_of(the("JobSet", rendered(workers="2:8", servers=3))["spec"])
    counts = {name: (job["replicas"], job["template"]["spec"]["parallelism"]) for name, job in jobs.items()}
    assert counts == {"coordinator": (1, 1), "server": (3, 1), "worker": (1, 8)}
    for name in ("server", "worker"):
        inner = jobs[name]["template"]["spec"]
        assert (inner["backoffLimit"], pod_of(jobs[name])["spec"]["restartPolicy"]) == (2**31 - 1, "OnFailure")
        assert inner["completions"] == inner["parallelism"]
        left = {item["name"]: item.get("value") for item in container_of(jobs[name])["env"]}["RALLYPOINT_LEFT_STATUS"]
        assert left not in (None, "0"), "a pod that ends with 0 counts as done, and nobody is started in its place"


def test_the_coordinator_decides_about_success_and_failure() -> None:
    spec = the("JobSet", rendered())["spec"]
    inner = jobs_of(spec)["coordinator"]["template"]["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["coordinator"]}
    assert [rule["action"] for rule in spec["failurePolicy"]["rules"]] == ["FailJobSet"]
    ends, goes_on = inner["podFailurePolicy"]["rules"]
    assert (ends["action"], ends["onExitCodes"]["values"]) == ("FailJob", [FAILED])
    assert (goes_on["action"], goes_on["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert inner["template"]["spec"]["restartPolicy"] == "Never"  # what a podFailurePolicy asks for
    assert {job: [item["name"] for item in jobs_of(spec)[job]["dependsOn"]] for job in ("server", "worker")} == {
        "server": ["coordinator"], "worker": ["coordinator"],
    }  # fmt: skip


def test_every_pod_is_probed_and_may_do_little(manifests: list[Manifest]) -> None:
    for job in the("JobSet", manifests)["spec"]["replicatedJobs"]:
        spec, container = pod_of(job)["spec"], container_of(job)
        paths = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
        assert {name: get["path"] for name, get in paths.items()} == {
            "startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz",
        }  # fmt: skip
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {get["port"] for get in paths.values()} <= ports.keys()
        assert f"--health=[::]:{ports['health']}" in container["command"]
        assert (spec["automountServiceAccountToken"], spec["securityContext"]["runAsNonRoot"]) == (False, True)
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert spec["shareProcessNamespace"]  # as process 1 it would ignore SIGTERM until it has a handler
        assert spec["terminationGracePeriodSeconds"] >= 15


@pytest.mark.some("url")
def test_each_role_gets_its_own_token_and_none_stands_in_the_manifest(manifests: list[Manifest]) -> None:
    for job in the("JobSet", manifests)["spec"]["replicatedJobs"]:
        (volume,) = [volume for volume in pod_of(job)["spec"]["volumes"] if volume["name"] == "token"]
        (mount,) = [mount for mount in container_of(job)["volumeMounts"] if mount["name"] == "token"]
        assert volume["secret"]["items"] == [{"key": job["name"], "path": "token"}]
        assert mount["readOnly"]
        assert f"--token-file={mount['mountPath']}/token" in container_of(job)["command"]
        assert not [item for item in container_of(job)["env"] if "TOKEN" in item["name"]]
    made = new_secret("gpt-token")
    check_core(made)
    assert made["stringData"].keys() == {"coordinator", "server", "worker"}
    assert len(set(made["stringData"].values())) == 3
    assert made["stringData"] != new_secret("gpt-token")["stringData"]


def test_each_role_gets_its_own_certificate_and_not_the_cas_key(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    made = certificates("gpt-tls", tmp_path)
    check_core(made)
    assert not [key for key in made["stringData"] if key.startswith("ca-")]
    for name, job in jobs_of(the("JobSet", rendered(tls="gpt-tls"))["spec"]).items():
        (volume,) = [volume for volume in pod_of(job)["spec"]["volumes"] if volume["name"] == "tls"]
        files = {item["path"]: made["stringData"][item["key"]] for item in volume["secret"]["items"]}
        assert files == {file: (tmp_path / name / file).read_text() for file in ("ca.pem", "cert.pem", "key.pem")}
    with pytest.raises(UsageError, match="makes the certificates"):
        certificates("gpt-tls", tmp_path / "nowhere")


def test_a_drain_takes_one_server_at_a_time_and_never_the_only_one() -> None:
    for servers, stay in ((1, 1), (2, 1), (4, 3)):
        manifests = rendered(servers=servers)
        budget = the("PodDisruptionBudget", manifests)["spec"]
        assert "maxUnavailable" not in budget  # Kubernetes takes none for pods of a Job
        assert budget["minAvailable"] == stay
        wanted = budget["selector"]["matchLabels"].items()
        found = [
            name for name, job in jobs_of(the("JobSet", manifests)["spec"]).items()
            if wanted <= pod_of(job)["metadata"]["labels"].items()
        ]  # fmt: skip
        assert found == ["server"]


def test_only_workers_go_to_nodes_that_may_be_taken_away() -> None:
    for name, job in jobs_of(the("JobSet", rendered(spot="pool=spot"))["spec"]).items():
        spec = pod_of(job)["spec"]
        if name == "worker":
            assert spec["nodeSelector"] == {"pool": "spot"}
            assert spec["tolerations"][0] == {
                "key": "pool", "operator": "Equal", "value": "spot", "effect": "NoSchedule",
            }  # fmt: skip
        else:
            assert "nodeSelector" not in spec
            assert "pool" not in {toleration["key"] for toleration in spec["tolerations"]}


@pytest.mark.parametrize(("workers", "mebibytes"), [("1", 512), ("2000", 1240 * 10**6 / 2**20)])
def test_the_coordinator_has_memory_for_its_members(workers: str, mebibytes: float) -> None:
    """docs/performance.md: 1,240 MB at the first view of 2,000 members."""
    job = jobs_of(the("JobSet", rendered(workers=workers, servers=1))["spec"])["coordinator"]
    resources = container_of(job)["resources"]
    assert int(resources["limits"]["memory"].removesuffix("Mi")) > mebibytes
    assert resources["limits"]["memory"] == resources["requests"]["memory"]


def test_resources_are_asked_for_and_memory_and_gpus_are_limited() -> None:
    jobs = jobs_of(the("JobSet", rendered(**EVERYTHING))["spec"])
    assert container_of(jobs["worker"])["resources"] == {
        "requests": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "1"},
    }
    assert container_of(jobs["server"])["resources"]["requests"] == {"cpu": "1", "memory": "4Gi"}


def test_every_pod_asks_for_processor_time_and_what_memory_is_for_is_said() -> None:
    """One that asks for nothing at all (QoS class BestEffort) is the first to be ended."""
    jobs = jobs_of(the("JobSet", rendered(threads=3))["spec"])
    asked = {name: container_of(job)["resources"]["requests"]["cpu"] for name, job in jobs.items()}
    assert asked == {"coordinator": "250m", "server": "1", "worker": "3"}
    assert "# Without --memory and --server-memory" in text_of()
    assert "# Without" not in text_of(memory="4Gi", server_memory="4Gi")


def test_a_script_gets_odd_words_as_they_are_written() -> None:
    """From the command line, through the YAML and what the kubelet replaces, to the container's arguments."""
    manifests = rendered("my train.py", *WORDS, sets=["reading.item=$(POD_IP) `x`"])
    jobs = jobs_of(the("JobSet", manifests)["spec"])
    env = {"POD_IP": "10.0.0.7", "HOME": "/root"}
    assert [expanded(word, env) for word in container_of(jobs["worker"])["args"]] == ["my train.py", *WORDS]
    command = [expanded(word, env) for word in container_of(jobs["coordinator"])["command"]]
    assert "--set=reading.item=$(POD_IP) `x`" in command


def test_a_script_that_is_sent_has_odd_words_in_it_as_they_are_written(tmp_path: Path) -> None:
    text = "".join(f"{word!r}  # {word}\n" for word in WORDS)
    (tmp_path / "train.py").write_text(text)
    manifests = rendered(str(tmp_path / "train.py"), send_script=True)
    assert the("ConfigMap", manifests)["data"] == {"train.py": text}


def test_all_pods_share_the_folder_unless_snapshots_have_a_url() -> None:
    shared, alone = rendered(), rendered(snapshots="s3://bucket/gpt")
    assert the("PersistentVolumeClaim", shared)["spec"]["accessModes"] == ["ReadWriteMany"]
    assert the("PersistentVolumeClaim", alone)["spec"]["accessModes"] == ["ReadWriteOnce"]

    def claims(manifests: list[Manifest]) -> dict[str, list[str]]:
        jobs = jobs_of(the("JobSet", manifests)["spec"])
        return {
            name: [volume["persistentVolumeClaim"]["claimName"] for volume in pod_of(job)["spec"]["volumes"]
                   if "persistentVolumeClaim" in volume] for name, job in jobs.items()
        }  # fmt: skip

    assert claims(shared) == {"coordinator": ["gpt"], "server": ["gpt"], "worker": ["gpt"]}
    assert claims(alone) == {"coordinator": ["gpt"], "server": [], "worker": []}
    worker = container_of(jobs_of(the("JobSet", alone)["spec"])["worker"])
    assert [mount for mount in worker["volumeMounts"] if mount["mountPath"] == "/rallypoint"], "scripts save there"
    assert not [manifest for manifest in rendered(claim="mine") if manifest["kind"] == "PersistentVolumeClaim"]


def test_the_coordinator_gets_the_options_that_were_given_and_no_others() -> None:
    def command(**options: Any) -> list[str]:
        found: list[str] = container_of(jobs_of(the("JobSet", rendered(**options))["spec"])["coordinator"])["command"]
        return found

    more = set(command(**EVERYTHING)) - set(command())
    assert more >= {"--heartbeat=5.0", "--backup-tasks", "--replication=2", "--set=steps=50", "--workers=2:8"}
    assert not [word for word in command() if word.startswith(("--heartbeat", "--replication", "--bind=127"))]


@pytest.mark.parametrize(
    ("options", "begins", "writes", "mounted"),
    [
        ({"resume": "gpt/step-1-1"}, "/rallypoint/gpt/snapshots/step-1-1", "/rallypoint/more/snapshots", True),
        ({"resume": "more/latest"}, "/rallypoint/more/snapshots/latest", "/rallypoint/more/snapshots", True),
        ({"resume": "s3://b/gpt/step-1-1", "snapshots": "s3://b/more"}, "s3://b/gpt/step-1-1", "s3://b/more", False),
        ({"resume": "g/step-1-1", "snapshots": "s3://b/more"}, "/rallypoint/g/snapshots/step-1-1", "s3://b/more", True),
        ({"resume": "s3://b/gpt/step-1-1"}, "s3://b/gpt/step-1-1", "/rallypoint/more/snapshots", True),
    ],
)
def test_a_job_that_begins_with_another_ones_snapshot_writes_into_its_own_folder(
    options: dict[str, str], begins: str, writes: str, mounted: bool
) -> None:
    """Servers read the other one's, so they mount the volume where it is on one."""
    jobs = jobs_of(the("JobSet", rendered(name="more", **options))["spec"])
    command = container_of(jobs["coordinator"])["command"]
    assert {f"--resume={begins}", f"--snapshots={writes}"} <= set(command)
    assert any(mount["mountPath"] == "/rallypoint" for mount in container_of(jobs["server"])["volumeMounts"]) == mounted


def test_a_script_can_travel_in_the_manifest(tmp_path: Any) -> None:
    (tmp_path / "train.py").write_text("print('a')\n\n\nprint('b')  \n")
    manifests = rendered(str(tmp_path / "train.py"), "--x", send_script=True)
    sent = the("ConfigMap", manifests)
    check_core(sent)
    worker = jobs_of(the("JobSet", manifests)["spec"])["worker"]
    (mount,) = [mount for mount in container_of(worker)["volumeMounts"] if mount["name"] == "code"]
    assert container_of(worker)["args"] == [f"{mount['mountPath']}/train.py", "--x"]
    assert sent["data"] == {"train.py": (tmp_path / "train.py").read_text()}
    with pytest.raises(UsageError, match="there is no script"):
        rendered(str(tmp_path / "trian.py"), send_script=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"image": ""}, "which image"), ({"name": "My_Job"}, "--name My_Job: a name has small letters"),
        ({"name": "a" * 42}, "is too long for the names of its pods: take 1 letters off"),
        ({"memory": "16 GB"}, "--memory 16 GB: write 2 or 500m"),
        ({"spot": "spot"}, "write the nodes' label as KEY=VALUE"),
        ({"snapshots": "/data"}, "--snapshots /data: give a URL"),
        ({"bind": "10.0.0.1:4700"}, "--bind has no meaning on Kubernetes"),
        ({"resume": "step-1"}, "--resume step-1: write JOB/SNAPSHOT, as gpt/step-00000120-10003, or URL/SNAPSHOT of"),
        ({"resume": "step-00000120-10003", "snapshots": "s3://bucket/gpt"}, "write JOB/SNAPSHOT"),
        ({"resume": "gpt/"}, "--resume gpt/: write JOB/SNAPSHOT"),
        ({"resume": "s3://bucket/g pt/latest"}, "write JOB/SNAPSHOT"),
        ({"resume": "gpt/step-1\nx: y"}, "write JOB/SNAPSHOT"),
        ({"resume": "../gpt/step-00000120-10003"}, "write JOB/SNAPSHOT"),
        ({"resume": "$(POD_IP)/latest"}, "write JOB/SNAPSHOT"),
        ({"name": "gpt\nx"}, r"--name 'gpt\nx': a name has small letters"),
        ({"secret": "a\n# b"}, r"--secret 'a\n# b': a name has small letters, digits, '-' and '.'"),
        ({"tls": "a\nkubectl"}, "--tls 'a"), ({"tls": "My_Secret"}, "--tls My_Secret"),
        ({"claim": "a b"}, "--claim a b"), ({"image": "me/train:1\nx: y"}, "an image's name has no spaces"),
        ({"spot": "a b=true"}, "--spot 'a b=true' is no label of a node"),
        ({"spot": "gke-spot=tr ue"}, "is no label of a node"), ({"workers": "4:2"}, "the least number comes first"),
        ({"replication": 2, "servers": 1}, "--replication 2 needs at least two servers"),
        ({"sets": ["setps=3"]}, "setps is no setting"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((UsageError, ConfigError)) as refused:
        text_of(**options)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        {"secret": "0.my-secrets.example", "tls": "tls.1", "claim": "claim-7"},
        {"spot": "cloud.google.com/gke-spot=true"}, {"spot": "Spot_1=Yes.1"}, {"image": "host:5000/me/t@sha256:0a1b"},
        {"resume": "gpt/latest"}, {"resume": "gpt-2/step-00000120-10003"},
        {"resume": "s3://bucket/gpt/step-00000120-10003", "snapshots": "s3://bucket/gpt2"},
    ],
)  # fmt: skip
def test_names_that_kubernetes_takes_are_taken(options: dict[str, Any]) -> None:
    assert rendered(**options)


@pytest.mark.parametrize("name", ["a\nb", "A", "", "a_b", "-a", "a..b"])
def test_a_secret_s_name_is_checked_before_it_is_printed(name: str, tmp_path: Path) -> None:
    for make in (lambda: new_secret(name), lambda: certificates(name, tmp_path)):
        with pytest.raises(UsageError, match="a name has small letters"):
            make()


def test_a_script_that_is_sent_has_a_name_that_a_manifest_can_have(tmp_path: Path) -> None:
    (tmp_path / "my train.py").write_text("pass\n")
    with pytest.raises(UsageError, match=r"my train\.py: it cannot be the name of a file in a manifest"):
        rendered(str(tmp_path / "my train.py"), send_script=True)


def test_the_longest_name_is_one_that_fits() -> None:
    jobset = the("JobSet", rendered(name="a" * 41, workers="11", servers=11))
    assert list(refusals("a" * 41, jobset["spec"])) == []
    assert list(refusals("a" * 42, jobset["spec"])) != []
