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

_COMPUTE = "--compute TIME: 6 x parameters x tokens / operations a second"
_NEAR = "set RALLYPOINT_NEAR=PLACE in its environment"
_PRICES = "multiply: GPUs and servers by what an hour of each costs, and by the seconds of a step"
_RACKS = "the planner knows no racks; python benchmarks/simulate.py does"
GONE = {  # commands and options ("--tensorboard" of any command, "plan --clip") of earlier versions: what to do instead
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
    "--report-after": "a stall of 30 s, a crash and a failure always leave a report",
    "--ssh": "the ssh that PATH finds first is used, with ~/.ssh/config",
    "--tensorboard": "--track tensorboard:FOLDER writes the run's figures for TensorBoard",
    "--trace-steps": "--trace FILE@5:7",
    # chaos, slurm, k8s render
    "--schedule": "--kills, --resizes and --everything, with --seed",
    "--stops": "a worker is stopped in any case",
    "--job-name": "sbatch --job-name NAME job.sbatch",
    "--lead": "edit the seconds in #SBATCH --signal=B:USR1@120 of what is printed",
    "--partition": "--sbatch=--partition=NAME",
    "--server-cpus": "edit --cpus-per-task of the first component in what is printed",
    "--server-partition": "add #SBATCH --partition=NAME to the first component of what is printed",
    "--setup": "put the line into what is printed, before exec",
    "--grace": "edit terminationGracePeriodSeconds in what is printed",
    "--namespace": "kubectl apply -n NAMESPACE",
    "--pull-policy": "add imagePullPolicy to the containers in what is printed",
    "--server-cpu": "edit the servers' cpu in what is printed",
    "--storage-class": "add storageClassName to the claim in what is printed, or give --claim",
    # others
    "aggregator --interface": "--bind eth0:0",
    "aggregator --near": _NEAR,
    "coordinator --interface": "--bind eth0:4700",
    "k8s secret --namespace": "kubectl apply -n NAMESPACE",
    "plan --clip": "--set clip=1.0",
    "plan --depth": "the planner takes as many blocks as is usual; for another model name the folder of a run of it",
    "plan --gpu-price": _PRICES,
    "plan --gpus-per-host": "--gpus 8x4 for 4 on each of 8 hosts",
    "plan --local-steps": "--set sync.type=local-steps --set sync.steps=16",
    "plan --pace": "--set network.pace_mbit=1000",
    "plan --rack": _RACKS,
    "plan --plot": "--json tells all layouts, to draw from",
    "plan --replicas": "--set replicas=64",
    "plan --restart": "the planner takes two minutes",
    "plan --rows": "--json tells all layouts",
    "plan --server-link": "the planner takes the workers' link",
    "plan --server-price": _PRICES,
    "plan --shard-kib": "--set network.shard_bytes=262144",
    "plan --tflops": _COMPUTE,
    "plan --tokens": _COMPUTE,
    "plan --unpaced": "--set network.pacing=off",
    "plan --uplink": _RACKS,
    "report --doctor": "it is always there",
    "report --no-doctor": "leave doctor.txt out of what you send",
    "server --interface": "--bind eth0:0",
    "server --near": _NEAR,
    "stop --reason": "rallypoint stop RUN 'good enough'",
    "watch --browser": "open the address that is printed",
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
