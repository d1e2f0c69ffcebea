"""The application that all commands are registered with, and the panels that `--help` shows them in."""

from __future__ import annotations

from typing import Annotated

import typer

import rallypoint

app = typer.Typer(
    help="Data-parallel training for PyTorch: workers compute gradients, servers own the parameters, any of them may "
    "die.\n\nBegin with [bold]rallypoint train gpt[/bold], or with a script of your own: "
    "[bold]rallypoint run train.py[/bold]",
    no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
)  # fmt: skip

GONE = {  # commands, and options of a run, that were there before the first release, or are missed: what to do instead
    "certs": "rallypoint token --tls FOLDER",
    "compare": "rallypoint watch RUN RUN",
    "continue": "rallypoint pause RUN --off",
    "diff": "rallypoint replay RUN RUN",
    "learning-rate": "end the run (Ctrl-C), then go on with rallypoint resume RUN --set optimizer.lr=1e-4",
    "simulate": "it is a script of the source now: python benchmarks/simulate.py",
    "snapshot-every": "say it at the start (--snapshot-steps, --snapshot-seconds), or ask for one: rallypoint snapshot",
    "top": "rallypoint watch RUN --terminal",
    "track": "rallypoint watch RUN --track KIND:FOLDER",
    "train finetune": "it is a script now: rallypoint run examples/finetune.py --model gpt2 --data texts",
    "train gan": "it is a script now, with job.store in place of job.train: rallypoint run examples/gan.py",
    # run, train, ...
    "--transport": "leave it out: TCP carries all (over an InfiniBand card too); on one host payloads stay in memory",
    "--best-is": "--set evaluation.best_is=max",
    "--keep-best": "--set evaluation.keep_best=val_loss",
    "--keep-every": "--keep-last N keeps more of the last ones",
    "--ssh": "the ssh that PATH finds first is used, with ~/.ssh/config",
    "--tensorboard": "--track tensorboard:FOLDER writes the run's figures for TensorBoard",
    "--trace-steps": "--trace FILE@5:7",
}
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
START, RUNNING, AFTER, BY_HAND = "Start a job", "While a job runs", "Afterwards", "A cluster by hand"
PANELS = (START, RUNNING, AFTER, BY_HAND)  # in the order of `rallypoint --help`
FIRST = ("run", "train")  # of their panel's commands; the others follow as they were registered


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rallypoint {rallypoint.__version__}")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[bool, typer.Option(
        "--version", is_eager=True, callback=_print_version, help="Print the version, and nothing else.",
    )] = False,
) -> None:  # fmt: skip
    """Options that stand before any command."""
