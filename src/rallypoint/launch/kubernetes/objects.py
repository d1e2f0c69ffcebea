"""The parts of Kubernetes's own objects that our manifests use, by the names of its API (v1).

Each has the API's fields in our spelling: `restart_policy` is written as ``restartPolicy``. What is not given is left
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

_IN_CAPITALS = {"Ip": "IP", "Dns": "DNS"}  # parts of names that the API writes so


class Part:
    """Any part of a manifest: a frozen dataclass."""

    stands: ClassVar[bool] = False  # also when it is empty


@dataclass(frozen=True, kw_only=True)
class Meta(Part):
    name: str = ""
    namespace: str = ""
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class FieldRef(Part):
    field_path: str


@dataclass(frozen=True, kw_only=True)
class EnvSource(Part):
    field_ref: FieldRef


@dataclass(frozen=True, kw_only=True)
class Env(Part):
    """An environment variable. ``$(NAME)`` in `value`, and in a container's arguments, is one that stands before it."""

    name: str
    value: str | None = None
    value_from: EnvSource | None = None


@dataclass(frozen=True, kw_only=True)
class HttpGet(Part):
    path: str
    port: str


@dataclass(frozen=True, kw_only=True)
class Probe(Part):
    http_get: HttpGet
    period_seconds: int = 10
    timeout_seconds: int = 1
    failure_threshold: int = 3


@dataclass(frozen=True, kw_only=True)
class Port(Part):
    name: str
    container_port: int
    protocol: str = "TCP"


@dataclass(frozen=True, kw_only=True)
class Mount(Part):
    name: str
    mount_path: str
    read_only: bool | None = None


@dataclass(frozen=True, kw_only=True)
class KeyToPath(Part):
    key: str
    path: str


@dataclass(frozen=True, kw_only=True)
class SecretSource(Part):
    secret_name: str
    default_mode: int = 0o644
    items: Sequence[KeyToPath] = ()


@dataclass(frozen=True, kw_only=True)
class ConfigMapSource(Part):
    name: str


@dataclass(frozen=True, kw_only=True)
class ClaimSource(Part):
    claim_name: str


@dataclass(frozen=True, kw_only=True)
class EmptyDir(Part):
    """An empty folder that lives as long as its pod. It has no fields that we use, and must stand all the same."""

    stands = True


@dataclass(frozen=True, kw_only=True)
class Volume(Part):
    name: str
    secret: SecretSource | None = None
    config_map: ConfigMapSource | None = None
    persistent_volume_claim: ClaimSource | None = None
    empty_dir: EmptyDir | None = None


@dataclass(frozen=True, kw_only=True)
class Resources(Part):
    requests: Mapping[str, str] | None = None
    limits: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Capabilities(Part):
    drop: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ContainerSecurity(Part):
    allow_privilege_escalation: bool | None = None
    capabilities: Capabilities | None = None


@dataclass(frozen=True, kw_only=True)
class Container(Part):
    name: str
    image: str
    image_pull_policy: str = ""
    command: Sequence[str] = ()
    args: Sequence[str] = ()
    env: Sequence[Env] = ()
    ports: Sequence[Port] = ()
    resources: Resources | None = None
    volume_mounts: Sequence[Mount] = ()
    startup_probe: Probe | None = None
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    security_context: ContainerSecurity | None = None


@dataclass(frozen=True, kw_only=True)
class Seccomp(Part):
    type: str


@dataclass(frozen=True, kw_only=True)
class PodSecurity(Part):
    run_as_non_root: bool | None = None
    fs_group: int | None = None
    seccomp_profile: Seccomp | None = None


@dataclass(frozen=True, kw_only=True)
class Toleration(Part):
    key: str
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


@dataclass(frozen=True, kw_only=True)
class LabelSelector(Part):
    match_labels: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Spread(Part):
    """Pods that `label_selector` finds are spread over the values of a node's label."""

    max_skew: int
    topology_key: str
    when_unsatisfiable: str
    label_selector: LabelSelector


@dataclass(frozen=True, kw_only=True)
class PodSpec(Part):
    containers: Sequence[Container]
    restart_policy: str = ""
    termination_grace_period_seconds: int | None = None
    automount_service_account_token: bool | None = None
    enable_service_links: bool | None = None
    share_process_namespace: bool | None = None
    security_context: PodSecurity | None = None
    node_selector: Mapping[str, str] | None = None
    tolerations: Sequence[Toleration] = ()
    topology_spread_constraints: Sequence[Spread] = ()
    volumes: Sequence[Volume] = ()


@dataclass(frozen=True, kw_only=True)
class PodTemplate(Part):
    metadata: Meta | None = None
    spec: PodSpec


@dataclass(frozen=True, kw_only=True)
class ExitCodes(Part):
    container_name: str
    operator: str
    values: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class PodCondition(Part):
    type: str
    status: str


@dataclass(frozen=True, kw_only=True)
class PodFailureRule(Part):
    action: str
    on_exit_codes: ExitCodes | None = None
    on_pod_conditions: Sequence[PodCondition] = ()


@dataclass(frozen=True, kw_only=True)
class PodFailurePolicy(Part):
    rules: Sequence[PodFailureRule]


@dataclass(frozen=True, kw_only=True)
class JobSpec(Part):
    template: PodTemplate
    parallelism: int | None = None
    completions: int | None = None
    completion_mode: str = ""
    backoff_limit: int | None = None
    pod_failure_policy: PodFailurePolicy | None = None


@dataclass(frozen=True, kw_only=True)
class JobTemplate(Part):
    metadata: Meta | None = None
    spec: JobSpec


@dataclass(frozen=True, kw_only=True)
class ClaimSpec(Part):
    access_modes: Sequence[str]
    resources: Resources
    storage_class_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim(Part):
    """A PersistentVolumeClaim; without `api_version` and `kind` where it is a template."""

    api_version: str = ""
    kind: str = ""
    metadata: Meta
    spec: ClaimSpec


@dataclass(frozen=True, kw_only=True)
class ConfigMap(Part):
    api_version: str
    kind: str
    metadata: Meta
    data: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Secret(Part):
    api_version: str
    kind: str
    metadata: Meta
    type: str
    string_data: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class BudgetSpec(Part):
    selector: LabelSelector
    min_available: int
    unhealthy_pod_eviction_policy: str = ""


@dataclass(frozen=True, kw_only=True)
class Budget(Part):
    """A PodDisruptionBudget."""

    api_version: str
    kind: str
    metadata: Meta
    spec: BudgetSpec


def plain(part: Part) -> dict[str, Any]:
    """Return the part as plain data, as YAML and JSON have it. Numbers and truth values always stand."""
    data = {}
    for field in fields(part):  # type: ignore[arg-type]
        value = _plain(getattr(part, field.name))
        if value is not None:
            data[_spelt(field.name)] = value
    return data


def _plain(value: object) -> Any:
    match value:
        case Part():
            return plain(value) or ({} if value.stands else None)
        case bool() | int():
            return value
        case Mapping():
            return dict(value) or None
        case str():
            return value or None
        case Sequence():
            return [item if isinstance(item, str) else _plain(item) for item in value] or None  # "" is a word too
    return None


def _spelt(name: str) -> str:
    first, *others = name.split("_")
    words = [word.capitalize() for word in others]
    return first + "".join(_IN_CAPITALS.get(word, word) for word in words)
