"""The plan of a run: what to start. It is kept in the run's folder as ``run.json``, so that the run can be resumed."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rallypoint.core.cluster.terms import Terms
from rallypoint.core.plan.topology import Topology
from rallypoint.errors import ConfigError, DataError, UsageError
from rallypoint.launch import environment
from rallypoint.launch.cluster import ClusterConfig
from rallypoint.launch.engines.remote.hosts import Host
from rallypoint.own_files import opened, read_file
from rallypoint.store.snapshots import Retention

if TYPE_CHECKING:
    from rallypoint.coordinator.service import JoinInfo

RUN_FILE = "run.json"
SNAPSHOTS_FOLDER = "snapshots"
SNAPSHOT_SECONDS = 60.0  # between two, where nobody has said it
TLS = "tls"
AUTO = "auto"
HERE = "{host}"  # in --bind: an engine replaces it by the address of the machine that it has chosen


class Launch(ClusterConfig, frozen=True, kw_only=True):
    """The plan of a run: its cluster, and what its processes run.

    Attributes:
        worker: the argv of every worker process.
        script: the part of `worker` that is the user's script, as a whole path; "" if there is none. See `kept`.
        workers: (least, most): with fewer than the least the job waits; workers above the most stand by.
        workers_start: how many workers to start with.
        hosts: the machines of the engine "ssh".
        topology: see `Terms`.
        retention: which snapshots are kept.
        overrides: settings that replace those of the script.
        track: where the run's figures go, each ``KIND:FOLDER``: see `watch.trackers`.
        trace_steps: (first, stop) of the steps that are traced, if there is a trace.
        resume: the snapshot to continue from; "" for a new run.
        changes: sentences that say which settings were changed when the run went on, and from which step.
        restart: processes that die are started again.
    """

    worker: tuple[str, ...]
    script: str = ""
    workers: tuple[int, int] = (1, 2)
    workers_start: int = 2
    hosts: tuple[Host, ...] = ()
    topology: Topology = Topology()
    retention: Retention = Retention()
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)
    track: tuple[str, ...] = ()
    trace_steps: tuple[int, int] = (5, 7)
    resume: str = ""
    changes: tuple[str, ...] = ()
    restart: bool = True

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


def terms_of(plan: Launch, earlier: int = 0) -> Terms:
    """Return how the plan's cluster is to behave. `earlier`: see `coordinator_arguments`."""
    return Terms(**{
        **_same(plan, Terms), "workers_min": plan.workers[0], "workers_max": plan.workers[1], "earlier": earlier,
        "snapshots": bool(plan.snapshots),
        "snapshot_seconds": SNAPSHOT_SECONDS if plan.snapshot_seconds is None else plan.snapshot_seconds,
        "snapshot_tuned": plan.snapshot_seconds is None and not plan.snapshot_steps,
    })  # fmt: skip


def join_info_of(plan: Launch) -> JoinInfo:
    """Return what members are told when they join."""
    from rallypoint.coordinator.service import JoinInfo  # with all of the coordinator: most commands need it not

    return JoinInfo(**{
        **_same(plan, JoinInfo), "folder": str(Path(plan.folder).resolve()), "threads": plan.threads or 0,
        "trace": plan.trace_steps if plan.trace else (0, 0),
    })  # fmt: skip


def _same(plan: Launch, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return what a plan and `kind` have under the same name."""
    return {name: getattr(plan, name) for name in kind.__struct_fields__ if name in Launch.__struct_fields__}


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
