"""The options of `rallypoint k8s render`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rallypoint.errors import UsageError
from rallypoint.launch.kubernetes.names import (
    LONGEST_NAME,
    check_file,
    check_image,
    check_label,
    check_name,
    check_quantity,
    check_snapshot,
    node_label,
)
from rallypoint.launch.options import RunOptions, check_script, options_of
from rallypoint.launch.plan import LAUNCHER, ON_LOOPBACK, option, parse_workers

FOLDER = "/rallypoint"  # where the shared volume is mounted; each job has a folder in it
CODE = "/code"  # where a script that travels in the manifest is mounted
_JOB, _PODS, _STORAGE = "The job on Kubernetes", "Pods", "Storage"
_NOT_IN_A_POD = ("bind", "advertise", "folder", "config", "topology")
_OURS = {"workers", "servers", "snapshots", "sets", *_NOT_IN_A_POD}  # not passed on as they are


class RenderOptions(RunOptions, frozen=True, kw_only=True):
    """The options of a job on Kubernetes: those of a coordinator, and those of its pods."""

    image: Annotated[str, option(
        help="The image with rallypoint and your script.", panel=_JOB, metavar="IMAGE",
    )] = ""  # fmt: skip
    name: Annotated[str, option(help="The job's name.", panel=_JOB, metavar="NAME")] = "rallypoint"
    namespace: Annotated[str, option(
        help="Its namespace; by default that of kubectl.", panel=_JOB, metavar="NAME",
    )] = ""  # fmt: skip
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
    server_cpu: Annotated[str, option(help="Processors of each server.", panel=_PODS, metavar="N")] = "1"
    server_memory: Annotated[str, option(help="Memory of each server.", panel=_PODS, metavar="SIZE")] = ""
    spot: Annotated[str, option(
        help="Workers go to nodes with this label, which may be taken away: cloud.google.com/gke-spot=true.",
        panel=_PODS, metavar="KEY=VALUE",
    )] = ""  # fmt: skip
    grace: Annotated[int, option(
        help="Seconds in which a pod that must go hands over what it holds.", panel=_PODS, metavar="S", min=15,
    )] = 60  # fmt: skip
    save: Annotated[int, option(
        help="Seconds that workers have to save the model after the last step.", panel=_PODS, metavar="S", min=1,
    )] = 600  # fmt: skip
    pull_policy: Annotated[str, option(
        help="Always, IfNotPresent or Never.", panel=_PODS, metavar="WHEN",
    )] = ""  # fmt: skip
    claim: Annotated[str, option(
        help="A volume claim that is there; by default one is made.", panel=_STORAGE, metavar="NAME",
    )] = ""  # fmt: skip
    storage: Annotated[str, option(
        help="The size of the volume that is made.", panel=_STORAGE, metavar="SIZE",
    )] = "10Gi"  # fmt: skip
    storage_class: Annotated[str, option(
        help="Its storage class. All pods mount it (ReadWriteMany), unless --snapshots is a URL.", panel=_STORAGE,
        metavar="NAME",
    )] = ""  # fmt: skip
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
        check_label(self.name, "--name")
        longest = max(len("coordinator-0-0"), len(f"worker-0-{self.most - 1}"), len(f"server-{self.servers - 1}-0"))
        if (over := len(f"{self.name}--abcde") + longest - LONGEST_NAME) > 0:
            raise UsageError(f"the name {self.name} is too long for the names of its pods: take {over} letters off")
        if self.namespace:
            check_label(self.namespace, "--namespace")
        for name in ("secret", "tls", "claim", "storage_class"):
            if given := getattr(self, name):
                check_name(given, f"--{name.replace('_', '-')}")
        for size in (self.cpu, self.memory, self.server_cpu, self.server_memory, self.storage):
            check_quantity(size)
        check_image(self.image, self.pull_policy)
        if self.resume:
            check_snapshot(self.resume)
        if self.send_script:
            check_file(script.name)
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
        try:
            return script.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{script} cannot be sent: {error}") from None

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
