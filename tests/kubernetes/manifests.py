"""Manifests as `rallypoint k8s render` prints them, and what Kubernetes would say to them. There is no cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from rallypoint.launch.engines.kubernetes import RenderOptions, render

VERSIONS = ("1.31", "1.37")  # the first in which all that the manifests use is stable, and the newest that is known
REASONS = {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"}
OPEN_ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}  # those that need no feature gate

Manifest = dict[str, Any]


def rendered(script: str = "train.py", *arguments: str, **options: Any) -> list[Manifest]:
    """The manifests of a job, as data."""
    return list(yaml.safe_load_all(text_of(script, *arguments, **options)))


def text_of(script: str = "train.py", *arguments: str, **options: Any) -> str:
    """The manifests of a job, as they are printed."""
    given = RenderOptions(**{"image": "example.org/me/train:1", "name": "gpt", **options})
    return render(given, Path(script), arguments)


def the(kind: str, manifests: list[Manifest]) -> Manifest:
    """The only manifest of this kind."""
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def jobs_of(spec: Manifest) -> dict[str, Manifest]:
    """The replicated jobs of a JobSet's spec by name."""
    return {job["name"]: job for job in spec["replicatedJobs"]}


def pod_of(job: Manifest) -> Manifest:
    """The pod template of a replicated job."""
    pod: Manifest = job["template"]["spec"]["template"]
    return pod


def container_of(job: Manifest) -> Manifest:
    """The only container of a replicated job's pod."""
    (container,) = pod_of(job)["spec"]["containers"]
    found: Manifest = container
    return found


def check_core(manifest: Manifest) -> None:
    """Raise unless the manifest is one of Kubernetes's own kinds, and all that it says is known there."""
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


def check_jobs(spec: Manifest) -> None:
    """Raise unless each Job of a JobSet's spec is one that Kubernetes knows."""
    for job in spec["replicatedJobs"]:
        check_core({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]})
        pod = {"apiVersion": "v1", "kind": "Pod", **pod_of(job)}
        check_core({**pod, "metadata": {**pod["metadata"], "name": "pod"}})


def refusals(name: str, spec: Manifest) -> Iterator[str]:
    """Why JobSet's admission webhook (v0.12, default gates) would refuse a JobSet of this name."""
    jobs = spec["replicatedJobs"]
    names: list[str] = []
    if jobs and "dependsOn" in jobs[0]:
        yield "the first replicated job depends on another"
    for job in jobs:
        names.append(job["name"])
        inner, replicas = job["template"]["spec"], job.get("replicas", 1)
        yield from _no_label(f"{name}-{job['name']}-{replicas - 1}", "a Job's name")
        yield from _no_label(job.get("groupName", "default"), "a group's name")
        if inner.get("completionMode") == "Indexed" and "completions" in inner:
            last = f"{name}-{job['name']}-{replicas - 1}-{inner['completions'] - 1}-abcde"
            yield from _no_label(last, "a pod's name")
        if inner.get("parallelism", 1) * replicas > 2**31 - 1:
            yield f"{job['name']}: too many pods"
        depended = job.get("dependsOn", [])
        yield from (f"{job['name']} depends on {item['name']}" for item in depended if item["name"] not in names)
        yield from (f"status {item['status']}" for item in depended if item["status"] not in ("Ready", "Complete"))
    if len(set(names)) < len(names):
        yield "two replicated jobs have one name"
    if subdomain := spec.get("network", {}).get("subdomain"):
        yield from _no_label(subdomain, "the subdomain")
    for policy, targets in _targets(spec):
        yield from (f"{policy} names {target}" for target in targets if target not in names)
    rules = spec.get("failurePolicy", {}).get("rules", [])
    for rule in rules:
        if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]) or len(rule["name"]) > 128:
            yield f"a rule is called {rule['name']}"
        if rule["action"] not in OPEN_ACTIONS:
            yield f"{rule['action']} needs a feature gate"
        yield from (f"reason {reason}" for reason in rule.get("onJobFailureReasons", []) if reason not in REASONS)
    if len({rule["name"] for rule in rules}) < len(rules):
        yield "two rules have one name"


def _targets(spec: Manifest) -> Iterator[tuple[str, list[str]]]:
    yield "the success policy", spec.get("successPolicy", {}).get("targetReplicatedJobs", [])
    for rule in spec.get("failurePolicy", {}).get("rules", []):
        yield "the failure policy", rule.get("targetReplicatedJobs", [])


def _no_label(text: str, what: str) -> Iterator[str]:
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", text) or len(text) > 63:
        yield f"{what} is no DNS label: {text}"
