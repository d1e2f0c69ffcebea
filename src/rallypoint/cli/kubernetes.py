"""Commands for Kubernetes: `k8s render` and `k8s secret`. They print manifests, and talk to no cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rallypoint.cli.app import PASS_ON, START, app
from rallypoint.cli.given import hint_at_misplaced, refuse_option
from rallypoint.launch.engines.kubernetes import RenderOptions
from rallypoint.launch.options import with_options
from rallypoint.launch.plan import LAUNCHER

k8s = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Write a job as manifests for Kubernetes, for a JobSet.",
)  # fmt: skip
app.add_typer(k8s, name="k8s", rich_help_panel=START)


@k8s.command(context_settings=PASS_ON)
@with_options(RenderOptions, without=LAUNCHER)
def render(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Your script, as the image has it; its own arguments after it.")],
    options: RenderOptions,
) -> None:
    """Print the manifests of a job: pods of every role with probes, storage, a disruption budget.

    Edit the printed manifests for settings without an option: the storage class, servers' processors, when to pull. The
    namespace is the one of kubectl apply.

    Example: [bold]rallypoint k8s render --image me/train:1 --workers 2:8 --servers 2 train.py > job.yaml[/bold]
    """
    from rallypoint.launch.engines.kubernetes import render as rendered

    refuse_option(context, str(script), "script")
    hint_at_misplaced(context, context.args, f"{script}")
    print(rendered(options, script, context.args), end="")


@k8s.command()
def secret(
    name: Annotated[str, typer.Argument(help="The Secret's name: NAME-token for the job NAME.")],
    tls: Annotated[Path | None, typer.Option(
        metavar="FOLDER", help="Print the roles' certificates instead, from a folder of `rallypoint token --tls`.",
    )] = None,
) -> None:  # fmt: skip
    """Print a Secret with a new token for each role of one job. Pipe it into kubectl: it belongs in no file.

    Example: [bold]rallypoint k8s secret gpt-token | kubectl apply -f -[/bold]

    With TLS: [bold]rallypoint k8s secret gpt-tls --tls certificates | kubectl apply -f -[/bold]
    """
    from rallypoint.launch.engines.kubernetes import certificates, new_secret, yaml_of

    made = new_secret(name) if tls is None else certificates(name, tls)
    print(yaml_of([made]), end="")
