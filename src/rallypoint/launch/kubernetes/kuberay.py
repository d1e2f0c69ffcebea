"""KubeRay: a RayJob, whose Ray cluster runs `rallypoint run --engine ray`.

The entrypoint runs on the head, and the coordinator beside it. Each other pod is a node with room for one worker and
its share of the servers: Ray places them, and Rallypoint starts others when a node is gone.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rallypoint.errors import UsageError
from rallypoint.launch.kubernetes import objects as k
from rallypoint.launch.kubernetes.pods import GPU, JOB, USER, claimed
from rallypoint.launch.kubernetes.shape import CODE, FOLDER, Shape, Size
from rallypoint.launch.plan import parse_workers

API = "ray.io/v1"
RAY = "2.60.0"
LONGEST = 47  # of a RayJob's name
_KEPT_S = 3600  # after its end, for its logs
_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


@dataclass(frozen=True, kw_only=True)
class Head(k.Part):
    ray_start_params: Mapping[str, str]
    template: k.PodTemplate


@dataclass(frozen=True, kw_only=True)
class Nodes(k.Part):
    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    ray_start_params: Mapping[str, str]
    template: k.PodTemplate


@dataclass(frozen=True, kw_only=True)
class RayCluster(k.Part):
    ray_version: str
    head_group_spec: Head
    worker_group_specs: Sequence[Nodes]


@dataclass(frozen=True, kw_only=True)
class RayJobSpec(k.Part):
    entrypoint: str
    shutdown_after_job_finishes: bool
    ttl_seconds_after_finished: int
    ray_cluster_spec: RayCluster


@dataclass(frozen=True, kw_only=True)
class RayJob(k.Part):
    api_version: str
    kind: str
    metadata: k.Meta
    spec: RayJobSpec


def ray_job(shape: Shape) -> RayJob:
    """Return the RayJob of a job. Raises UsageError for a name that is too long for it, and for a Secret: the run makes
    its own tokens."""
    if len(shape.name) > LONGEST:
        raise UsageError(f"the name {shape.name} is too long for a RayJob: at most {LONGEST} letters")
    if shape.secret or shape.tls or shape.resume:
        raise UsageError("--secret, --tls and --resume are not for --kind kuberay: the run makes its own tokens")
    least = parse_workers(shape.workers)[0][0] if ":" in shape.workers else shape.most
    return RayJob(
        api_version=API, kind="RayJob",
        metadata=k.Meta(name=shape.name, namespace=shape.namespace, labels=shape.labels()),
        spec=RayJobSpec(
            entrypoint=entrypoint(shape), shutdown_after_job_finishes=True, ttl_seconds_after_finished=_KEPT_S,
            ray_cluster_spec=RayCluster(
                ray_version=RAY,
                head_group_spec=Head(
                    ray_start_params={"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    template=_pod(shape, "head", Size(cpu="1", memory="4Gi"), _PORTS),
                ),
                worker_group_specs=[Nodes(
                    group_name="node", replicas=shape.most, min_replicas=least, max_replicas=shape.most,
                    ray_start_params={"num-cpus": str(shape.nodes_cpus)},
                    template=_pod(shape, "node", shape.size_of("node"), {}),
                )],
            ),
        ),
    )  # fmt: skip


def entrypoint(shape: Shape) -> str:
    """Return the command that runs on the head."""
    return shlex.join([
        "rallypoint", "run", "--engine=ray", "--address=auto", f"--workers={shape.workers}",
        f"--servers={shape.servers}", f"--folder={FOLDER}/{shape.name}",
        *([f"--gpus={shape.worker.gpus}"] if shape.worker.gpus else []),
        *([f"--snapshots={shape.snapshots}"] if shape.snapshots else []), *shape.options, *shape.script,
    ])  # fmt: skip


def _pod(shape: Shape, role: str, size: Size, ports: Mapping[str, int]) -> k.PodTemplate:
    asked = {what: much for what, much in (("cpu", size.cpu), ("memory", size.memory)) if much}
    gpus = {GPU: str(size.gpus)} if size.gpus else {}
    key, value = shape.spot if role == "node" else ("", "")
    code = role == "head" and bool(shape.code)
    container = k.Container(
        name=f"ray-{role}", image=shape.image, image_pull_policy=shape.pull_policy,
        ports=[k.Port(name=name, container_port=port) for name, port in ports.items()],
        resources=k.Resources(
            requests={**asked, **gpus}, limits={**({"memory": size.memory} if size.memory else {}), **gpus}
        ),
        volume_mounts=[
            k.Mount(name=JOB, mount_path=FOLDER), *([k.Mount(name="code", mount_path=CODE, read_only=True)] * code),
        ],
        security_context=k.ContainerSecurity(
            allow_privilege_escalation=False, capabilities=k.Capabilities(drop=["ALL"])
        ),
    )  # fmt: skip
    return k.PodTemplate(
        metadata=k.Meta(labels=shape.labels(role)),
        spec=k.PodSpec(
            containers=[container], termination_grace_period_seconds=shape.grace,
            automount_service_account_token=False, enable_service_links=False,
            security_context=k.PodSecurity(
                run_as_non_root=True, fs_group=USER, seccomp_profile=k.Seccomp(type="RuntimeDefault")
            ),
            node_selector={key: value} if key else {},
            tolerations=[k.Toleration(key=key, operator="Equal", value=value, effect="NoSchedule")] if key else [],
            volumes=[
                claimed(shape), *([k.Volume(name="code", config_map=k.ConfigMapSource(name=shape.name))] * code),
            ],
        ),
    )  # fmt: skip
