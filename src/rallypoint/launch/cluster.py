"""What a cluster is like: one field for each option, with its default, its help and its limits. All commands that start
one take their options from here; a run keeps them in its plan (`plan.Launch`).

A new option is a field of `ClusterConfig`, and what reads it: ``plan.heartbeat`` in the launcher, or a field of the
same name in `Terms` (for the coordinator) or `JoinInfo` (for every member). An option whose text is read when the run
begins, and is something else in the plan (a file, a list of hosts), is a field of `options.RunOptions` instead.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from rallypoint.errors import ConfigError

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
    metavar="HOST[:PORT]", panel=CLUSTER, help="What others connect to, where --bind is 0.0.0.0.",
), PRIVATE]  # fmt: skip


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a cluster is started, and how it behaves. Its fields are options; "", 0 and None are defaults."""

    servers: Annotated[int, option(
        "--servers", "-s", min=1, metavar="N", panel=CLUSTER, help="Server processes; they own the parameters.",
    )] = 2  # fmt: skip
    replication: Annotated[int, option(
        metavar="1|2", panel=CLUSTER, show_default="2 with two servers",
        help="2: every shard is on two servers, and either may die without a step lost.",
    )] = 0  # fmt: skip
    heartbeat: Annotated[float, option(
        min=0.5, metavar="S", panel=CLUSTER, help="Seconds without a sign of life until a process is given up.",
    )] = 3.0  # fmt: skip
    hang_after: Annotated[float, option(
        min=0, metavar="S", panel=CLUSTER,
        help="Give a worker up whose main thread does nothing for so long while all others wait for it (0: never).",
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
        help="What starts the processes: local (this machine), ray, ssh, or slurm (inside of its job).",
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
    transport: Annotated[str, option(
        metavar="WORD", panel=CLUSTER,
        help="How large payloads go: tcp; nixl, one-sided writes (RDMA); auto, nixl where a machine has a card for it.",
    ), LAUNCHER] = "tcp"  # fmt: skip
    snapshot_seconds: Annotated[float | None, option(
        min=0, metavar="S", panel=SNAPSHOTS, help="Take one every so many seconds; 0: not by time. By default 60.",
    )] = None  # fmt: skip
    snapshot_steps: Annotated[int, option(
        min=0, metavar="N", panel=SNAPSHOTS, help="Take a snapshot every so many steps; 0: not by steps.",
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
