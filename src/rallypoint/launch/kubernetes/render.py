"""Fills the template of a job's manifests, `jobset.yaml`, and writes manifests as YAML.

The template is read as YAML first and filled then, as data. So nothing that a user writes is ever read as YAML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

from rallypoint.errors import UsageError, to_install
from rallypoint.launch.commands.by_hand import FAILED
from rallypoint.launch.kubernetes.options import CODE, FOLDER, RenderOptions

_COORDINATOR_MIB, _MEMBER_MIB = 512, 1  # of memory: docs/scale.md has what 2,000 members need
_WORD = re.compile(r"\$([a-z_]+)")
_HEADER = """\
# Once, before this: rallypoint k8s secret {secret} | kubectl apply -f -
# How it gets on:    kubectl logs -f -l app.kubernetes.io/instance={name},app.kubernetes.io/component=coordinator
"""
_TLS_HEADER = """\
# For TLS, once:     rallypoint token --tls certificates
#                    rallypoint k8s secret {tls} --tls certificates | kubectl apply -f -
"""
_MEMORY_HEADER = """\
# Without --memory and --server-memory, pods are ended early when a node is short of memory.
"""


def render(options: RenderOptions, script: Path, arguments: Sequence[str]) -> str:
    """Return the manifests of a job whose workers run this script, as YAML.

    Raises UsageError or ConfigError for options that cannot be, and UsageError if PyYAML is missing.
    """
    options.check_job(script)
    values = _values(options, script, arguments)
    template = resources.files(__package__).joinpath("jobset.yaml").read_text(encoding="utf-8")
    manifests = [filled(part, values) for part in _yaml().safe_load_all(template)]
    header = _HEADER + _TLS_HEADER * bool(options.tls)
    header += "" if options.memory and options.server_memory else _MEMORY_HEADER
    return header.format_map(values) + yaml_of([manifest for manifest in manifests if manifest])


def _values(options: RenderOptions, script: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the words of the template mean for this job; None and what is empty: it is left out."""
    name, most = options.name, options.most
    spot_key, spot_value = options.spot_label
    labels = {"app.kubernetes.io/name": "rallypoint", "app.kubernetes.io/instance": name}
    roles = ("coordinator", "server", "worker")
    path = str(PurePosixPath(CODE) / script.name) if options.send_script else str(script)
    return {
        "name": name, "labels": labels,
        **{f"{role}_labels": {**labels, "app.kubernetes.io/component": role} for role in roles},
        "host": f"{name}-coordinator-0-0.{name}",  # under which the coordinator is found
        "image": options.image, "failed_status": FAILED,
        "claim_name": options.claim or name, "makes_claim": not options.claim,
        "access_mode": "ReadWriteMany" if options.shared else "ReadWriteOnce",
        "storage": options.storage, "shared": options.shared, "apart": not options.shared,
        "workers": options.workers, "servers": options.servers, "most": most,
        "servers_that_stay": max(1, options.servers - 1),
        "snapshots": literal(options.snapshots) or f"{FOLDER}/{name}/snapshots",
        "resume": options.resume and f"--resume={literal(_snapshot(options.resume))}",
        "options": [literal(word) for word in options.passed_on()],
        "script": [literal(word) for word in (path, *arguments)],
        "code": {script.name: options.text(script)} if options.send_script else None,
        "secret": options.secret or f"{name}-token",
        "tls": options.tls, "tls_option": options.tls and "--tls=/run/rallypoint/tls",
        "save": options.save, "worker_grace": max(60, options.save),
        # The coordinator's memory is mostly the views that it sends: twice what was measured with many members.
        "coordinator_memory": f"{_COORDINATOR_MIB + _MEMBER_MIB * (most + options.servers)}Mi",
        # A pod that asks for no processor time is the first to be ended when its node is full.
        "cpu": options.cpu or str(options.threads or 1), "memory": options.memory,
        "gpus": str(options.gpus) if options.gpus else None,
        "server_memory": options.server_memory,
        "spot": options.spot, "spot_key": spot_key, "spot_value": spot_value,
        "spot_label": {spot_key: spot_value} if spot_key else None,
    }  # fmt: skip


def _snapshot(resume: str) -> str:
    """Where the snapshot of another job is, which is only read: this one writes into its own folder."""
    place, _, name = resume.rpartition("/")
    return resume if "://" in place else f"{FOLDER}/{place}/snapshots/{name}"


def literal(word: str) -> str:
    """Return the user's word as it stands in a container's command: Kubernetes replaces ``$(NAME)`` there, not
    ``$$(NAME)``."""
    return word.replace("$", "$$")


def filled(part: Any, values: Mapping[str, Any]) -> Any:
    """Return a part of the template with each ``$word`` replaced; None if its `when` is empty."""
    if isinstance(part, str):
        if whole := _WORD.fullmatch(part):
            return values[whole[1]]
        return _WORD.sub(lambda found: str(values[found[1]]), part)
    if isinstance(part, dict):
        if "when" in part and not filled(part["when"], values):
            return None
        items = [(key, value, filled(value, values)) for key, value in part.items() if key != "when"]
        return {key: made for key, value, made in items if made == value or not _is_empty(made)}
    if isinstance(part, list):
        made = [filled(item, values) for item in part]
        lists = [item if isinstance(item, list) else [item] * (not _is_empty(item)) for item in made]
        return [item for items in lists for item in items]
    return part


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def yaml_of(manifests: Sequence[Mapping[str, Any]]) -> str:
    """Return the manifests as one YAML text. UsageError if PyYAML is not installed."""
    yaml = _yaml()

    class _Dumper(yaml.SafeDumper):  # type: ignore[name-defined,misc]
        """Writes texts of several lines as they stand, and no references to what stood before."""

        def ignore_aliases(self, data: object) -> bool:
            """There are no references."""
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    _Dumper.add_representer(str, text)
    return str(yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise UsageError(f"manifests need PyYAML: {to_install('k8s')}") from None
    return yaml
