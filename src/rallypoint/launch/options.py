"""The command-line options of a run, each with its help, in one place."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import typer

from rallypoint.config import overrides_from
from rallypoint.config.keys import check_keys
from rallypoint.config.resolve import merged
from rallypoint.config.topology import read_topology
from rallypoint.config.values import check_values
from rallypoint.core.topology.told import Topology
from rallypoint.errors import ConfigError, UsageError
from rallypoint.launch import environment
from rallypoint.launch.engines.choice import check_engine
from rallypoint.launch.engines.remote.hosts import hosts_of
from rallypoint.launch.folder import new_folder
from rallypoint.launch.plan import AUTO, HERE, SNAPSHOTS, Launch, parse_workers, with_whole_paths
from rallypoint.net.rdma.choice import TRANSPORTS, chosen
from rallypoint.store.retention import Retention

_CLUSTER, _SNAPSHOTS, _FILES = "Cluster", "Snapshots", "Settings and files"
_ON_LOOPBACK = "127.0.0.1:0"
_COMPRESSIONS = ("zstd", "zstd-planes", "none")
Bind = Annotated[str, typer.Option(
    metavar="HOST:PORT", rich_help_panel=_CLUSTER,
    help="Where the coordinator listens (port 0: any free one), and the host at which servers do.",
)]  # fmt: skip
Advertise = Annotated[str, typer.Option(
    metavar="HOST[:PORT]", rich_help_panel=_CLUSTER, help="What others connect to, where --bind is 0.0.0.0.",
)]  # fmt: skip
ConfigFile = Annotated[Path | None, typer.Option(
    "--config", metavar="FILE", rich_help_panel=_FILES, help="A TOML file of settings, over the script's own.",
)]  # fmt: skip
Sets = Annotated[list[str] | None, typer.Option(
    "--set", metavar="KEY=VALUE", rich_help_panel=_FILES, help="One setting, as in --set steps=200; may be repeated.",
)]  # fmt: skip
JobAddress = Annotated[str, typer.Option(
    metavar="PLACES", help="Where the job's coordinator may listen: host:port, several of them with commas between, "
    "file:PATH with one a line, or srv+dns://NAME; by default RALLYPOINT_COORDINATOR.",
)]  # fmt: skip
TokenFile = Annotated[str, typer.Option(
    metavar="FILE", help="The file that holds the job's token, or that of this role; by default RALLYPOINT_TOKEN_FILE "
    "or RALLYPOINT_TOKEN. `rallypoint token` makes them.",
)]  # fmt: skip
Interface = Annotated[str, typer.Option(
    metavar="NAME", help="Listen at the address of this network interface, as eth0, in place of the host in --bind.",
)]  # fmt: skip
HealthAt = Annotated[str, typer.Option(
    metavar="HOST:PORT", help="Answer GET /healthz and /readyz here: for the probes of whoever runs this process.",
)]  # fmt: skip
Tls = Annotated[str, typer.Option(
    metavar="FOLDER", help="Use TLS, with this role's certificate in a folder of `rallypoint certs`; by default "
    "RALLYPOINT_TLS.",
)]  # fmt: skip
HowPayloadsGo = Annotated[str, typer.Option(
    "--transport", metavar="WORD", help="How large payloads go: tcp, nixl (RDMA) or auto (nixl where a card is there); "
    "by default RALLYPOINT_TRANSPORT, or tcp.",
)]  # fmt: skip
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run, as runs/20260131-235959.")]


def check_script(script: Path) -> None:
    """Raise UsageError unless `script` is a file."""
    if script.is_dir():
        raise UsageError(f"{script} is a folder: name the script in it")
    if not script.is_file():
        raise UsageError(f"there is no script {script}")


def option(*names: str, help: str, metavar: str | None, panel: str, **limits: Any) -> Any:
    """Return what describes an option to typer."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **limits)


@dataclass(frozen=True, kw_only=True)
class CoordinatorOptions:
    """The options that say how a cluster behaves."""

    workers: Annotated[str, option(
        "--workers", "-w", metavar="N[:M]", panel=_CLUSTER,
        help="Worker processes, which compute gradients: 4, or 2:8 for from 2 to 8.",
    )] = "2"  # fmt: skip
    servers: Annotated[int, option(
        "--servers", "-s", min=1, metavar="N", panel=_CLUSTER, help="Server processes; they own the parameters.",
    )] = 2  # fmt: skip
    replication: Annotated[int | None, option(
        min=1, max=2, metavar="1|2", panel=_CLUSTER, show_default="2 with two servers",
        help="2: every shard is on two servers, and either may die without a step lost.",
    )] = None  # fmt: skip
    heartbeat: Annotated[float, option(
        min=0.5, metavar="S", panel=_CLUSTER, help="Seconds without a sign of life until a process is given up.",
    )] = 3.0  # fmt: skip
    hang_after: Annotated[float, option(
        min=0, metavar="S", panel=_CLUSTER,
        help="Give a worker up whose main thread does nothing for so long while all others wait for it (0: never).",
    )] = 60.0  # fmt: skip
    backup_tasks: Annotated[bool, option(
        "--backup-tasks", metavar=None, panel=_CLUSTER,
        help="Give a slow worker's replica to an idle worker too; the first result counts.",
    )] = False  # fmt: skip
    topology: Annotated[Path | None, option(
        metavar="FILE", panel=_CLUSTER,
        help="A TOML or JSON file with hosts' racks and the Mbit/s of their links: servers get shards in proportion.",
    )] = None  # fmt: skip
    measure_links: Annotated[bool, option(
        "--measure-links", metavar=None, panel=_CLUSTER,
        help="Measure the links of servers by what goes through them, and move shards away from slow ones.",
    )] = False  # fmt: skip
    threads: Annotated[int | None, option(
        min=1, metavar="N", panel=_CLUSTER, show_default="1",
        help="Intra-op threads of each worker and server, the same for the whole job: another number, other bytes.",
    )] = None  # fmt: skip
    bind: Bind = _ON_LOOPBACK
    advertise: Advertise = ""
    snapshot_seconds: Annotated[float | None, option(
        min=0, metavar="S", panel=_SNAPSHOTS, help="Take one every so many seconds; 0: not by time. By default 60.",
    )] = None  # fmt: skip
    snapshot_steps: Annotated[int, option(
        min=0, metavar="N", panel=_SNAPSHOTS, help="Take a snapshot every so many steps; 0: not by steps.",
    )] = 0  # fmt: skip
    snapshots: Annotated[str, option(
        metavar="URL", panel=_SNAPSHOTS,
        help="Where: a folder or any fsspec URL; none for no snapshots. A run's default is its own folder.",
    )] = ""  # fmt: skip
    compression: Annotated[str, option(
        metavar="KIND", panel=_SNAPSHOTS, help="none, zstd or zstd-planes (smaller, slower).",
    )] = "none"  # fmt: skip
    keep_last: Annotated[int, option(
        min=1, metavar="N", panel=_SNAPSHOTS, help="Snapshots to keep: the last so many,",
    )] = 3  # fmt: skip
    keep_every: Annotated[int, option(
        min=0, metavar="N", panel=_SNAPSHOTS, help="... those of a version that is a multiple of this (0: none),",
    )] = 0  # fmt: skip
    keep_best: Annotated[str, option(
        metavar="NAME", panel=_SNAPSHOTS,
        help="... and the one with the best value of this figure; each version that is evaluated gets a snapshot.",
    )] = ""  # fmt: skip
    best_is: Annotated[str, option(
        metavar="min|max", panel=_SNAPSHOTS, help="With --keep-best: whether the lowest or the highest is the best.",
    )] = "min"  # fmt: skip
    config: ConfigFile = None
    sets: Sets = None
    folder: Annotated[Path | None, option(
        metavar="FOLDER", panel=_FILES,
        help="For the journal and the event log; without it there are none, and scripts save where each runs.",
    )] = None  # fmt: skip

    def plan(self, worker: list[str], *, folder: str | None = None) -> Launch:
        """Return the plan that these options make for workers of this argv. Raises ConfigError for invalid options.

        `folder` is the run's folder; None: the one of these options, or else a new one.
        """
        limits, start = parse_workers(self.workers)
        if self.compression not in _COMPRESSIONS:
            raise ConfigError(f"'{self.compression}' is no compression: choose zstd, zstd-planes or none")
        if (self.replication or 1) > self.servers:
            raise ConfigError("--replication 2 needs at least two servers: add --servers 2")
        if self.best_is not in ("min", "max"):
            raise ConfigError(f"--best-is {self.best_is}: it must be min or max")
        overrides = overrides_from(self.config, self.sets or [])
        if self.keep_best:
            overrides = merged({"keep_best": self.keep_best, "best_is": self.best_is}, overrides)
        check_keys(overrides)
        check_values(overrides)
        same = {name: getattr(self, name) for name in Launch.__struct_fields__ if name in _SAME and hasattr(self, name)}
        topology = Topology() if self.topology is None else read_topology(self.topology)
        folder = str(self.folder or new_folder(Path("runs"))) if folder is None else folder  # the options are right
        where = self.snapshots or str((Path(folder) / SNAPSHOTS).resolve())
        return Launch(
            worker=tuple(worker), workers=limits, workers_start=start, folder=folder,
            snapshots="" if where == "none" else where, overrides=overrides,
            retention=Retention(
                keep_last=self.keep_last, keep_every=self.keep_every, keep_best=self.keep_best,
                best_is="max" if self.best_is == "max" else "min",
            ),
            topology=topology, replication=self.replication or 0, **same,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunOptions(CoordinatorOptions):
    """The options that ``run``, ``train`` and ``chaos`` share."""

    folder: Annotated[Path | None, option(
        metavar="FOLDER", panel=_FILES, help="The run's folder; by default a new one under runs/.",
    )] = None  # fmt: skip
    aggregators: Annotated[int, option(
        min=0, metavar="N", panel=_CLUSTER,
        help="Processes that add up the contributions of workers near them; each has an even share of the workers.",
    )] = 0  # fmt: skip
    standby: Annotated[int, option(
        min=0, metavar="N", panel=_CLUSTER, help="More workers, imported and connected, to take over at once.",
    )] = 0  # fmt: skip
    ranks: Annotated[int, option(
        min=1, metavar="N", panel=_CLUSTER,
        help="Processes of each worker, which share the model: FSDP2, tensor or pipeline parallel.",
    )] = 1  # fmt: skip
    engine: Annotated[str, option(
        metavar="NAME", panel=_CLUSTER,
        help="What starts the processes: local (this machine), ray, ssh, or slurm (inside of its job).",
    )] = "local"  # fmt: skip
    hosts: Annotated[str, option(
        metavar="FILE|A,B", panel=_CLUSTER, help="Run on these machines over ssh: a file with one a line, or a list.",
    )] = ""  # fmt: skip
    ssh: Annotated[str, option(
        metavar="COMMAND", panel=_CLUSTER, help="The ssh client, with its options: 'ssh -F my_config'.",
    )] = "ssh"  # fmt: skip
    address: Annotated[str, option(
        metavar="ADDRESS", panel=_CLUSTER, show_default=False,
        help="The Ray cluster: auto, of this machine (the default); local, a new one here; or HOST:PORT.",
    )] = ""  # fmt: skip
    gpus: Annotated[float, option(
        min=0, metavar="N", panel=_CLUSTER, help="GPUs of each worker, with Ray or Slurm.",
    )] = 0.0  # fmt: skip
    tls: Annotated[str, option(
        metavar="FOLDER|auto", panel=_CLUSTER,
        help="Use TLS for every link, with the certificates of `rallypoint certs`; auto makes some for the run.",
    )] = ""  # fmt: skip
    transport: Annotated[str, option(
        metavar="WORD", panel=_CLUSTER,
        help="How large payloads go: tcp; nixl, one-sided writes (RDMA); auto, nixl where a machine has a card for it.",
    )] = "tcp"  # fmt: skip
    or_resume: Annotated[bool, option(
        "--or-resume", metavar=None, panel=_FILES,
        help="If --folder holds a run already, go on with it from its newest snapshot (without one: anew).",
    )] = False  # fmt: skip
    overwrite: Annotated[bool, option(
        "--overwrite", metavar=None, panel=_FILES, help="Delete the run that --folder holds already.",
    )] = False  # fmt: skip
    watch: Annotated[bool | None, option(
        "--watch/--no-watch", metavar=None, panel=_FILES, show_default=False,
        help="Serve the run's page while it goes on, to this machine alone; the address is printed. Without either: "
        r"where the output is a terminal, and rallypoint\[watch] is installed.",
    )] = None  # fmt: skip
    track: Annotated[list[str] | None, option(
        metavar="KIND:FOLDER", panel=_FILES,
        help="Write the run's figures for a tracker: tensorboard, wandb (offline) or mlflow. Can be repeated.",
    )] = None  # fmt: skip
    metrics: Annotated[Path | None, option(
        metavar="FOLDER", panel=_FILES,
        help="Let Prometheus on this machine scrape every process: a file in this folder tells it where.",
    )] = None  # fmt: skip
    report_after: Annotated[float, option(
        min=0, metavar="S", panel=_FILES,
        help="Leave a report in the folder after so many seconds without a step, and after a crash (0: never).",
    )] = 30.0  # fmt: skip
    trace: Annotated[Path | None, option(
        metavar="FILE", panel=_FILES, help="Write a Chrome trace (Perfetto) of a few steps to this file.",
    )] = None  # fmt: skip
    trace_steps: Annotated[str, option(
        metavar="A:B", panel=_FILES, help="Which steps to trace, from A to before B.",
    )] = "5:7"  # fmt: skip

    def run(self, worker: list[str], *, script: str = "", more_settings: list[str] | None = None) -> Launch:
        """Return the plan of a run with workers of this argv: see `plan`. `more_settings` come after the options'."""
        both = replace(self, sets=[*(self.sets or []), *(more_settings or [])])
        own = {
            "script": script, "trace": str(self.trace or ""), "trace_steps": _steps(self.trace_steps),
            "tls": self._certificates(), "transport": self._transport(), "metrics": self._targets(),
            "watch": self._page(), "track": self._tracked(), **self._machines(),
        }  # fmt: skip
        return with_whole_paths(msgspec.structs.replace(both.plan(worker), **own))

    def _certificates(self) -> str:
        """Return where the certificates are, for the plan."""
        given = self.tls or os.environ.get(environment.TLS, "")
        if given == AUTO and (self.hosts or self.engine != "local"):
            raise UsageError(
                "--tls auto makes certificates on this machine alone: make some with `rallypoint certs FOLDER`, copy "
                "them to the same place on each machine, and give --tls FOLDER"
            )
        return given if given in ("", AUTO) else str(Path(given).resolve())

    def _transport(self) -> str:
        """Return how large payloads go, for the plan. The machines of the run choose by themselves what is there."""
        if self.transport not in TRANSPORTS:
            raise UsageError(f"there is no --transport {self.transport}: choose of {', '.join(TRANSPORTS)}")
        if self.engine == "local" and not self.hosts:
            chosen(self.transport, secure=bool(self._certificates()))
        return self.transport

    def _page(self) -> bool:
        """Return whether the page is served, for the plan."""
        from rallypoint.launch.observing.beside import check_page, missing

        if self.watch:
            check_page()
        return self.watch if self.watch is not None else sys.stdout.isatty() and not missing()

    def _tracked(self) -> tuple[str, ...]:
        """Return where the run's figures go, for the plan."""
        from rallypoint.watch.tracking import parse_targets

        return parse_targets(self.track or ())

    def _targets(self) -> str:
        """Return where the file with the places of metrics belongs, for the plan."""
        if self.metrics is None:
            return ""
        from rallypoint.launch.observing.metrics import check_installed

        check_installed()
        if self.hosts or self.engine != "local":
            raise UsageError("--metrics is for a run on this machine: elsewhere each role has --health HOST:PORT")
        return str(self.metrics.resolve())

    def _machines(self) -> dict[str, Any]:
        """Return what differs in the plan of a run that is not on this machine only."""
        check_engine(self.engine)
        if self.engine != "ray" and (self.address or self.gpus):
            raise UsageError(f"{'--address' if self.address else '--gpus'} is for --engine ray")
        bind = f"{HERE}:0" if self.bind == _ON_LOOPBACK else self.bind
        if not self.hosts:
            if self.engine == "ssh":
                raise UsageError("--engine ssh on which machines? give --hosts, a file with one a line or a list")
            return {"bind": bind} if self.engine in ("ray", "slurm") else {}
        if self.engine not in ("local", "ssh"):
            raise UsageError(f"--hosts is for ssh, not for --engine {self.engine}")
        return {"engine": "ssh", "hosts": hosts_of(self.hosts), "ssh": self.ssh, "bind": bind}


# Options that a plan has under the same name, with the same meaning.
_SAME = {
    "standby", "servers", "aggregators", "heartbeat", "hang_after", "backup_tasks", "threads", "bind",
    "advertise", "engine", "address", "gpus", "ranks", "snapshot_steps", "snapshot_seconds", "compression",
    "report_after", "measure_links",
}  # fmt: skip


def with_options(kind: type[Any], defaults: Any = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command all options of `kind`, a dataclass of them, as one argument, `options`."""
    start = defaults or kind()
    hints = get_type_hints(kind, include_extras=True)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own_hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items() if name != "options"
        ]  # fmt: skip
        shared = [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=getattr(start, f.name), annotation=hints[f.name]
            )
            for f in fields(kind)
        ]

        @wraps(command)
        def called(**given: Any) -> None:
            options = kind(**{f.name: given.pop(f.name) for f in fields(kind)})
            command(options=options, **given)

        called.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
        called.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        del called.__wrapped__
        return called

    return decorate


def arguments_of(options: CoordinatorOptions, kind: type[CoordinatorOptions]) -> list[str]:
    """Return the words of a command line that mean these options: those of `kind` that differ from its defaults."""
    words: list[str] = []
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        (given,) = get_args(hints[field.name])[1:]
        # (In an annotation the first name is where typer keeps a default)
        named = [name for name in (given.default, *given.param_decls) if str(name).startswith("--")]
        name = named[0] if named else f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(name.split("/")[0 if value else 1])
        else:
            words += [word for one in (value if isinstance(value, list) else [value]) for word in (name, str(one))]
    return words


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit()):
        raise ConfigError(f"'{text}' is not a range of steps: write it as 5:7")
    return int(first), int(last)
