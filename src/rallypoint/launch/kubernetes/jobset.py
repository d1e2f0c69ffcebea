"""A JobSet (https://jobset.sigs.k8s.io, v1alpha2): the coordinator, one Job for each server, and the workers.

Each Job replaces its own pods, so one that is lost disturbs no other. (JobSet's own action for that, ``RestartJob``, is
behind a gate that is closed by default in v0.12.) The set is done when the coordinator is, and fails when it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rallypoint.launch.kubernetes import objects as k
from rallypoint.launch.kubernetes.pods import Pods, claimed, what_ends_the_coordinator
from rallypoint.launch.kubernetes.shape import Shape

API = "jobset.x-k8s.io/v1alpha2"
WITHOUT_END = 2**31 - 1  # a Job replaces its pods as often as it must: the coordinator knows when to give up
_COORDINATORS = 6  # pods of the coordinator that fail before the job does


@dataclass(frozen=True, kw_only=True)
class DependsOn(k.Part):
    name: str
    status: str


@dataclass(frozen=True, kw_only=True)
class ReplicatedJob(k.Part):
    name: str
    group_name: str = ""
    replicas: int | None = None
    depends_on: Sequence[DependsOn] = ()
    template: k.JobTemplate


@dataclass(frozen=True, kw_only=True)
class Network(k.Part):
    enable_dns_hostnames: bool
    publish_not_ready_addresses: bool
    subdomain: str = ""


@dataclass(frozen=True, kw_only=True)
class SuccessPolicy(k.Part):
    operator: str
    target_replicated_jobs: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class FailureRule(k.Part):
    name: str
    action: str
    target_replicated_jobs: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class FailurePolicy(k.Part):
    max_restarts: int | None = None
    rules: Sequence[FailureRule] = ()


@dataclass(frozen=True, kw_only=True)
class Retention(k.Part):
    when_deleted: str


@dataclass(frozen=True, kw_only=True)
class ClaimPolicy(k.Part):
    """Claims that the JobSet makes, ``NAME-JOBSET``, and mounts where a container has a mount of that name."""

    templates: Sequence[k.Claim]
    retention_policy: Retention


@dataclass(frozen=True, kw_only=True)
class JobSetSpec(k.Part):
    network: Network
    success_policy: SuccessPolicy
    failure_policy: FailurePolicy
    volume_claim_policies: Sequence[ClaimPolicy] = ()
    replicated_jobs: Sequence[ReplicatedJob]


@dataclass(frozen=True, kw_only=True)
class JobSet(k.Part):
    api_version: str
    kind: str
    metadata: k.Meta
    spec: JobSetSpec


AFTER_THE_COORDINATOR = (DependsOn(name="coordinator", status="Ready"),)


def jobset(shape: Shape) -> JobSet:
    """Return the JobSet of a job."""
    pods = Pods(shape=shape, name=shape.name, folder=claimed(shape))
    about = k.Meta(name=shape.name, namespace=shape.namespace, labels=shape.labels())
    return JobSet(api_version=API, kind="JobSet", metadata=about, spec=jobset_spec(pods))


def jobset_spec(
    pods: Pods, *, workers: ReplicatedJob | None = None, claims: Sequence[ClaimPolicy] = ()
) -> JobSetSpec:  # fmt: skip
    """Return the spec of a JobSet of these pods. `workers`: their part, if it is another than the usual one. `claims`:
    what the JobSet makes itself."""
    return JobSetSpec(
        network=Network(enable_dns_hostnames=True, publish_not_ready_addresses=True),
        success_policy=SuccessPolicy(operator="All", target_replicated_jobs=["coordinator"]),
        failure_policy=FailurePolicy(max_restarts=0, rules=[
            FailureRule(name="theTrainingHasFailed", action="FailJobSet", target_replicated_jobs=["coordinator"]),
        ]),
        volume_claim_policies=claims,
        replicated_jobs=[
            ReplicatedJob(
                name="coordinator", replicas=1,
                template=job(pods.coordinator(), backoff=_COORDINATORS, policy=what_ends_the_coordinator()),
            ),
            ReplicatedJob(
                name="server", replicas=pods.shape.servers, depends_on=AFTER_THE_COORDINATOR,
                template=job(pods.server()),
            ),
            workers or ReplicatedJob(
                name="worker", replicas=1, depends_on=AFTER_THE_COORDINATOR,
                template=job(pods.worker(), count=pods.shape.most),
            ),
        ],
    )  # fmt: skip


def job(
    pod: k.PodTemplate, *, count: int = 1, backoff: int = WITHOUT_END, policy: k.PodFailurePolicy | None = None,
    labels: Mapping[str, str] | None = None,
) -> k.JobTemplate:  # fmt: skip
    """Return a Job of `count` such pods, which fails when more than `backoff` of them have failed."""
    return k.JobTemplate(metadata=k.Meta(labels=labels), spec=k.JobSpec(
        parallelism=count, completions=count, completion_mode="Indexed", backoff_limit=backoff,
        pod_failure_policy=policy, template=pod,
    ))  # fmt: skip
