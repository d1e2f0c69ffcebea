"""Commands that start one role of a job: coordinator, server, worker, aggregator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rallypoint.cli.app import BY_HAND, PASS_ON, app
from rallypoint.cli.given import refuse_option
from rallypoint.launch import environment
from rallypoint.launch.access import access_of
from rallypoint.launch.options import (
    Advertise,
    CoordinatorOptions,
    HealthAt,
    JobAddress,
    Tls,
    TokenFile,
    with_options,
)

_ALONE = CoordinatorOptions(workers="1", servers=1, snapshots="none")


@app.command(rich_help_panel=BY_HAND)
@with_options(CoordinatorOptions, _ALONE)
def coordinator(
    options: CoordinatorOptions,
    token_file: TokenFile = "", tls: Tls = "",
    resume: Annotated[str, typer.Option(metavar="NAME", help="The snapshot to begin with, of --snapshots.")] = "",
    linger: Annotated[float, typer.Option(
        min=0, metavar="S", help="Seconds to wait at the end for workers whose scripts still run: they may be saving.",
    )] = 0.0,
    health: HealthAt = "",
    terms: Annotated[str, typer.Option(hidden=True, help="All of how the cluster behaves (Terms), as JSON.")] = "",
    join_info: Annotated[str, typer.Option(hidden=True, help="All that members are told (JoinInfo), as JSON.")] = "",
) -> None:
    """Run the coordinator of one job. Start it first: it prints where it listens.

    The job's token comes in --token-file or RALLYPOINT_TOKEN; without one, a new one is made, and the way to it is
    printed. With --folder it keeps a journal there: started again at the same address, it goes on.

    Example: [bold]rallypoint coordinator --bind 10.0.0.7:4700 --workers 2 --servers 2[/bold]
    """
    from rallypoint.coordinator.service import JoinInfo
    from rallypoint.core.cluster.terms import Terms
    from rallypoint.launch.commands.by_hand import decoded, described, end_process, run_coordinator
    from rallypoint.launch.health import answering

    known, about = described(options.plan([], folder=str(options.folder or "")))
    if terms or join_info:  # from a launcher
        known = decoded(terms or "{}", Terms, "--terms")
        about = decoded(join_info or "{}", JoinInfo, "--join-info")
    with answering(health) as told:
        status = run_coordinator(
            known, about, access_of(token_file, "coordinator", tls), told, bind=options.bind,
            advertise=options.advertise, resume=resume, linger=linger,
        )  # fmt: skip
    end_process(status)


@app.command(rich_help_panel=BY_HAND)
def server(
    bind: Annotated[str, typer.Option(help="Where workers connect; port 0 is any free one.")] = "127.0.0.1:0",
    coordinator: JobAddress = "", token_file: TokenFile = "", tls: Tls = "",
    id: Annotated[str, typer.Option(help="This server's name; by default RALLYPOINT_ID, or server-PID.")] = "",
    advertise: Advertise = "", health: HealthAt = "",
) -> None:
    """Run one server of one job. On SIGTERM it hands its shards over and ends.

    The job's token comes in --token-file or RALLYPOINT_TOKEN.

    Example: [bold]rallypoint server --coordinator 10.0.0.7:4700 --bind 10.0.0.8:0[/bold]
    """
    from rallypoint.launch.commands.by_hand import address_of, end_process, run_server
    from rallypoint.launch.health import answering
    from rallypoint.server.service import ServerService

    access, address = access_of(token_file, "server", tls), address_of(coordinator)
    service = ServerService(
        id=id or os.environ.get(environment.ID) or f"server-{os.getpid()}", coordinator=address,
        token=access.token, bind=bind, advertise=advertise, transport=access.transport,
    )  # fmt: skip
    with answering(health) as told:
        status = run_server(service, address, told)
    end_process(status)


@app.command(context_settings=PASS_ON, rich_help_panel=BY_HAND)
def worker(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Your training script; everything after it is passed on to it.")],
    coordinator: JobAddress = "", token_file: TokenFile = "", tls: Tls = "",
    id: Annotated[str, typer.Option(help="This worker's name; by default RALLYPOINT_ID, or worker-PID.")] = "",
    threads: Annotated[int, typer.Option(
        min=1, metavar="N", help="Intra-op threads: as many as the other workers have, or the bytes differ.",
    )] = 1,
    health: HealthAt = "",
) -> None:  # fmt: skip
    """Run a script as one worker of one job. On SIGTERM it hands its replicas over and ends.

    The job's token comes in --token-file or RALLYPOINT_TOKEN.

    Example: [bold]rallypoint worker --coordinator 10.0.0.7:4700 train.py --my-option 3[/bold]
    """
    from rallypoint.launch.commands.by_hand import start_worker

    refuse_option(context, str(script), "script")
    start_worker(
        script, context.args, coordinator=coordinator, token_file=token_file, id=id, threads=threads,
        health=health, tls=tls,
    )  # fmt: skip


@app.command(rich_help_panel=BY_HAND)
def aggregator(
    bind: Annotated[str, typer.Option(help="Where workers connect; port 0 is any free one.")] = "127.0.0.1:0",
    coordinator: JobAddress = "", token_file: TokenFile = "", tls: Tls = "",
    id: Annotated[str, typer.Option(help="This aggregator's name; by default RALLYPOINT_ID, or aggregator-PID.")] = "",
    near: Annotated[str, typer.Option(
        metavar="PLACE", help="A host or a rack, by any name: for workers whose RALLYPOINT_NEAR is the same.",
    )] = "",
    advertise: Advertise = "", health: HealthAt = "",
) -> None:  # fmt: skip
    """Run one aggregator of one job: it adds up the contributions of workers near it. It may be ended at any time.

    The job's token comes in --token-file or RALLYPOINT_TOKEN.

    Example: [bold]rallypoint aggregator --coordinator 10.0.0.7:4700 --bind 10.0.0.9:0 --near rack2[/bold]
    """
    from rallypoint.aggregator.service import AggregatorService
    from rallypoint.launch.commands.by_hand import address_of, end_process, run_server
    from rallypoint.launch.health import answering

    access, address = access_of(token_file, "aggregator", tls), address_of(coordinator)
    service = AggregatorService(
        id=id or os.environ.get(environment.ID) or f"aggregator-{os.getpid()}", coordinator=address,
        token=access.token, near=near or os.environ.get(environment.NEAR, ""), bind=bind,
        advertise=advertise, transport=access.transport,
    )  # fmt: skip
    with answering(health) as told:
        status = run_server(service, address, told)
    end_process(status)
