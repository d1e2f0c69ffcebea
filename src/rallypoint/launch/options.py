"""The options of a run as its command line has them, and the plan that they make."""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import typer

from rallypoint.config import overrides_from
from rallypoint.config.keys import check_settings
from rallypoint.core.plan.topology import Topology
from rallypoint.errors import ConfigError, Explained, UsageError
from rallypoint.launch import environment
from rallypoint.launch.engines.cluster import check_engine
from rallypoint.launch.folder import new_folder
from rallypoint.launch.plan import (
    AUTO,
    CLUSTER,
    FILES,
    HERE,
    LAUNCHER,
    ON_LOOPBACK,
    SNAPSHOTS,
    SNAPSHOTS_FOLDER,
    ClusterConfig,
    Launch,
    hosts_of,
    option,
    parse_workers,
    with_whole_paths,
)
from rallypoint.store.snapshots import Retention
from rallypoint.watch.tracking import parse_targets

_Decorator = Callable[[Callable[..., None]], Callable[..., None]]
ConfigFile = Annotated[Path | None, typer.Option(
    "--config", metavar="FILE", rich_help_panel=FILES, help="A TOML file of settings, over the script's own.",
)]  # fmt: skip
Sets = Annotated[list[str] | None, typer.Option(
    "--set", metavar="KEY=VALUE", rich_help_panel=FILES, help="One setting, as in --set steps=200; may be repeated.",
)]  # fmt: skip
JobAddress = Annotated[str, typer.Option(
    metavar="PLACES", help="Where the job's coordinator may listen: host:port, several of them with commas between, "
    "file:PATH with one a line, or srv+dns://NAME; by default RALLYPOINT_COORDINATOR.",
)]  # fmt: skip
TokenFile = Annotated[str, typer.Option(
    metavar="FILE", help="The file with the job's token, or this role's; by default RALLYPOINT_TOKEN_FILE "
    "or RALLYPOINT_TOKEN. `rallypoint token` makes them.",
)]  # fmt: skip
HealthAt = Annotated[str, typer.Option(
    metavar="HOST:PORT", help="Answer GET /healthz and /readyz at this address, for probes.",
)]  # fmt: skip
Tls = Annotated[str, typer.Option(
    metavar="FOLDER", help="Use TLS, with this role's certificate in a folder of `rallypoint token --tls`; by default "
    "RALLYPOINT_TLS.",
)]  # fmt: skip
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run, as runs/20260131-235959.")]


def check_script(script: Path) -> None:
    """Raise UsageError unless `script` is a file."""
    if script.is_dir():
        raise UsageError(f"{script} is a folder: name the script in it")
    if not script.is_file():
        raise UsageError(f"there is no script {script}")


class RunOptions(ClusterConfig, frozen=True, kw_only=True):
    """The options of ``run``, ``train``, ``chaos``, ``slurm`` and, without those of a launcher, ``coordinator``.

    The ones here are read when a run begins, and are something else in its plan.
    """

    workers: Annotated[str, option(
        "--workers", "-w", metavar="N[:M]", panel=CLUSTER,
        help="Worker processes, which compute gradients: 4, or 2:8 for from 2 to 8.",
    )] = "2"  # fmt: skip
    topology: Annotated[Path | None, option(
        metavar="FILE", panel=CLUSTER,
        help="A TOML or JSON file with hosts' racks and the Mbit/s of their links: servers get shards in proportion.",
    )] = None  # fmt: skip
    hosts: Annotated[str, option(
        metavar="FILE|A,B", panel=CLUSTER, help="Run on these machines over ssh: a file with one a line, or a list.",
    ), LAUNCHER] = ""  # fmt: skip
    keep_last: Annotated[int, option(
        min=1, metavar="N", panel=SNAPSHOTS,
        help="How many of the last snapshots to keep (and the best, with --set evaluation.keep_best=loss).",
    )] = 3  # fmt: skip
    config: ConfigFile = None
    sets: Sets = None
    track: Annotated[list[str] | None, option(
        metavar="KIND:FOLDER", panel=FILES,
        help="Write the run's figures for a tracker: tensorboard, wandb (offline) or mlflow. Can be repeated.",
    ), LAUNCHER] = None  # fmt: skip
    or_resume: Annotated[bool, option(
        "--or-resume", metavar=None, panel=FILES,
        help="If --folder holds a run already, go on from its newest snapshot (without one: from the start).",
    ), LAUNCHER] = False  # fmt: skip
    overwrite: Annotated[bool, option(
        "--overwrite", metavar=None, panel=FILES, help="Delete the run that --folder holds already.",
    ), LAUNCHER] = False  # fmt: skip

    def plan(self, worker: list[str], *, folder: str | None = None) -> Launch:
        """Return the plan that these options make for workers of this argv. Raises ConfigError for invalid options.

        `folder` is the run's folder; None: the one of these options, or else a new one.
        """
        limits, start = parse_workers(self.workers)
        self.check()
        overrides = overrides_from(self.config, self.sets or [])
        check_settings(overrides)
        topology = Topology() if self.topology is None else read_topology(self.topology)
        folder = str(self.folder or new_folder(Path("runs"))) if folder is None else folder  # the options are right
        where = self.snapshots or str((Path(folder) / SNAPSHOTS_FOLDER).resolve())
        kept = {name: getattr(self, name) for name in ClusterConfig.__struct_fields__}
        kept |= {"folder": folder, "snapshots": "" if where == "none" else where}
        return Launch(
            **kept, worker=tuple(worker), workers=limits, workers_start=start, overrides=overrides, topology=topology,
            retention=Retention(keep_last=self.keep_last),
        )  # fmt: skip

    def run(self, worker: list[str], *, script: str = "", more_settings: list[str] | None = None) -> Launch:
        """Return the plan of a run with workers of this argv: see `plan`. `more_settings` come after the options'."""
        both = msgspec.structs.replace(self, sets=[*(self.sets or []), *(more_settings or [])])
        own = {
            "script": script, **self._traced(), "tls": self._certificates(),
            "metrics": self._targets(), "watch": self._page(), "track": parse_targets(self.track or ()),
            **self._machines(),
        }  # fmt: skip
        return with_whole_paths(msgspec.structs.replace(both.plan(worker), **own))

    def _certificates(self) -> str:
        """Return where the certificates are, for the plan."""
        given = self.tls or os.environ.get(environment.TLS, "")
        if given == AUTO and (self.hosts or self.engine != "local"):
            raise UsageError(
                "--tls auto makes certificates on this machine alone: make some with `rallypoint token --tls FOLDER`, "
                "copy them to the same place on each machine, and give --tls FOLDER"
            )
        return given if given in ("", AUTO) else str(Path(given).resolve())

    def _page(self) -> bool:
        """Return whether the page is served, for the plan."""
        from rallypoint.launch.observing.beside import check_page, missing

        if self.watch:
            check_page()
        return self.watch if self.watch is not None else sys.stdout.isatty() and not missing()

    def _traced(self) -> dict[str, Any]:
        """Return where a trace goes and of which steps it is, for the plan: ``FILE`` or ``FILE@A:B``."""
        if (found := re.fullmatch(r"(.+)@(\d+):(\d+)", self.trace, re.ASCII)) is None:
            return {"trace": self.trace}
        return {"trace": found[1], "trace_steps": (int(found[2]), int(found[3]))}

    def _targets(self) -> str:
        """Return where the file with the places of metrics belongs, for the plan."""
        if not self.metrics:
            return ""
        from rallypoint.launch.observing.health import check_installed

        check_installed()
        if self.hosts or self.engine != "local":
            raise UsageError("--metrics is for a run on this machine: elsewhere each role has --health HOST:PORT")
        return str(Path(self.metrics).resolve())

    def _machines(self) -> dict[str, Any]:
        """Return what differs in the plan of a run that is not on this machine only."""
        check_engine(self.engine)
        if self.engine != "ray" and (self.address or self.gpus):
            raise UsageError(f"{'--address' if self.address else '--gpus'} is for --engine ray")
        bind = f"{HERE}:0" if self.bind == ON_LOOPBACK else self.bind
        if not self.hosts:
            if self.engine == "ssh":
                raise UsageError("--engine ssh on which machines? give --hosts, a file with one a line or a list")
            return {"bind": bind} if self.engine in ("ray", "slurm") else {}
        if self.engine not in ("local", "ssh"):
            raise UsageError(f"--hosts is for ssh, not for --engine {self.engine}")
        return {"engine": "ssh", "hosts": hosts_of(self.hosts), "bind": bind}


def options_of(kind: type[msgspec.Struct], *, without: str = "") -> dict[str, Any]:
    """Return the annotation of each field of `kind` that is an option, by name. `without`: those with this mark."""
    hints = get_type_hints(kind, include_extras=True)
    names = [name for name in kind.__struct_fields__ if not without or without not in get_args(hints[name])]
    return {name: hints[name] for name in sorted(names, key=lambda name: name != "workers")}  # they come first


def with_options(kind: type[msgspec.Struct], defaults: Any = None, *, without: str = "") -> _Decorator:
    """Give a command all options of `kind` as one argument, `options`. `without`: see `options_of`."""
    start = defaults or kind()
    taken = {name: (hint, getattr(start, name)) for name, hint in options_of(kind, without=without).items()}
    return _giving("options", taken, lambda given: msgspec.structs.replace(start, **given))


def with_changes(*names: str) -> _Decorator:
    """Give a command these options of a run as one argument, `changes`: the values by name of those that are given."""
    taken = {}
    for name, hint in options_of(RunOptions).items():
        if name in names:
            value, *marks = get_args(hint)
            told = copy.copy(marks[0])
            told.show_default = "as before"
            taken[name] = Annotated[value | None, told], None
    return _giving("changes", taken, lambda given: {name: one for name, one in given.items() if one is not None})


def _giving(argument: str, taken: Mapping[str, tuple[Any, Any]], made: Callable[[dict[str, Any]], Any]) -> _Decorator:
    """Give a command options (annotation and default by name) as one `argument`, which is `made` of their values."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own_hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command).parameters.items() if name != argument
        ]  # fmt: skip
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for name, (hint, default) in taken.items()
        ]

        @wraps(command)
        def called(**given: Any) -> None:
            command(**{argument: made({name: given.pop(name) for name in taken})}, **given)

        called.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
        called.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        del called.__wrapped__
        return called

    return decorate


def arguments_of(options: RunOptions) -> list[str]:
    """Return the words of a ``rallypoint run`` that mean these options: those that differ from its defaults."""
    words: list[str] = []
    usual = RunOptions()
    for name, hint in options_of(RunOptions).items():
        value = getattr(options, name)
        if value == getattr(usual, name):
            continue
        given = get_args(hint)[1]
        # (In an annotation the first name is where typer keeps a default)
        named = [word for word in (given.default, *given.param_decls) if str(word).startswith("--")]
        word = named[0] if named else f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(word.split("/")[0 if value else 1])
        else:
            words += [part for one in (value if isinstance(value, list) else [value]) for part in (word, str(one))]
    return words


def read_topology(path: Path) -> Topology:
    """Return what a user tells of the machines in a TOML or JSON file. Raises ConfigError if it says something else.

        [hosts.node1]                 # the name that the host gives itself, or the address at which its servers listen
        rack = "a"
        link_mbit = 10000

        [racks.a]                     # only for racks whose uplink is narrow
        uplink_mbit = 20000

    In JSON: ``{"hosts": {"node1": {"rack": "a", "link_mbit": 10000}}, "racks": {"a": {"uplink_mbit": 20000}}}``.
    """
    with Explained(ConfigError, f"the topology {path} cannot be read"):
        text = path.read_bytes()
    try:
        data = msgspec.json.decode(text) if path.suffix == ".json" else tomllib.loads(text.decode())
        return msgspec.convert(data, Topology)
    except (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:  # (or a ValidationError)
        raise ConfigError(
            f"the topology {path}: {error}. Write [hosts.NAME] with rack = \"a\" and link_mbit = 10000, and [racks.a] "
            "with uplink_mbit = 20000 (or the same in JSON, in a file that ends with .json)"
        ) from None
