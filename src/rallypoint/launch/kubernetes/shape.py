"""What a job looks like on Kubernetes: how many pods of which size, where they run, and what they are given."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import msgspec

from rallypoint.errors import UsageError
from rallypoint.launch.plan import parse_workers

FOLDER = "/rallypoint"  # where the shared volume is mounted; each job has a folder in it
TOKEN_FILE = "/run/rallypoint/token/token"
CERTIFICATES = "/run/rallypoint/tls"
CODE = "/code"  # where a script that travels in the manifest is mounted
COORDINATOR_PORT, SERVER_PORT, HEALTH_PORT = 4700, 4701, 4780
_COORDINATOR_MIB, _MEMBER_MIB = 512, 1  # of memory: docs/scale.md has what 2,000 members need
LONGEST_NAME = 63  # of whatever becomes part of a DNS name
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_SUBDOMAIN = 253
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_KEY = re.compile(rf"({_SUBDOMAIN.pattern}/)?{_LABEL_VALUE.pattern}")
_SNAPSHOT = re.compile(rf"({_LABEL.pattern}|[a-z0-9]+://[!-~]+)/(latest|step-\d{{1,18}}-\d{{1,9}})")
_FILE = re.compile(r"[-._A-Za-z0-9]{1,253}")  # as a key in a ConfigMap
_IMAGE = re.compile(r"[!-~]+")
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?")


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod asks for, as Kubernetes writes it: ``cpu="500m"``, ``memory="2Gi"``. "": as it comes."""

    cpu: str = ""
    memory: str = ""
    gpus: int = 0


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A job on Kubernetes.

    Attributes:
        name: of the job, and of what belongs to it. A DNS label.
        namespace: "": the one that kubectl uses.
        image: has `rallypoint` and the script.
        script: the worker's script and its arguments.
        code: the script's text, if it is to travel in the manifest; "": it is in the image.
        workers: as the command line has it: ``4``, or ``2:8``.
        options: what `rallypoint coordinator` gets besides: ``["--heartbeat", "5.0"]``.
        threads: intra-op threads of each worker.
        snapshots: a URL that all pods reach; "": in the shared volume; "none": there are none.
        resume: the snapshot of another job to begin with: ``JOB/SNAPSHOT`` in the shared volume, or ``URL/SNAPSHOT``.
        claim: a claim that is there; "": one is made.
        storage: how much that one asks for.
        spot: the label of the nodes that may be taken away, ``(key, value)``, for workers. A taint of the same key is
            tolerated.
        grace: seconds that a pod has, after SIGTERM, to hand over what it holds.
        save: seconds that workers have, after the last step, to save the model.
        secret: the Secret with the roles' tokens; "": that of the job's name.
        tls: the Secret with the roles' certificates; "": there is no TLS.
    """

    name: str
    namespace: str = ""
    image: str
    pull_policy: str = ""
    script: tuple[str, ...]
    code: str = ""
    workers: str
    servers: int
    options: tuple[str, ...] = ()
    threads: int = 1
    snapshots: str = ""
    resume: str = ""
    claim: str = ""
    storage: str = "10Gi"
    storage_class: str = ""
    worker: Size = Size()
    server: Size = Size()
    spot: tuple[str, str] = ("", "")
    grace: int = 60
    save: int = 600
    secret: str = ""
    tls: str = ""

    def __post_init__(self) -> None:
        """Raises UsageError for what Kubernetes would refuse."""
        check_label(self.name, "--name")
        longest = f"{self.name}-coordinator-0-0-abcde"
        workers = f"{self.name}-worker-0-{self.most - 1}-abcde"
        servers = f"{self.name}-server-{self.servers - 1}-0-abcde"
        if (over := max(map(len, (longest, workers, servers))) - LONGEST_NAME) > 0:
            raise UsageError(f"the name {self.name} is too long for the names of its pods: take {over} letters off")
        if self.namespace:
            check_label(self.namespace, "--namespace")
        self._check_names()
        for size in (self.worker.cpu, self.worker.memory, self.server.cpu, self.server.memory, self.storage):
            if size and _QUANTITY.fullmatch(size) is None:
                raise UsageError(f"'{size}' is no quantity: write 2 or 500m of a processor, 4Gi of memory or storage")
        if not self.image:
            raise UsageError("which image? give --image NAME:TAG: it needs rallypoint and your script")

    def _check_names(self) -> None:
        """Raises UsageError for names of other things that none of them can have: they stand in the manifest as is."""
        named = {"--secret": self.secret, "--tls": self.tls, "--claim": self.claim}
        for option, name in {**named, "--storage-class": self.storage_class}.items():
            if name:
                check_name(name, option)
        if self.resume and _SNAPSHOT.fullmatch(self.resume) is None:
            raise UsageError(
                f"--resume {self.resume!r}: write JOB/SNAPSHOT, as gpt/step-00000120-10003, or URL/SNAPSHOT of a store "
                "elsewhere"
            )
        if _IMAGE.fullmatch(self.image) is None and self.image:
            raise UsageError(f"--image {self.image!r}: an image's name has no spaces: write NAME:TAG")
        if self.code and _FILE.fullmatch(name := PurePosixPath(self.script[0]).name) is None:
            raise UsageError(
                f"--send-script: {name!r} cannot be the name of a file in a manifest: letters, digits, -._"
            )
        if self.pull_policy not in ("", *_PULL_POLICIES):
            raise UsageError(f"--pull-policy {self.pull_policy!r}: choose of {', '.join(_PULL_POLICIES)}")
        key, value = self.spot
        if key and (_LABEL_KEY.fullmatch(key) is None or _LABEL_VALUE.fullmatch(value) is None):
            raise UsageError(f"--spot {f'{key}={value}'!r} is no label of a node: as cloud.google.com/gke-spot=true")

    @property
    def most(self) -> int:
        """How many workers are started: the most that compute."""
        return parse_workers(self.workers)[0][1]

    @property
    def shared(self) -> bool:
        """True if snapshots are in the job's folder, so that all pods mount it; else only the coordinator does."""
        return "://" not in self.snapshots or (bool(self.resume) and "://" not in self.resume)

    @property
    def claim_name(self) -> str:
        """The name of the volume's claim."""
        return self.claim or self.name

    @property
    def secret_name(self) -> str:
        """The name of the Secret."""
        return self.secret or f"{self.name}-token"

    @property
    def nodes_cpus(self) -> int:
        """What Ray counts on a node with one worker and its share of the servers: a CPU for each thread and server."""
        least = parse_workers(self.workers)[0][0] if ":" in self.workers else self.most
        return self.threads - (-self.servers // least)

    def size_of(self, role: str) -> Size:
        """What a pod of this role asks for: "coordinator", "worker", "server", or "node", which is both.

        Each asks for some processor time: a pod that asks for nothing is the first to be ended when its node is full.
        The coordinator's memory is mostly the views that it sends: twice what was measured with many members.
        """
        if role == "coordinator":
            return Size(cpu="250m", memory=f"{_COORDINATOR_MIB + _MEMBER_MIB * (self.most + self.servers)}Mi")
        if role == "server":
            return msgspec.structs.replace(self.server, cpu=self.server.cpu or "1")
        return msgspec.structs.replace(
            self.worker, cpu=self.worker.cpu or str(self.nodes_cpus if role == "node" else self.threads)
        )

    def labels(self, role: str = "") -> dict[str, str]:
        """Return the labels of what belongs to this job; of one role's pods, if `role` is given."""
        labels = {"app.kubernetes.io/name": "rallypoint", "app.kubernetes.io/instance": self.name}
        return {**labels, "app.kubernetes.io/component": role} if role else labels


def check_name(text: str, option: str) -> None:
    """Raise UsageError unless `text` is a DNS subdomain (RFC 1123), as names of Secrets, claims and classes are."""
    if len(text) > _LONGEST_SUBDOMAIN or _SUBDOMAIN.fullmatch(text) is None:
        raise UsageError(
            f"{option} {_shown(text)}: a name has small letters, digits, '-' and '.', begins and ends with a letter or "
            f"a digit, and has at most {_LONGEST_SUBDOMAIN} of them"
        )


def check_label(text: str, option: str) -> None:
    """Raise UsageError unless `text` is a DNS label (RFC 1035), as names in Kubernetes must be."""
    if len(text) > LONGEST_NAME or _LABEL.fullmatch(text) is None:
        raise UsageError(
            f"{option} {_shown(text)}: a name has small letters, digits and '-', begins "
            f"with a letter and ends with a letter or a digit, and has at most {LONGEST_NAME} of them"
        )


def _shown(text: str) -> str:
    return text if text.isprintable() else repr(text)
