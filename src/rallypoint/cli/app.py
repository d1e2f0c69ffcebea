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

_PRICES = "multiply: GPUs and servers by what an hour of each costs, and by the seconds of a step"
GONE = {  # commands and options ("--tensorboard" of any command, "plan --clip") of earlier versions: what to do instead
    "learning-rate": "end the run (Ctrl-C), then go on with rallypoint resume RUN --set optimizer.lr=1e-4",
    "snapshot-every": "say it at the start (--snapshot-steps, --snapshot-seconds), or ask for one: rallypoint snapshot",
    "simulate": "it is a script of the source now: python benchmarks/simulate.py",
    "certs": "rallypoint token --tls FOLDER",
    "continue": "rallypoint pause RUN --off",
    "diff": "rallypoint replay RUN RUN",
    "stop --reason": "rallypoint stop RUN 'good enough'",
    "compare": "rallypoint watch RUN RUN",
    "top": "rallypoint watch RUN --terminal",
    "track": "rallypoint watch RUN --track KIND:FOLDER",
    "watch --browser": "open the address that is printed",
    "--tensorboard": "--track tensorboard:FOLDER writes the run's figures for TensorBoard",
    "--job-name": "sbatch --job-name NAME job.sbatch",
    "--lead": "edit the seconds in #SBATCH --signal=B:USR1@120 of what is printed",
    "--partition": "--sbatch=--partition=NAME",
    "--server-cpus": "edit --cpus-per-task of the first component in what is printed",
    "--server-partition": "add #SBATCH --partition=NAME to the first component of what is printed",
    "--setup": "put the line into what is printed, before exec",
    "--best-is": "--set best_is=max",
    "--keep-best": "--set keep_best=val_loss",
    "--keep-every": "--keep-last N keeps more of the last ones",
    "--report-after": "a stall of 30 s, a crash and a failure always leave a report",
    "--ssh": "the ssh that PATH finds first is used, with ~/.ssh/config",
    "--trace-steps": "--trace FILE@5:7",
    "--schedule": "--kills, --resizes and --everything, with --seed",
    "--stops": "a worker is stopped in any case",
    "report --doctor": "it is always there",
    "report --no-doctor": "leave doctor.txt out of what you send",
    "coordinator --interface": "--bind eth0:4700",
    **dict.fromkeys(("server --interface", "aggregator --interface"), "--bind eth0:0"),
    **dict.fromkeys(("server --near", "aggregator --near"), "set RALLYPOINT_NEAR=PLACE in its environment"),
    "--grace": "edit terminationGracePeriodSeconds in what is printed",
    "--namespace": "kubectl apply -n NAMESPACE",
    "--pull-policy": "add imagePullPolicy to the containers in what is printed",
    "--server-cpu": "edit the servers' cpu in what is printed",
    "--storage-class": "add storageClassName to the claim in what is printed, or give --claim",
    "plan --clip": "--set clip=1.0",
    "plan --depth": "the planner takes as many blocks as is usual; for another model name the folder of a run of it",
    "plan --gpu-price": _PRICES,
    "plan --gpus-per-host": "--gpus 8x4 for 4 on each of 8 hosts",
    "plan --local-steps": "--set sync.type=local-steps --set sync.steps=16",
    "plan --pace": "--set pace_mbit=1000",
    "plan --replicas": "--set replicas=64",
    "plan --restart": "the planner takes two minutes",
    "plan --rows": "--json tells all layouts",
    "plan --server-link": "the planner takes the workers' link",
    "plan --server-price": _PRICES,
    "plan --shard-kib": "--set shard_bytes=262144",
    "plan --tflops": "--compute TIME: 6 x parameters x tokens / operations a second",
    "plan --tokens": "--compute TIME: 6 x parameters x tokens / operations a second",
    "plan --unpaced": "--set pacing=off",
    **dict.fromkeys(("plan --rack", "plan --uplink"), "the planner knows no racks; python benchmarks/simulate.py does"),
    "train finetune": "it is a script now: rallypoint run examples/finetune.py --model gpt2 --data texts",
    "train gan": "it is a script now, with job.store in place of job.train: rallypoint run examples/gan.py",
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
