"""All manifests of a job, by what runs it."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.errors import UsageError, meant
from rallypoint.launch.kubernetes.beside import budget, claim, code
from rallypoint.launch.kubernetes.jobset import jobset
from rallypoint.launch.kubernetes.kuberay import ray_job
from rallypoint.launch.kubernetes.objects import Part
from rallypoint.launch.kubernetes.shape import Shape
from rallypoint.launch.kubernetes.text import yaml_of
from rallypoint.launch.kubernetes.trainer import runtime, servers_of, train_job


def render(kind: str, shape: Shape) -> str:
    """Return the manifests of a job of this kind as YAML. UsageError if there is no such kind, or PyYAML is missing."""
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise UsageError(f"there is no kind {kind}{meant(kind, KINDS) or f': choose one of {known}'}")
    manifests = yaml_of(KINDS[kind](shape))
    header = _RAY_HEADER if kind == "kuberay" else _HEADER + (_TLS_HEADER if shape.tls else "")
    header += "" if shape.worker.memory and (shape.server.memory or kind == "kuberay") else _MEMORY_HEADER
    return header.format(shape=shape, namespace=_namespace(shape)) + manifests


def _jobset(shape: Shape) -> list[Part]:
    return [*_volume(shape), *_script(shape), budget(shape), jobset(shape)]


def _trainer(shape: Shape) -> list[Part]:
    return [*_script(shape), runtime(shape), budget(shape, servers_of(shape)), train_job(shape)]


def _kuberay(shape: Shape) -> list[Part]:
    return [*_volume(shape), *_script(shape), ray_job(shape)]


def _volume(shape: Shape) -> list[Part]:
    return [] if shape.claim else [claim(shape)]


def _script(shape: Shape) -> list[Part]:
    return [code(shape)] if shape.code else []


def _namespace(shape: Shape) -> str:
    return f" --namespace {shape.namespace}" if shape.namespace else ""


KINDS: dict[str, Callable[[Shape], list[Part]]] = {"jobset": _jobset, "trainer": _trainer, "kuberay": _kuberay}
_HEADER = """\
# Once, before this: rallypoint k8s secret {shape.secret_name}{namespace} | kubectl apply -f -
# How it gets on:    kubectl logs -f -l app.kubernetes.io/instance={shape.name},app.kubernetes.io/component=coordinator
"""
_TLS_HEADER = """\
# For TLS, once:     rallypoint certs certificates
#                    rallypoint k8s secret {shape.tls}{namespace} --tls certificates | kubectl apply -f -
"""
_MEMORY_HEADER = """\
# Without --memory and --server-memory, pods are ended early when a node is short of memory.
"""
_RAY_HEADER = """\
# How it gets on: kubectl logs -f -l job-name={shape.name}
"""
