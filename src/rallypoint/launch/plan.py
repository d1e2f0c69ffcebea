"""The plan of a run: what to start. It is kept in the run's folder as ``run.json``, so that the run can be resumed."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Any

import msgspec

from rallypoint.core.topology.told import Topology
from rallypoint.errors import ConfigError, DataError, UsageError
from rallypoint.launch import environment
from rallypoint.launch.engines.remote.hosts import Host
from rallypoint.own_files import opened, read_file
from rallypoint.store.retention import Retention

RUN_FILE = "run.json"
SNAPSHOTS = "snapshots"
SNAPSHOT_SECONDS = 60.0  # between two, where nobody has said it
TLS = "tls"
AUTO = "auto"
HERE = "{host}"  # in --bind: an engine replaces it by the address of the machine that it has chosen


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a run.

    Attributes:
        worker: the argv of every worker process.
        script: the part of `worker` that is the user's script, as a whole path; "" if there is none. See `kept`.
        workers: (least, most): with fewer than the least the job waits; workers above the most stand by.
        workers_start: how many workers to start with.
        standby: how many more are started, imported and connected.
        aggregators: how many aggregators are started.
        folder: the run's folder.
        bind: ``host:port`` at which the coordinator listens; see HERE and `server_arguments`.
        advertise: ``host`` or ``host:port`` that others connect to instead; "": where the coordinator listens.
        resume: the snapshot to continue from; "" for a new run.
        engine: what starts the processes: see `engines.choice`.
        tls: the folder of the certificates; AUTO: made for the run, in its folder; "": without TLS.
        transport: tcp, nixl or auto: see `net.rdma.choice`.
        hosts, ssh: the machines of the engine "ssh", and the command that is its client.
        address: where the engine is; "": where it is by default.
        gpus: how many each worker gets of an engine that counts them.
        ranks: the processes of each worker; with more than one it is a group: see `launch.engines.ranks`.
        metrics: the folder for the file that says where each process tells its metrics; "": none does.
        watch: the run's page is served while it goes on: see `launch.observing.page`.
        track: where the run's figures go, each ``KIND:FOLDER``: see `watch.trackers`.
        report_after: seconds without a step until the run leaves a report; 0: it leaves none.
        threads: the intra-op threads of workers and servers; None: nobody has said it, so the coordinator decides when
            it knows whether a job goes on: see `CoordinatorService`.
        replication, topology, measure_links: see `Terms`.
        snapshot_seconds: how often to take snapshots; None: nobody has said it, so SNAPSHOT_SECONDS, or what the job
            finds (`tune="auto"`).
        changes: sentences that say which settings were changed when the run went on, and from which step.
    """

    worker: tuple[str, ...]
    script: str = ""
    workers: tuple[int, int] = (1, 2)
    workers_start: int = 2
    standby: int = 0
    servers: int = 2
    aggregators: int = 0
    replication: int = 0
    heartbeat: float = 3.0
    hang_after: float = 60.0
    backup_tasks: bool = False
    threads: int | None = None
    bind: str = "127.0.0.1:0"
    advertise: str = ""
    folder: str = ""
    overrides: dict[str, Any] = {}
    snapshots: str = ""
    snapshot_steps: int = 0
    snapshot_seconds: float | None = None
    compression: str = "none"
    retention: Retention = Retention()
    restart: bool = True
    trace: str = ""
    trace_steps: tuple[int, int] = (5, 7)
    resume: str = ""
    engine: str = "local"
    tls: str = ""
    transport: str = "tcp"
    hosts: tuple[Host, ...] = ()
    ssh: str = "ssh"
    address: str = ""
    gpus: float = 0.0
    ranks: int = 1
    changes: tuple[str, ...] = ()
    metrics: str = ""
    watch: bool = False
    report_after: float = 30.0
    track: tuple[str, ...] = ()
    topology: Topology = Topology()
    measure_links: bool = False

    @property
    def threads_at_first(self) -> int:
        """The intra-op threads with which a process starts, until it has joined the job."""
        return self.threads or 1


def parse_workers(text: str) -> tuple[tuple[int, int], int]:
    """Parse ``4`` or ``2:8`` to ((least, most), how many to start with). Raises ConfigError when it is neither.

    With a plain number the job starts with so many workers, and continues with fewer while some are gone. With a range
    it starts with the least.
    """
    least, colon, most = text.partition(":")
    numbers = [part for part in (least, most) if part.isascii() and part.isdigit() and int(part[:9]) > 0]
    if len(numbers) != 1 + len(colon):
        raise ConfigError(f"'{text}' is not a number of workers: write 4, or 2:8 for from two to eight")
    if colon and int(most) < int(least):
        raise ConfigError(f"--workers {text}: the least number comes first, as in {most}:{least}")
    if not colon:
        return (1, int(least)), int(least)
    return (int(least), int(most)), int(least)


def resized(plan: Launch, workers: int, servers: int) -> Launch:
    """Return the plan with other numbers of processes; 0: unchanged."""
    if workers:
        plan = msgspec.structs.replace(plan, workers=(min(plan.workers[0], workers), workers), workers_start=workers)
    if servers:
        plan = msgspec.structs.replace(plan, servers=servers)
    return plan


def with_whole_paths(plan: Launch) -> Launch:
    """Return the plan with whole paths: it will be read in another folder, where the same words mean other files."""
    script = os.path.abspath(plan.script) if plan.script else ""
    known = bool(script) and plan.script in plan.worker
    at = plan.worker.index(plan.script) if known else 0
    local = bool(plan.snapshots) and "://" not in plan.snapshots
    return msgspec.structs.replace(
        plan, script=script, worker=(*plan.worker[:at], script, *plan.worker[at + 1 :]) if known else plan.worker,
        snapshots=os.path.abspath(plan.snapshots) if local else plan.snapshots,
        trace=os.path.abspath(plan.trace) if plan.trace else "",
    )  # fmt: skip


def program_of(plan: Launch) -> str:
    """Return which program the workers run, for a sentence, without its arguments: they may hold secrets."""
    module = plan.worker[1:2] == ("-m",)
    return plan.script or (" ".join(plan.worker[:3]) if module else plan.worker[0])


def write_plan(plan: Launch) -> None:
    """Write the plan to the run's folder, atomically. Raises UsageError when it cannot be written."""
    try:
        with opened(Path(plan.folder)) as folder:  # for this user alone: a command line may hold secrets
            folder.write(RUN_FILE, msgspec.json.format(msgspec.json.encode(plan), indent=2))
    except OSError as error:
        raise UsageError(f"{Path(plan.folder) / RUN_FILE} cannot be written: {error.strerror}") from None


def read_plan(folder: Path) -> Launch:
    """Return the plan of an earlier run. Raises DataError when there is none."""
    try:
        return msgspec.json.decode(read_file(folder / RUN_FILE), type=Launch)
    except FileNotFoundError:
        raise DataError(f"{folder} is not the folder of a run: there is no {RUN_FILE} in it") from None
    except OSError as error:
        raise DataError(f"{folder / RUN_FILE} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise DataError(f"{folder / RUN_FILE} cannot be read: {error}") from None


def certificates_of(plan: Launch) -> str:
    """Return the folder of the run's certificates; "" without TLS. For AUTO they are made, or renewed, now.

    UsageError if they cannot be made.
    """
    if plan.tls != AUTO:
        return plan.tls
    from rallypoint.net.tls.making import make_certificates

    folder = Path(plan.folder).resolve() / TLS
    make_certificates(folder)
    return str(folder)


def coordinator_arguments(plan: Launch, address: str = "", earlier: int = 0) -> tuple[str, ...]:
    """Return the arguments of ``rallypoint coordinator``.

    `address`: where members connected to an earlier coordinator of this run. Then its journal is continued. `earlier`:
    how many were started before.
    """
    return (
        "--bind", _bind_again(plan.bind, address) if address else plan.bind,
        *(["--advertise", plan.advertise] if plan.advertise else []),
        "--terms", msgspec.json.encode(terms_of(plan, earlier)).decode(),
        "--join-info", msgspec.json.encode(join_info_of(plan)).decode(),
        *(["--resume", plan.resume] if plan.resume and not address else []),
    )  # fmt: skip


def terms_of(plan: Launch, earlier: int = 0) -> dict[str, Any]:
    """Return how the plan's cluster is to behave, as data: see `Terms`. `earlier`: see `coordinator_arguments`."""
    return {
        "workers_start": plan.workers_start, "workers_min": plan.workers[0], "workers_max": plan.workers[1],
        "servers": plan.servers, "replication": plan.replication, "heartbeat": plan.heartbeat,
        "hang_after": plan.hang_after, "backup_tasks": plan.backup_tasks, "aggregators": plan.aggregators,
        "snapshot_steps": plan.snapshot_steps,
        "snapshot_seconds": SNAPSHOT_SECONDS if plan.snapshot_seconds is None else plan.snapshot_seconds,
        "snapshot_tuned": plan.snapshot_seconds is None and not plan.snapshot_steps,
        "snapshots": bool(plan.snapshots), "earlier": earlier,
        "topology": msgspec.to_builtins(plan.topology), "measure_links": plan.measure_links,
    }  # fmt: skip


def join_info_of(plan: Launch) -> dict[str, Any]:
    """Return what members are told when they join, as data: see `JoinInfo`."""
    first, last = plan.trace_steps if plan.trace else (0, 0)
    return {
        "overrides": plan.overrides, "folder": str(Path(plan.folder).resolve()), "trace": [first, last],
        "snapshots": plan.snapshots, "compression": plan.compression, "threads": plan.threads or 0,
        "retention": msgspec.to_builtins(plan.retention),
    }  # fmt: skip


def server_arguments(plan: Launch) -> tuple[str, ...]:
    """Return the arguments of ``rallypoint server`` and ``aggregator``: it listens at a free port.

    On this machine that is at the coordinator's host. On machines of an engine it is at the machine's own address: HERE
    if the coordinator's is, else every interface, of which it advertises the one that leads to the coordinator.
    """
    host = _host(plan.bind)
    if plan.engine == "local" or host == HERE or is_loopback(host):
        advertise = _host(plan.advertise) if plan.advertise and plan.engine == "local" else ""
        return ("--bind", f"{host}:0", *(["--advertise", advertise] if advertise else []))
    return ("--bind", "[::]:0" if ":" in host else "0.0.0.0:0")


def _bind_again(bind: str, address: str) -> str:
    """Return where a coordinator listens that takes over from one that members reached at `address`."""
    return bind if not bind.endswith(":0") else f"{_host(bind)}:{address.rpartition(':')[2]}"


def is_loopback(host: str) -> bool:
    """True for an address that only processes of the same machine can connect to."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _host(address: str) -> str:
    """Return ``10.0.0.7`` for ``10.0.0.7:4700`` and for ``10.0.0.7``."""
    host, _, port = address.rpartition(":")
    return host if host and port.isdigit() else address


def environment_of(name: str, address: str, plan: Launch) -> dict[str, str]:
    """Return the environment of the process `name`, without its token. `address`: the coordinator's, or ""."""
    return {
        **({environment.COORDINATOR: address} if address else {}),
        environment.ID: name, environment.TRANSPORT: plan.transport,
        environment.WORKERS: str(plan.workers_start),
        **environment.with_threads(plan.threads_at_first),
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
