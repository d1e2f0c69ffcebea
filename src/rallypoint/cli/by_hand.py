"""Commands for members that are started by hand (a role, its token), and for what they run on (`doctor`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer

from rallypoint.cli.app import BY_HAND, PASS_ON, app
from rallypoint.cli.given import refuse_option
from rallypoint.core.plan.topology import MOST_MBIT
from rallypoint.errors import UsageError
from rallypoint.launch import environment
from rallypoint.launch.access import access_of
from rallypoint.launch.options import HealthAt, JobAddress, RunOptions, Tls, TokenFile, with_options
from rallypoint.launch.plan import FILES, LAUNCHER, Advertise, option
from rallypoint.net.handshake import ROLES

if TYPE_CHECKING:
    from rallypoint.aggregator import AggregatorService
    from rallypoint.server.service import ServerService


class Alone(RunOptions, frozen=True, kw_only=True):
    """The options of a coordinator that was started by hand."""

    folder: Annotated[str, option(
        metavar="FOLDER", panel=FILES,
        help="For the journal and the event log; without it there are none, and scripts save where each runs.",
    )] = ""  # fmt: skip


_START = Alone(workers="1", servers=1, snapshots="none")


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a member that listens."""

    bind: Annotated[str, typer.Option(
        help="Where workers connect; port 0 is any free one; eth0:0 is at that interface.",
    )] = "127.0.0.1:0"  # fmt: skip
    advertise: Advertise = ""
    health: HealthAt = ""

    @property
    def at(self) -> str:
        """Where it listens, "host:port"."""
        from rallypoint.net.places import at_interface

        return at_interface(self.bind)


@app.command(rich_help_panel=BY_HAND)
@with_options(Alone, _START, without=LAUNCHER)
def coordinator(
    options: Alone,
    token_file: TokenFile = "", tls: Tls = "",
    resume: Annotated[str, typer.Option(
        metavar="NAME", help="The snapshot of --snapshots to begin with; latest: the newest, if there is one; "
        "PLACE/NAME: of another job, which is only read. The same command again continues the job that it began.",
    )] = "",
    linger: Annotated[float, typer.Option(
        min=0, metavar="S", help="Seconds to wait at the end for workers whose scripts still run: they may be saving.",
    )] = 0.0,
    health: HealthAt = "",
    terms: Annotated[str, typer.Option(hidden=True, help="All of how the cluster behaves (Terms), as JSON.")] = "",
    join_info: Annotated[str, typer.Option(hidden=True, help="All that members are told (JoinInfo), as JSON.")] = "",
) -> None:
    """Run the coordinator of one job: it decides who computes what, and shows the progress.

    The order of starting is free: members wait 30 s for the coordinator, and the coordinator waits for them. With port
    0 it comes first, because it prints where it listens.

    The job's token comes in --token-file or RALLYPOINT_TOKEN; without one, the coordinator makes one and prints how to
    pass it on. With --folder it keeps a journal there: if it dies, start another with the same folder and token, here
    or on another machine that has the folder, and the job goes on. Give members both addresses. Never run two at once.
    SIGTERM ends only the coordinator, so that another one can go on; without --folder it ends the job, as Ctrl-C does.

    Example: [bold]rallypoint coordinator --bind 10.0.0.7:4700 --token-file job.token --workers 2 --servers 2[/bold]
    """
    from rallypoint.coordinator.service import JoinInfo
    from rallypoint.core.cluster.terms import Terms
    from rallypoint.launch.commands.by_hand import decoded, described, end_process, run_coordinator
    from rallypoint.launch.observing.health import answering, health_at
    from rallypoint.net.places import at_interface

    known, about = described(options.plan([], folder=options.folder))
    if terms or join_info:  # from a launcher
        known = decoded(terms or "{}", Terms, "--terms")
        about = decoded(join_info or "{}", JoinInfo, "--join-info")
    with answering(health or health_at()) as told:
        status = run_coordinator(
            known, about, access_of(token_file, "coordinator", tls), told, resume=resume, linger=linger,
            bind=at_interface(options.bind), advertise=options.advertise,
        )  # fmt: skip
    end_process(status)


@app.command(rich_help_panel=BY_HAND)
@with_options(Listening)
def server(
    options: Listening,
    coordinator: JobAddress = "", token_file: TokenFile = "", tls: Tls = "",
    id: Annotated[str, typer.Option(help="This server's name; by default RALLYPOINT_ID, or one of its own.")] = "",
    link_mbit: Annotated[float, typer.Option(
        min=0, max=MOST_MBIT, metavar="MBIT/S",
        help="The rate of its link: it gets shards in proportion (0: like most others).",
    )] = 0.0,
) -> None:  # fmt: skip
    """Run one server of one job: it owns a part of the parameters. On SIGTERM it hands its shards over and ends.

    Start the number that the coordinator waits for, at any time, before it or after it; later ones take their share
    too. Replace one that has died by another, under any name. At --bind 0.0.0.0:0 it tells others the address
    of the interface that leads to the coordinator. RALLYPOINT_NEAR is its rack, by any name: backups are in another.

    Example: [bold]rallypoint server --coordinator 10.0.0.7:4700 --bind 10.0.0.8:0 --token-file server.token[/bold]

    If the coordinator may move: [bold]--coordinator 10.0.0.7:4700,10.0.0.9:4700[/bold]
    """
    from rallypoint.server.service import ServerService

    _serve("server", ServerService, options, coordinator, token_file, tls, id, link_mbit=link_mbit)


@app.command(context_settings=PASS_ON, rich_help_panel=BY_HAND)
def worker(
    context: typer.Context,
    program: Annotated[str, typer.Argument(
        metavar="SCRIPT | -- PROGRAM",
        help="Your training script, run by this Python, or a program; everything after it is passed on to it.",
    )] = "",
    coordinator: JobAddress = "", token_file: TokenFile = "", tls: Tls = "",
    id: Annotated[str, typer.Option(help="This worker's name; by default RALLYPOINT_ID, or one of its own.")] = "",
    ranks: Annotated[int, typer.Option(
        min=1, metavar="N", help="Processes of this worker, which share the model (FSDP2, tensor, pipeline parallel).",
    )] = 1,
    health: HealthAt = "",
) -> None:  # fmt: skip
    """Run a script, or any program that calls rallypoint.join(), as one worker of one job.

    Start the number that the coordinator waits for, at any time, before it or after it; more stand by and take over.
    Replace one that has died by another, under any name. On SIGTERM it hands its replicas over and ends.

    The program gets the coordinator's places, and the worker's token and name, in its environment. With how many
    intra-op threads it computes is a part of the job: --threads of `rallypoint coordinator`.

    Example: [bold]rallypoint worker --coordinator 10.0.0.7:4700 --token-file worker.token train.py --my-option 3[/bold]

    With another Python: [bold]rallypoint worker --coordinator 10.0.0.7:4700 -- env/bin/python train.py[/bold]
    """
    from rallypoint.launch.commands.by_hand import start_worker

    refuse_option(context, program, "script")
    if not program:
        raise UsageError("which script? rallypoint worker [options] train.py, or ... -- PROGRAM")
    start_worker(
        (program, *context.args), coordinator=coordinator, token_file=token_file, id=id, health=health, tls=tls,
        ranks=ranks,
    )  # fmt: skip


@app.command(rich_help_panel=BY_HAND)
@with_options(Listening)
def aggregator(
    options: Listening,
    coordinator: JobAddress = "", token_file: TokenFile = "", tls: Tls = "",
    id: Annotated[str, typer.Option(help="This aggregator's name; by default RALLYPOINT_ID, or one of its own.")] = "",
) -> None:  # fmt: skip
    """Run one aggregator of one job: it adds up the contributions of workers near it.

    No job needs one. It may be started and ended at any time: its workers go to the servers then. It is for workers
    whose RALLYPOINT_NEAR is the same as its own: a host or a rack, by any name.

    Example: [bold]RALLYPOINT_NEAR=rack2 rallypoint aggregator --coordinator 10.0.0.7:4700 --bind 10.0.0.9:0[/bold]
    """
    from rallypoint.aggregator import AggregatorService

    _serve("aggregator", AggregatorService, options, coordinator, token_file, tls, id)


def _serve(
    role: str, kind: type[ServerService | AggregatorService], options: Listening, coordinator: str, token_file: str,
    tls: str, id: str, **more: float,
) -> NoReturn:  # fmt: skip
    """Run a server or an aggregator to the end of its job."""
    from rallypoint.launch.commands.by_hand import address_of, check_reachable, end_process, run_server
    from rallypoint.launch.observing.health import answering, health_at

    access = access_of(token_file, role, tls, bind=options.at)
    address = address_of(coordinator)
    check_reachable(role, options.at, options.advertise, address)
    service = kind(
        id=id or environment.own_name(role), coordinator=address, token=access.token, bind=options.at,
        advertise=options.advertise, transport=access.transport, near=os.environ.get(environment.NEAR, ""), **more,
    )  # fmt: skip
    with answering(options.health or health_at()) as told:
        status = run_server(service, address, told, access.transport)
    end_process(status)


@app.command(rich_help_panel=BY_HAND)
def doctor(
    listen: Annotated[str, typer.Option(
        metavar="HOST:PORT", help="Be this machine's probe, for a doctor elsewhere, until Ctrl-C.",
    )] = "",
    probe: Annotated[list[str] | None, typer.Option(
        metavar="HOST:PORT", help="A probe's address; repeat it: every link between two of them is measured.",
    )] = None,
    coordinator: Annotated[str, typer.Option(
        metavar="HOST:PORT", help="A running job's coordinator: is it there, does it take the token?",
    )] = "",
    token_file: TokenFile = "", tls: Tls = "",
    snapshots: Annotated[str, typer.Option(
        metavar="URL", help="Where snapshots would go: can they be written there, and is there space?",
    )] = "",
    heartbeat: Annotated[float, typer.Option(
        min=0.5, metavar="S", help="The job's --heartbeat, to judge links by.",
    )] = 3.0,
) -> None:  # fmt: skip
    """Examine this machine, or all machines of a future cluster: what would break a job, or change its bytes?

    It says for each finding what to do, and ends with status 1 if something is bad. For a cluster start on each machine
    [bold]rallypoint doctor --listen 10.0.0.7:4711 --token-file job.token[/bold], and then on one of them:

    Example: [bold]rallypoint doctor --token-file job.token --probe 10.0.0.7:4711 --probe 10.0.0.8:4711[/bold]
    """
    from rallypoint.launch.commands.doctor import Doctor, Level
    from rallypoint.launch.commands.doctor import listen as be_a_probe
    from rallypoint.launch.console import Screen

    screen, access = Screen(), access_of(token_file, "observer", tls, bind=listen)
    if listen:
        be_a_probe(access, listen, screen)
        return
    it = Doctor(screen, access, heartbeat)
    here = it.machine()
    if snapshots:
        it.store(snapshots)
    if coordinator:
        it.coordinator(coordinator)
    if probe:
        it.machines(here, probe)
    raise typer.Exit(int(it.worst is Level.BAD))


@app.command(rich_help_panel=BY_HAND)
def token(
    role: Annotated[str, typer.Option(
        metavar="ROLE", help=f"Print this role's token, which follows from the job's: {', '.join(ROLES)}.",
    )] = "",
    token_file: Annotated[str, typer.Option(
        metavar="FILE", help="With --role: the file that holds the job's token; the default is the other commands'.",
    )] = "",
    tls: Annotated[Path | None, typer.Option(
        metavar="FOLDER", show_default=False,
        help="Make certificates in this folder instead: a CA of the job's own, and one certificate for each role.",
    )] = None,
    days: Annotated[int, typer.Option(min=1, metavar="N", help="With --tls: how long they are valid.")] = 365,
) -> None:  # fmt: skip
    """Print a new token for a job, or a role's token (--role), or make certificates for each role (--tls).

    With a role's token a process can join in that role and in no other. Give the coordinator the job's token, and each
    machine the tokens of its roles. If the output is a new file, only you can read it.

    Example: [bold]rallypoint token > job.token[/bold]

    Then: [bold]rallypoint token --role worker --token-file job.token > worker.token[/bold]

    With --tls, certificates for the option --tls of the other commands. Copy to each machine only the folders of the
    roles that run there; FOLDER/ca stays, and signs renewed certificates when the command is run again. A running job
    takes renewed ones for its new connections: [bold]rallypoint token --tls certificates[/bold]
    """
    if tls is not None:
        if role or token_file:
            raise UsageError("--tls makes certificates of all roles, and no token: give it alone")
        from rallypoint.net.certificates import make_certificates

        until = make_certificates(tls, days=days)
        print(f"certificates for every role are in {tls}; they are valid until {until:%Y-%m-%d %H:%M} UTC")
        return
    from rallypoint.launch.access import keep_private, token_for

    found = token_for(role, token_file)
    keep_private(sys.stdout.fileno())
    print(found)
