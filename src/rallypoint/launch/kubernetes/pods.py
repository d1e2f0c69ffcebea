"""The pods of a job: one container each, which runs the command of a role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rallypoint.launch import environment
from rallypoint.launch.commands.by_hand import FAILED
from rallypoint.launch.kubernetes import objects as k
from rallypoint.launch.kubernetes.shape import (
    CERTIFICATES,
    CODE,
    COORDINATOR_PORT,
    FOLDER,
    HEALTH_PORT,
    SERVER_PORT,
    TOKEN_FILE,
    Shape,
    Size,
)
from rallypoint.net.places.binding import EVERYWHERE
from rallypoint.net.tls.files import CA, CERTIFICATE, KEY

LEFT_STATUS = 143  # of who was told to go: 128 + SIGTERM. With 0 its pod would count as done, and nobody replace it
GPU = "nvidia.com/gpu"
JOB = "job"  # the volume with the job's folder
USER = 1000  # the image's user: see Dockerfile
_HEALTH = f"{EVERYWHERE}:{HEALTH_PORT}"
_STARTS_WITHIN_S = 1800  # a script may load its data before it joins
_FAREWELL_S = 30
_LIVING_S = 600  # members go on without a coordinator: its node is found lost, and its pod replaced, within minutes
_AWAY_S = 30  # a node that does not answer for so long is lost: by default Kubernetes waits for 300 s
_AWAY = tuple(
    k.Toleration(key=f"node.kubernetes.io/{what}", operator="Exists", effect="NoExecute", toleration_seconds=_AWAY_S)
    for what in ("not-ready", "unreachable")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of one job, by role.

    Attributes:
        shape: the job.
        name: of the JobSet. ``$(NAME)`` in it is one of `env`.
        folder: the volume with the job's folder. None: whoever starts the pods adds one that is called `JOB`.
        env: variables that each pod has besides.
    """

    shape: Shape
    name: str
    folder: k.Volume | None
    env: Sequence[k.Env] = ()

    @property
    def host(self) -> str:
        """The name under which the coordinator is found."""
        return f"{self.name}-coordinator-0-0.{self.name}"

    def coordinator(self) -> k.PodTemplate:
        """Return the coordinator's pod. Told to go, it ends at once: another goes on with its journal."""
        shape = self.shape
        snapshots = literal(shape.snapshots) or f"{FOLDER}/{self.name}/snapshots"
        command = (
            "rallypoint", "coordinator",
            f"--bind={EVERYWHERE}:{COORDINATOR_PORT}", f"--advertise={self.host}:{COORDINATOR_PORT}",
            f"--workers={shape.workers}", f"--servers={shape.servers}",
            f"--folder={FOLDER}/{self.name}", f"--snapshots={snapshots}",
            *([f"--resume={self._begins_with()}"] if shape.resume else []), f"--linger={shape.save}", *self._access(),
            *(literal(word) for word in shape.options),
        )  # fmt: skip
        container = self._container(
            "coordinator", command, port=COORDINATOR_PORT, size=shape.size_of("coordinator"),
            more=[k.Env(name=environment.LIVING, value=str(_LIVING_S))],
        )  # fmt: skip
        return self._template("coordinator", container, restart="Never", grace=_FAREWELL_S)

    def _begins_with(self) -> str:
        """The snapshot of another job, which is only read: this one writes into its own folder."""
        place, _, name = self.shape.resume.rpartition("/")
        return literal(self.shape.resume if "://" in place else f"{FOLDER}/{place}/snapshots/{name}")

    def server(self) -> k.PodTemplate:
        """Return a server's pod. It advertises the pod's own address, which nobody has to look up."""
        command = (
            "rallypoint", "server", f"--coordinator={self.host}:{COORDINATOR_PORT}",
            f"--bind={EVERYWHERE}:{SERVER_PORT}", f"--advertise=[$(POD_IP)]:{SERVER_PORT}", *self._access(),
        )  # fmt: skip
        container = self._container("server", command, port=SERVER_PORT, size=self.shape.size_of("server"))
        return self._template("server", container, restart="OnFailure", grace=self.shape.grace)

    def worker(self, *, name: str = "worker") -> k.PodTemplate:
        """Return a worker's pod, whose container has this name. The script is its `args`."""
        shape = self.shape
        command = (
            "rallypoint", "worker", f"--coordinator={self.host}:{COORDINATOR_PORT}", *self._access(),
        )  # fmt: skip
        container = self._container("worker", command, size=shape.size_of("worker"))
        container = replace(container, name=name, args=[literal(word) for word in shape.script])
        return self._template("worker", container, restart="OnFailure", grace=max(shape.grace, shape.save))

    def _access(self) -> tuple[str, ...]:
        tls = (f"--tls={CERTIFICATES}",) if self.shape.tls else ()
        return f"--token-file={TOKEN_FILE}", *tls, f"--health={_HEALTH}"

    def _container(
        self, role: str, command: tuple[str, ...], *, size: Size, port: int = 0, more: Sequence[k.Env] = (),
    ) -> k.Container:  # fmt: skip
        gpus = {GPU: str(size.gpus)} if size.gpus else {}
        asked = {what: much for what, much in (("cpu", size.cpu), ("memory", size.memory)) if much}
        # No limit of processor time: a process that is held back for moments holds all others up.
        limits = {"memory": size.memory, **gpus} if size.memory else gpus
        return k.Container(
            name=role, image=self.shape.image, image_pull_policy=self.shape.pull_policy, command=list(command),
            env=[
                *self.env,
                k.Env(name=environment.ID, value_from=field("metadata.name")),
                k.Env(name="POD_IP", value_from=field("status.podIP")),
                k.Env(name=environment.LEFT_STATUS, value=str(LEFT_STATUS)), *more,
            ],
            ports=[
                *([k.Port(name=role, container_port=port)] if port else []),
                k.Port(name="health", container_port=HEALTH_PORT),
            ],
            resources=k.Resources(requests={**asked, **gpus}, limits=limits),
            startup_probe=_probe("/healthz", period=5, failures=_STARTS_WITHIN_S // 5),
            liveness_probe=_probe("/healthz", period=20, failures=6),
            readiness_probe=_probe("/readyz", period=5, failures=3),
            security_context=k.ContainerSecurity(
                allow_privilege_escalation=False, capabilities=k.Capabilities(drop=["ALL"])
            ),
        )  # fmt: skip

    def _template(self, role: str, container: k.Container, *, restart: str, grace: int) -> k.PodTemplate:
        volumes, mounts = self._volumes(role)
        key, value = self.shape.spot if role == "worker" else ("", "")
        spot = [k.Toleration(key=key, operator="Equal", value=value, effect="NoSchedule")] if key else []
        apart = k.Spread(
            max_skew=1, topology_key="kubernetes.io/hostname", when_unsatisfiable="ScheduleAnyway",
            label_selector=k.LabelSelector(match_labels=self.shape.labels(role)),
        )  # fmt: skip
        return k.PodTemplate(
            metadata=k.Meta(labels=self.shape.labels(role)),
            spec=k.PodSpec(
                containers=[replace(container, volume_mounts=mounts)],
                restart_policy=restart, termination_grace_period_seconds=grace,
                automount_service_account_token=False, enable_service_links=False,
                share_process_namespace=True,  # else a process without a handler for SIGTERM would ignore it, as pid 1
                security_context=k.PodSecurity(
                    run_as_non_root=True, fs_group=USER, seccomp_profile=k.Seccomp(type="RuntimeDefault")
                ),
                node_selector={key: value} if key else {},
                tolerations=[*spot, *_AWAY],
                topology_spread_constraints=[apart] if role == "server" else [],
                volumes=volumes,
            ),
        )  # fmt: skip

    def _volumes(self, role: str) -> tuple[list[k.Volume], list[k.Mount]]:
        """Return what a role's pod mounts: its token, the job's folder, the script."""
        shape = self.shape
        token = k.SecretSource(
            secret_name=shape.secret_name, default_mode=0o440, items=[k.KeyToPath(key=role, path="token")]
        )
        volumes = [k.Volume(name="token", secret=token)]
        mounts = [k.Mount(name="token", mount_path=TOKEN_FILE.rpartition("/")[0], read_only=True)]
        if shape.tls:
            items = [k.KeyToPath(key=certificate_key(role, file), path=file) for file in (CA, CERTIFICATE, KEY)]
            own = k.SecretSource(secret_name=shape.tls, default_mode=0o440, items=items)
            volumes.append(k.Volume(name="tls", secret=own))
            mounts.append(k.Mount(name="tls", mount_path=CERTIFICATES, read_only=True))
        if role == "worker" and shape.code:
            volumes.append(k.Volume(name="code", config_map=k.ConfigMapSource(name=shape.name)))
            mounts.append(k.Mount(name="code", mount_path=CODE, read_only=True))
        if role == "coordinator" or shape.shared:
            volumes += [] if self.folder is None else [self.folder]
            mounts.append(k.Mount(name=JOB, mount_path=FOLDER))
        elif role == "worker":  # the folder is there in any case: scripts save their model in it
            volumes.append(k.Volume(name="saved", empty_dir=k.EmptyDir()))
            mounts.append(k.Mount(name="saved", mount_path=FOLDER))
        return volumes, mounts


def literal(word: str) -> str:
    """Return the user's word as it stands in a container's command: Kubernetes replaces ``$(NAME)`` there, not
    ``$$(NAME)``."""
    return word.replace("$", "$$")


def certificate_key(role: str, file: str) -> str:
    """Return the key in a Secret of one of a role's files, as ``server-cert.pem``. The CA's is everybody's."""
    return file if file == CA else f"{role}-{file}"


def claimed(shape: Shape) -> k.Volume:
    """Return the volume of the job's claim."""
    return k.Volume(name=JOB, persistent_volume_claim=k.ClaimSource(claim_name=shape.claim_name))


def what_ends_the_coordinator() -> k.PodFailurePolicy:
    """Return when the coordinator's Job fails: with the status that says that the training has failed. That its node is
    taken away does not count."""
    return k.PodFailurePolicy(rules=[
        k.PodFailureRule(
            action="FailJob", on_exit_codes=k.ExitCodes(container_name="coordinator", operator="In", values=[FAILED])
        ),
        k.PodFailureRule(action="Ignore", on_pod_conditions=[k.PodCondition(type="DisruptionTarget", status="True")]),
    ])  # fmt: skip


def field(path: str) -> k.EnvSource:
    """Return the source of a variable whose value is a field of its pod."""
    return k.EnvSource(field_ref=k.FieldRef(field_path=path))


def _probe(path: str, *, period: int, failures: int) -> k.Probe:
    return k.Probe(
        http_get=k.HttpGet(path=path, port="health"), period_seconds=period, timeout_seconds=5,
        failure_threshold=failures,
    )  # fmt: skip
