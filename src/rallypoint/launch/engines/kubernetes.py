"""Fills the template of a job's manifests, `jobset.yaml`, and writes manifests as YAML.

The template is read as YAML first and filled then, as data. So nothing that a user writes is ever read as YAML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer

from rallypoint.errors import Explained, UsageError, to_install
from rallypoint.launch.commands.by_hand import FAILED
from rallypoint.launch.options import RunOptions, check_script, options_of
from rallypoint.launch.plan import LAUNCHER, ON_LOOPBACK, option, parse_workers
from rallypoint.net.certificates import CA, CERTIFICATE, KEY
from rallypoint.net.handshake import new_token, role_token

_LONG = 4096
LONGEST_NAME = 63  # of whatever becomes part of a DNS name
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_SUBDOMAIN = 253
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_KEY = re.compile(rf"({_SUBDOMAIN.pattern}/)?{_LABEL_VALUE.pattern}")
_SNAPSHOT = re.compile(rf"({_LABEL.pattern}|[a-z0-9]+://[!-~]+)/(latest|step-\d{{1,18}}-\d{{1,9}})")
_FILE = re.compile(r"[-._A-Za-z0-9]{1,253}")  # as a key in a ConfigMap
_IMAGE = re.compile(r"[!-~]+")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?")
_WORDS = {  # the most characters, what it is, and how that is said
    "label": (LONGEST_NAME, _LABEL, "a name has small letters, digits and '-', begins with a letter and ends with a "
              f"letter or a digit, and has at most {LONGEST_NAME} of them"),
    "name": (_LONGEST_SUBDOMAIN, _SUBDOMAIN, "a name has small letters, digits, '-' and '.', begins and ends with a "
             f"letter or a digit, and has at most {_LONGEST_SUBDOMAIN} of them"),
    "quantity": (_LONG, _QUANTITY, "write 2 or 500m of a processor, 4Gi of memory or storage"),
    "image": (_LONG, _IMAGE, "an image's name has no spaces: write NAME:TAG"),
    "snapshot": (_LONG, _SNAPSHOT, "write JOB/SNAPSHOT, as gpt/step-00000120-10003, or URL/SNAPSHOT of a store "
                 "elsewhere"),
    "file": (_LONG, _FILE, "it cannot be the name of a file in a manifest: letters, digits, -._"),
}  # fmt: skip


def check_word(kind: str, text: str, option: str) -> None:
    """Raise UsageError, which names the option, unless `text` is one of this kind, as Kubernetes wants it."""
    longest, pattern, must = _WORDS[kind]
    if len(text) > longest or pattern.fullmatch(text) is None:
        raise UsageError(f"{option} {text if text.isprintable() else repr(text)}: {must}")


def node_label(text: str) -> tuple[str, str]:
    """Return the key and the value of a label of nodes, ``KEY=VALUE``. Raises UsageError if it is none."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UsageError(f"--spot {text}: write the nodes' label as KEY=VALUE")
    if _LABEL_KEY.fullmatch(key) is None or _LABEL_VALUE.fullmatch(value) is None:
        raise UsageError(f"--spot {text!r} is no label of a node: as cloud.google.com/gke-spot=true")
    return key, value


FOLDER = "/rallypoint"  # where the shared volume is mounted; each job has a folder in it
CODE = "/code"  # where a script that travels in the manifest is mounted
_JOB, _PODS, _STORAGE = "The job on Kubernetes", "Pods", "Storage"
_NOT_IN_A_POD = ("bind", "advertise", "folder", "config", "topology")
_OURS = {"workers", "servers", "snapshots", "sets", *_NOT_IN_A_POD}  # not passed on as they are


class RenderOptions(RunOptions, frozen=True, kw_only=True):
    """The options of a job on Kubernetes: those of a coordinator, and those of its pods."""

    image: Annotated[str, option(help="The image with rallypoint and your script.", panel=_JOB, metavar="IMAGE")] = ""
    name: Annotated[str, option(help="The job's name.", panel=_JOB, metavar="NAME")] = "rallypoint"
    secret: Annotated[str, option(
        help="The Secret with the roles' tokens; by default NAME-token. See `rallypoint k8s secret`.", panel=_JOB,
        metavar="NAME",
    )] = ""  # fmt: skip
    tls: Annotated[str, option(
        help="Use TLS: the Secret with the roles' certificates. See `rallypoint k8s secret --tls`.", panel=_JOB,
        metavar="NAME",
    )] = ""  # fmt: skip
    send_script: Annotated[bool, option(
        "--send-script", panel=_JOB, metavar=None,
        help="Put the script itself into the manifest: an image with rallypoint is enough.",
    )] = False  # fmt: skip
    cpu: Annotated[str, option(
        help="Processors of each worker: 4 or 500m; by default as many as --threads.", panel=_PODS, metavar="N",
    )] = ""  # fmt: skip
    memory: Annotated[str, option(help="Memory of each worker: 16Gi.", panel=_PODS, metavar="SIZE")] = ""
    gpus: Annotated[int, option(help="GPUs of each worker.", panel=_PODS, metavar="N", min=0)] = 0
    server_memory: Annotated[str, option(help="Memory of each server.", panel=_PODS, metavar="SIZE")] = ""
    spot: Annotated[str, option(
        help="Workers go to nodes with this label, which may be taken away: cloud.google.com/gke-spot=true.",
        panel=_PODS, metavar="KEY=VALUE",
    )] = ""  # fmt: skip
    save: Annotated[int, option(
        help="Seconds that workers have to save the model after the last step.", panel=_PODS, metavar="S", min=1,
    )] = 600  # fmt: skip
    claim: Annotated[str, option(
        help="A volume claim that is there; by default one is made.", panel=_STORAGE, metavar="NAME",
    )] = ""  # fmt: skip
    storage: Annotated[str, option(
        help="The size of the volume that is made. All pods mount it (ReadWriteMany), unless --snapshots is a URL.",
        panel=_STORAGE, metavar="SIZE",
    )] = "10Gi"  # fmt: skip
    resume: Annotated[str, option(
        help="Begin with this snapshot of another job on that volume, or with URL/SNAPSHOT. The other job's are only "
        "read.", panel=_STORAGE, metavar="JOB/SNAPSHOT",
    )] = ""  # fmt: skip
    # Options of a coordinator that have only one good value in a pod.
    bind: Annotated[str, typer.Option(hidden=True)] = ON_LOOPBACK
    advertise: Annotated[str, typer.Option(hidden=True)] = ""
    folder: Annotated[str, typer.Option(hidden=True)] = ""
    config: Annotated[Path | None, typer.Option("--config", hidden=True)] = None
    topology: Annotated[Path | None, typer.Option(hidden=True)] = None  # nobody knows the nodes' names before

    def check_job(self, script: Path) -> None:
        """Raise UsageError or ConfigError for what cannot be, or what Kubernetes would refuse."""
        usual = RenderOptions()
        for name in _NOT_IN_A_POD:
            if getattr(self, name) != getattr(usual, name):
                raise UsageError(f"--{name} has no meaning on Kubernetes" + " (use --set)" * (name == "config"))
        self.plan([], folder=FOLDER)  # it raises for what is impossible
        if self.snapshots not in ("", "none") and "://" not in self.snapshots:
            raise UsageError(f"--snapshots {self.snapshots}: give a URL that all pods reach, none, or leave it out")
        check_word("label", self.name, "--name")
        longest = max(len("coordinator-0-0"), len(f"worker-0-{self.most - 1}"), len(f"server-{self.servers - 1}-0"))
        if (over := len(f"{self.name}--abcde") + longest - LONGEST_NAME) > 0:
            raise UsageError(f"the name {self.name} is too long for the names of its pods: take {over} letters off")
        for name in ("secret", "tls", "claim"):
            if given := getattr(self, name):
                check_word("name", given, f"--{name}")
        for name in ("cpu", "memory", "server_memory", "storage"):
            if size := getattr(self, name):
                check_word("quantity", size, f"--{name.replace('_', '-')}")
        if not self.image:
            raise UsageError("which image? give --image NAME:TAG: it needs rallypoint and your script")
        check_word("image", self.image, "--image")
        if self.resume:
            check_word("snapshot", self.resume, "--resume")
        if self.send_script:
            check_word("file", script.name, "--send-script")
        _ = self.spot_label

    @property
    def most(self) -> int:
        """How many workers are started: the most that compute."""
        return parse_workers(self.workers)[0][1]

    @property
    def shared(self) -> bool:
        """True if snapshots are in the job's folder, so that all pods mount it; else only the coordinator does."""
        return "://" not in self.snapshots or (bool(self.resume) and "://" not in self.resume)

    @property
    def spot_label(self) -> tuple[str, str]:
        """The label of the nodes that workers go to; ("", ""): any. Raises UsageError if it is none."""
        return node_label(self.spot) if self.spot else ("", "")

    def text(self, script: Path) -> str:
        """Return the script's text. UsageError if there is none, or it is no text."""
        check_script(script)
        with Explained(UsageError, f"{script} cannot be sent", of=(OSError, UnicodeDecodeError)):
            return script.read_text(encoding="utf-8")

    def passed_on(self) -> list[str]:
        """Return what the coordinator gets besides: all that was not left as it is, and the settings."""
        given: list[str] = []
        usual = RenderOptions()
        for name in options_of(RunOptions, without=LAUNCHER):
            value = getattr(self, name)
            if name not in _OURS and value != getattr(usual, name):
                word = f"--{name.replace('_', '-')}"
                given.append(word if value is True else f"{word}={value}")
        return [*given, *(f"--set={setting}" for setting in self.sets or [])]


_COORDINATOR_MIB, _MEMBER_MIB = 512, 1  # of memory: docs/performance.md has what 2,000 members need
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


_ROLES = ("coordinator", "server", "worker")


def new_secret(name: str) -> dict[str, Any]:
    """Return a Secret with a new token for each role. UsageError if it cannot be called so."""
    token = new_token()
    return _secret(name, {role: role_token(token, role) for role in _ROLES})


def certificates(name: str, folder: Path) -> dict[str, Any]:
    """Return a Secret with each role's certificate, from a folder of `rallypoint token --tls`.

    UsageError if one is missing. Its keys are ``server-cert.pem`` and so on; the CA's certificate is everybody's.
    """
    secret = _secret(name, {})
    for role in _ROLES:
        for file in (CA, CERTIFICATE, KEY):
            path, todo = folder / role / file, f": `rallypoint token --tls {folder}` makes the certificates"
            with Explained(UsageError, f"{path} cannot be read", todo, of=(OSError, UnicodeDecodeError)):
                secret["stringData"][file if file == CA else f"{role}-{file}"] = path.read_text()
    return secret


def _secret(name: str, data: dict[str, str]) -> dict[str, Any]:
    check_word("name", name, "the Secret")
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "Opaque", "stringData": data}
