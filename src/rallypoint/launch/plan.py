"""The plan of a run: what to start. It is kept in the run's folder as ``run.json``, so that the run can be resumed.

All commands that start a cluster take their options from `ClusterConfig`, and a run keeps them in its plan. A new
option is a field of it, and what reads it: ``plan.heartbeat`` in the launcher.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from rallypoint.core.cluster.terms import Terms
from rallypoint.core.plan.topology import Topology
from rallypoint.errors import ConfigError, DataError, Explained, UsageError, meant
from rallypoint.launch import environment
from rallypoint.own_files import opened, read_file
from rallypoint.store.snapshots import Retention

if TYPE_CHECKING:
    from rallypoint.coordinator.service import JoinInfo

CLUSTER, SNAPSHOTS, FILES = "Cluster", "Snapshots", "Settings and files"  # the panels of `--help`
ON_LOOPBACK = "127.0.0.1:0"
LAUNCHER = "launcher"  # marks an option of a launcher, which starts the processes: a coordinator by hand has not it
PRIVATE = "private"  # marks what a report does not tell: addresses, other people's commands, where files are
_COMPRESSIONS = ("zstd", "zstd-planes", "none")


def option(*names: str, help: str, metavar: str | None, panel: str, **limits: Any) -> Any:
    """Return what describes an option to typer."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **limits)


Bind = Annotated[str, option(
    metavar="HOST:PORT", panel=CLUSTER,
    help="Where the coordinator listens (port 0: any free one), and the host at which servers do.",
), PRIVATE]  # fmt: skip
Advertise = Annotated[str, option(
    metavar="HOST[:PORT]", panel=CLUSTER, help="The address that others connect to, if --bind is 0.0.0.0.",
), PRIVATE]  # fmt: skip


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a cluster is started, and how it behaves. Its fields are options; "", 0 and None are defaults."""

    servers: Annotated[int, option(
        "--servers", "-s", min=1, metavar="N", panel=CLUSTER, help="Server processes; they own the parameters.",
    )] = 2  # fmt: skip
    replication: Annotated[int, option(
        metavar="1|2", panel=CLUSTER, show_default="2 with two servers",
        help="2 (the default with two servers or more): two servers have each shard; either may die, no step is lost.",
    )] = 0  # fmt: skip
    heartbeat: Annotated[float, option(
        min=0.5, metavar="S", panel=CLUSTER, help="Seconds without a sign of life until a process is given up.",
    )] = 3.0  # fmt: skip
    hang_after: Annotated[float, option(
        min=0, metavar="S", panel=CLUSTER,
        help="Give a worker up if its main thread does nothing for this time while all others wait (0: never).",
    )] = 60.0  # fmt: skip
    backup_tasks: Annotated[bool, option(
        "--backup-tasks", metavar=None, panel=CLUSTER,
        help="Give a slow worker's replica to an idle worker too; the first result counts.",
    )] = False  # fmt: skip
    measure_links: Annotated[bool, option(
        "--measure-links", metavar=None, panel=CLUSTER,
        help="Measure the links of servers by what goes through them, and move shards away from slow ones.",
    )] = False  # fmt: skip
    threads: Annotated[int | None, option(
        min=1, metavar="N", panel=CLUSTER, show_default="1",
        help="Intra-op threads of each worker and server, the same for the whole job: another number, other bytes.",
    )] = None  # (the coordinator decides then, when it knows whether a job goes on) # fmt: skip
    bind: Bind = ON_LOOPBACK
    advertise: Advertise = ""
    aggregators: Annotated[int, option(
        min=0, metavar="N", panel=CLUSTER,
        help="Processes that add up the contributions of workers near them; each has an even share of the workers.",
    ), LAUNCHER] = 0  # fmt: skip
    standby: Annotated[int, option(
        min=0, metavar="N", panel=CLUSTER, help="More workers, imported and connected, to take over at once.",
    ), LAUNCHER] = 0  # fmt: skip
    ranks: Annotated[int, option(
        min=1, metavar="N", panel=CLUSTER,
        help="Processes of each worker, which share the model: FSDP2, tensor or pipeline parallel.",
    ), LAUNCHER] = 1  # fmt: skip
    engine: Annotated[str, option(
        metavar="NAME", panel=CLUSTER,
        help="The launcher of the processes: local (this machine), ray, ssh, or slurm (inside its job).",
    ), LAUNCHER] = "local"  # fmt: skip
    address: Annotated[str, option(
        metavar="ADDRESS", panel=CLUSTER, show_default=False,
        help="The Ray cluster: auto, of this machine (the default); local, a new one here; or HOST:PORT.",
    ), LAUNCHER, PRIVATE] = ""  # fmt: skip
    gpus: Annotated[float, option(
        min=0, metavar="N", panel=CLUSTER, help="GPUs of each worker, with Ray or Slurm.",
    ), LAUNCHER] = 0.0  # fmt: skip
    tls: Annotated[str, option(
        metavar="FOLDER|auto", panel=CLUSTER,
        help="Use TLS for every link, with the certificates of `rallypoint token --tls`; auto makes some for the run.",
    ), LAUNCHER, PRIVATE] = ""  # fmt: skip
    snapshot_seconds: Annotated[float | None, option(
        min=0, metavar="S", panel=SNAPSHOTS, help="Seconds between two snapshots; 0: not by time. By default 60.",
    )] = None  # fmt: skip
    snapshot_steps: Annotated[int, option(
        min=0, metavar="N", panel=SNAPSHOTS, help="Steps between two snapshots; 0: not by steps.",
    )] = 0  # fmt: skip
    snapshots: Annotated[str, option(
        metavar="URL", panel=SNAPSHOTS,
        help="Where: a folder or any fsspec URL; none for no snapshots. A run's default is its own folder.",
    )] = ""  # fmt: skip
    compression: Annotated[str, option(
        metavar="KIND", panel=SNAPSHOTS, help="none, zstd or zstd-planes (smaller, slower).",
    )] = "none"  # fmt: skip
    folder: Annotated[str, option(
        metavar="FOLDER", panel=FILES, help="The run's folder; by default a new one under runs/.",
    ), PRIVATE] = ""  # fmt: skip
    watch: Annotated[bool | None, option(
        "--watch/--no-watch", metavar=None, panel=FILES, show_default=False,
        help="Serve the run's page while it goes on, to this machine alone; the address is printed. Without either: "
        r"where the output is a terminal, and rallypoint\[watch] is installed.",
    ), LAUNCHER] = None  # fmt: skip
    metrics: Annotated[str, option(
        metavar="FOLDER", panel=FILES,
        help="Let Prometheus on this machine scrape every process: a file in this folder tells it where.",
    ), LAUNCHER, PRIVATE] = ""  # fmt: skip
    trace: Annotated[str, option(
        metavar="FILE[@A:B]", panel=FILES,
        help="Write a Chrome trace (Perfetto) of steps 5 and 6 to this file, or of those from A to before B.",
    ), LAUNCHER, PRIVATE] = ""  # fmt: skip

    def check(self) -> None:
        """Raise ConfigError for what cannot be."""
        if self.compression not in _COMPRESSIONS:
            raise ConfigError(f"'{self.compression}' is no compression: choose zstd, zstd-planes or none")
        if self.replication not in (0, 1, 2):
            raise ConfigError(f"--replication {self.replication}: every shard is on 1 server or on 2")
        if self.replication > self.servers:
            raise ConfigError("--replication 2 needs at least two servers: add --servers 2")


RUN_FILE = "run.json"
SNAPSHOTS_FOLDER = "snapshots"
SNAPSHOT_SECONDS = 60.0  # between two, where nobody has said it
TLS = "tls"
AUTO = "auto"
HERE = "{host}"  # in --bind: an engine replaces it by the address of the machine that it has chosen


class Launch(ClusterConfig, frozen=True, kw_only=True):
    """The plan of a run: its cluster, and what its processes run."""

    worker: tuple[str, ...]  # the argv of every worker process
    # The part of `worker` that is the user's script, as a whole path; "" if there is none. See `kept`.
    script: str = ""
    # (least, most): with fewer than the least the job waits; workers above the most stand by
    workers: tuple[int, int] = (1, 2)
    workers_start: int = 2  # how many workers to start with
    hosts: tuple[Host, ...] = ()  # the machines of the engine "ssh"
    topology: Topology = Topology()  # see `Terms`
    retention: Retention = Retention()  # which snapshots are kept
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)  # settings that replace those of the script
    track: tuple[str, ...] = ()  # where the run's figures go, each ``KIND:FOLDER``: see `watch.tracking`
    trace_steps: tuple[int, int] = (5, 7)  # (first, stop) of the steps that are traced, if there is a trace
    resume: str = ""  # the snapshot to continue from; "" for a new run
    # Sentences that say which settings were changed when the run went on, and from which step
    changes: tuple[str, ...] = ()
    restart: bool = True  # processes that die are started again

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
    path = Path(plan.folder) / RUN_FILE
    try:
        with Explained(UsageError, f"{path} cannot be written"), opened(path.parent) as folder:
            # For this user alone: a command line may hold secrets
            folder.write(path.name, msgspec.json.format(msgspec.json.encode(plan), indent=2))
    except UnicodeEncodeError as error:  # names of files may be any bytes
        raise UsageError(f"{error.object!r} is no UTF-8: rename it, or begin elsewhere") from None


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
    from rallypoint.net.certificates import make_certificates

    folder = Path(plan.folder).resolve() / TLS
    make_certificates(folder)
    return str(folder)


def coordinator_arguments(plan: Launch, address: str = "", earlier: int = 0) -> tuple[str, ...]:
    """Return the arguments of ``rallypoint coordinator``.

    `address`: where members connected to an earlier coordinator of this run. Then its journal is continued. `earlier`:
    how many were started before.
    """
    again = f"{_host(plan.bind)}:{address.rpartition(':')[2]}"  # one that takes over: where members reached the other
    return (
        "--bind", again if address and plan.bind.endswith(":0") else plan.bind,
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
        environment.ID: name, environment.WORKERS: str(plan.workers_start),
        **environment.with_threads(plan.threads_at_first),
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


ROLES = ("coordinator", "server", "aggregator", "worker")
_WORDS = ("roles", "slots", "python", "folder")


@dataclass(frozen=True, slots=True)
class Host:
    """One machine."""

    name: str  # what ``ssh`` is told: ``name`` or ``user@name``
    port: int = 0  # ssh's port; 0: as ssh's own configuration says
    roles: tuple[str, ...] = ()  # what may run there; empty: everything
    slots: int = 1  # its share of the processes, compared with the other hosts'
    python: str = ""  # the Python that has Rallypoint there; "": the path of the launcher's
    # The working directory of processes there; "": the launcher's, or the home folder where that is missing
    folder: str = ""

    def takes(self, role: str) -> bool:
        """True if a process of this role may run there."""
        return not self.roles or role in self.roles

    def __str__(self) -> str:
        return self.name


def hosts_of(given: str) -> tuple[Host, ...]:
    """Return the hosts of a file, or of a list with commas. Raises UsageError if it is neither, or holds a mistake.

    One host a line, with optional words after it; ``#`` begins a comment::

        10.0.0.7                        # the coordinator runs on the first
        me@10.0.0.8:2222 slots=2        # twice as many processes as on the others
        gpu1 roles=worker python=/opt/torch/bin/python folder=/scratch/me
    """
    path = Path(given)
    if path.is_file():
        with Explained(UsageError, f"{given} cannot be read", of=(OSError, UnicodeDecodeError)):
            return hosts_in(path.read_text(), given)
    if "/" in given or given.endswith(".txt"):
        raise UsageError(f"there is no file {given}: --hosts takes a file with one host a line, or a list as a,b,c")
    return hosts_in("\n".join(given.split(",")), "--hosts")


def hosts_in(text: str, source: str) -> tuple[Host, ...]:
    """Return the hosts of a text. Raises UsageError that names `source` and the line."""
    found: dict[tuple[str, int], Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host_of(words, f"{source}, line {number}")
        if (host.name, host.port) in found:
            raise UsageError(f"{source}, line {number}: {host.name} stands there twice: write it once, with slots=2")
        found[host.name, host.port] = host
    if not found:
        raise UsageError(f"{source} names no host")
    return tuple(found.values())


def coordinators_host(hosts: tuple[Host, ...]) -> Host:
    """Return the host of the coordinator: the first that has this role by name, else the first of all."""
    return next((host for host in hosts if "coordinator" in host.roles), hosts[0])


def _host_of(words: list[str], where: str) -> Host:
    host = _place(words[0], where)
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key not in _WORDS or not equals or not value:
            hint = meant(key, _WORDS) or f": the words after a host are {', '.join(f'{word}=' for word in _WORDS)}"
            raise UsageError(f"{where}: '{word}' is not understood{hint}")
        match key:
            case "roles":
                roles = tuple(value.split(","))
                if wrong := next((role for role in roles if role not in ROLES), None):
                    raise UsageError(f"{where}: there is no role {wrong}{meant(wrong, ROLES)}")
                host = replace(host, roles=roles)
            case "slots":
                host = replace(host, slots=_number(value, f"{where}: slots={value}", most=100_000))
            case "python":
                host = replace(host, python=value)
            case _:
                host = replace(host, folder=value)
    return host


def _place(word: str, where: str) -> Host:
    """Parse ``user@name:port``. An IPv6 address with a port has brackets: ``me@[fd00::7]:2222``."""
    user, at, place = word.rpartition("@")
    name, colon, port = place.rpartition(":")
    if place.startswith("["):
        name, _, port = place.removeprefix("[").partition("]")
        colon, port = port[:1], port[1:]
    elif not colon or ":" in name:
        name, colon, port = place, "", ""
    # ssh would take a word that begins with a hyphen for one of its options, some of which run commands
    if not name or name.startswith("-") or user.startswith("-") or (colon and not port):
        raise UsageError(f"{where}: '{word}' is not a host: write name, user@name or user@name:port")
    return Host(f"{user}{at}{name}", _number(port, f"{where}: port {port}", most=65535) if port else 0)


def _number(text: str, what: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise UsageError(f"{what}: write a number from 1 to {most}")
    return int(text)


def place(role: str, hosts: Sequence[Host], up: Collection[Host], running: Mapping[Host, Sequence[str]]) -> Host | None:
    """Return the host for another process of this role; None if no host takes the role.

    The coordinator has a host of its own choice (`coordinators_host`): members look for it at one address. Of the
    others, each goes to the host with the fewest of its role, then with the fewest of all, each divided by the host's
    slots. Hosts that are not `up` are used only if no other takes the role. `running`: the roles that run on each.
    """
    if role == "coordinator":
        return coordinators_host(tuple(hosts))
    takers = [host for host in hosts if host.takes(role)]
    candidates = [host for host in takers if host in up] or takers

    def load(host: Host) -> tuple[float, float]:
        roles = [other for other in running.get(host, ()) if other != "coordinator"]
        return roles.count(role) / host.slots, len(roles) / host.slots

    return min(candidates, key=load, default=None)
