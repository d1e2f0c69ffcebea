"""Kubeflow Trainer v2: a runtime for a whole cluster, and a TrainJob that uses it.

The runtime is a JobSet's spec in which Trainer puts the TrainJob's image, arguments and number of nodes into the
workers, whom it finds by a label. The JobSet has the TrainJob's name, which the runtime cannot know: pods read it from
a label of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.launch.kubernetes import objects as k
from rallypoint.launch.kubernetes.beside import claim_spec
from rallypoint.launch.kubernetes.jobset import (
    AFTER_THE_COORDINATOR,
    ClaimPolicy,
    JobSetSpec,
    ReplicatedJob,
    Retention,
    job,
    jobset_spec,
)
from rallypoint.launch.kubernetes.pods import JOB, Pods, claimed, field, literal
from rallypoint.launch.kubernetes.shape import Shape

GROUP = "trainer.kubeflow.org"
API = f"{GROUP}/v1alpha1"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"  # a label of each pod of a JobSet
_NODE = "node"  # what Trainer calls the container that it changes
_TRAINER = {f"{GROUP}/trainjob-ancestor-step": "trainer"}


@dataclass(frozen=True, kw_only=True)
class Template(k.Part):
    spec: JobSetSpec


@dataclass(frozen=True, kw_only=True)
class Policy(k.Part):
    num_nodes: int


@dataclass(frozen=True, kw_only=True)
class RuntimeSpec(k.Part):
    ml_policy: Policy
    template: Template


@dataclass(frozen=True, kw_only=True)
class Runtime(k.Part):
    """A ClusterTrainingRuntime."""

    api_version: str
    kind: str
    metadata: k.Meta
    spec: RuntimeSpec


@dataclass(frozen=True, kw_only=True)
class RuntimeRef(k.Part):
    name: str
    api_group: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class Trainer(k.Part):
    image: str
    args: Sequence[str]
    num_nodes: int


@dataclass(frozen=True, kw_only=True)
class TrainJobSpec(k.Part):
    runtime_ref: RuntimeRef
    trainer: Trainer


@dataclass(frozen=True, kw_only=True)
class TrainJob(k.Part):
    api_version: str
    kind: str
    metadata: k.Meta
    spec: TrainJobSpec


def runtime(shape: Shape) -> Runtime:
    """Return the runtime of jobs of this shape. It belongs to no namespace."""
    name = k.Env(name="JOBSET_NAME", value_from=field(f"metadata.labels['{JOBSET_NAME}']"))
    pods = Pods(
        shape=shape, name="$(JOBSET_NAME)", env=[name],
        folder=claimed(shape) if shape.claim else None,
    )  # fmt: skip
    workers = ReplicatedJob(
        name=_NODE, replicas=1, depends_on=AFTER_THE_COORDINATOR,
        template=job(pods.worker(name=_NODE), count=shape.most, labels=_TRAINER),
    )  # fmt: skip
    template = k.Claim(metadata=k.Meta(name=JOB), spec=claim_spec(shape))
    claims = [ClaimPolicy(templates=[template], retention_policy=Retention(when_deleted="Retain"))]
    return Runtime(
        api_version=API, kind="ClusterTrainingRuntime",
        metadata=k.Meta(name=shape.name, labels={f"{GROUP}/framework": "rallypoint", **shape.labels()}),
        spec=RuntimeSpec(
            ml_policy=Policy(num_nodes=shape.most),
            template=Template(spec=jobset_spec(pods, workers=workers, claims=() if shape.claim else claims)),
        ),
    )  # fmt: skip


def train_job(shape: Shape) -> TrainJob:
    """Return a TrainJob that runs the script on the runtime of the same name."""
    return TrainJob(
        api_version=API, kind="TrainJob",
        metadata=k.Meta(name=shape.name, namespace=shape.namespace, labels=shape.labels()),
        spec=TrainJobSpec(
            runtime_ref=RuntimeRef(name=shape.name, api_group=GROUP, kind="ClusterTrainingRuntime"),
            trainer=Trainer(image=shape.image, args=[literal(word) for word in shape.script], num_nodes=shape.most),
        ),
    )  # fmt: skip


def servers_of(shape: Shape) -> dict[str, str]:
    """Return the labels of the servers' pods of that TrainJob, and of no other job of the runtime."""
    return {JOBSET_NAME: shape.name, "app.kubernetes.io/component": "server"}
