"""What a job needs beside its pods: a volume, a limit to what a drain may take at once, a Secret, a script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from rallypoint.errors import UsageError
from rallypoint.launch.kubernetes import objects as k
from rallypoint.launch.kubernetes.pods import certificate_key
from rallypoint.launch.kubernetes.shape import Shape, check_label, check_name
from rallypoint.net.handshake import new_token
from rallypoint.net.keys import role_token
from rallypoint.net.tls.files import CA, CERTIFICATE, KEY

_ROLES = ("coordinator", "server", "worker")


def claim(shape: Shape) -> k.Claim:
    """Return the claim of the volume with the job's folder; the coordinator's alone, if snapshots are elsewhere."""
    return k.Claim(
        api_version="v1", kind="PersistentVolumeClaim", metadata=_meta(shape, shape.claim_name), spec=claim_spec(shape)
    )


def claim_spec(shape: Shape) -> k.ClaimSpec:
    """Return what the job's volume is asked to be."""
    return k.ClaimSpec(
        access_modes=["ReadWriteMany" if shape.shared else "ReadWriteOnce"],
        resources=k.Resources(requests={"storage": shape.storage}), storage_class_name=shape.storage_class,
    )  # fmt: skip


def budget(shape: Shape, labels: Mapping[str, str] | None = None) -> k.Budget:
    """Return the PodDisruptionBudget of the servers: a drain takes one at a time, and never the only one.

    `labels`: those of the servers' pods, if they are not the usual ones. (For pods of a Job a budget can only say how
    many must stay.)
    """
    return k.Budget(
        api_version="policy/v1", kind="PodDisruptionBudget", metadata=_meta(shape, f"{shape.name}-server"),
        spec=k.BudgetSpec(
            min_available=max(1, shape.servers - 1), unhealthy_pod_eviction_policy="AlwaysAllow",
            selector=k.LabelSelector(match_labels=labels or shape.labels("server")),
        ),
    )  # fmt: skip


def code(shape: Shape) -> k.ConfigMap:
    """Return the ConfigMap with the script's text."""
    name = PurePosixPath(shape.script[0]).name
    return k.ConfigMap(api_version="v1", kind="ConfigMap", metadata=_meta(shape, shape.name), data={name: shape.code})


def new_secret(name: str, namespace: str = "") -> k.Secret:
    """Return a Secret with a new token for each role. UsageError if it cannot be called so."""
    _check_names(name, namespace)
    token = new_token()
    return k.Secret(
        api_version="v1", kind="Secret", metadata=k.Meta(name=name, namespace=namespace), type="Opaque",
        string_data={role: role_token(token, role) for role in _ROLES},
    )  # fmt: skip


def certificates(name: str, folder: Path, namespace: str = "") -> k.Secret:
    """Return a Secret with each role's certificate, from a folder of `rallypoint certs`. UsageError if one is missing.
    """
    _check_names(name, namespace)
    data: dict[str, str] = {}
    for role in _ROLES:
        for file in (CA, CERTIFICATE, KEY):
            try:
                data[certificate_key(role, file)] = (folder / role / file).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"{folder / role / file} cannot be read ({error}): `rallypoint certs {folder}` makes "
                                 "the certificates") from None
    return k.Secret(
        api_version="v1", kind="Secret", metadata=k.Meta(name=name, namespace=namespace), type="Opaque",
        string_data=data,
    )  # fmt: skip


def _check_names(name: str, namespace: str) -> None:
    check_name(name, "the Secret")
    if namespace:
        check_label(namespace, "--namespace")


def _meta(shape: Shape, name: str) -> k.Meta:
    return k.Meta(name=name, namespace=shape.namespace, labels=shape.labels())
