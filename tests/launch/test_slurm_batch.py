"""What Slurm gives a job, the script that asks for it, and what goes into it from a command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rallypoint.errors import UsageError
from rallypoint.launch import kept_code
from rallypoint.launch.engines import slurm
from rallypoint.launch.engines.remote import FAR_END, ssh_command
from rallypoint.launch.engines.slurm import Batch, hosts_of_job, script_of, srun_command, tasks_per_node
from rallypoint.launch.options import RunOptions, arguments_of
from rallypoint.launch.plan import Host
from support.programs import run_program

sys.path.insert(0, str(Path(__file__).parents[1]))

from odd_words import WORDS

SERVERS = ("coordinator", "server", "aggregator")


def nodes_of(text: str) -> list[str]:
    return text.split(",")


def test_a_plain_job_runs_every_role_anywhere() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2,n3", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert hosts_of_job(environ, nodes_of) == (Host("n1", slots=2), Host("n2", slots=2), Host("n3"))


def test_a_heterogeneous_job_runs_servers_and_workers_apart() -> None:
    environ = {
        "SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n1,n2", "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2",
        "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1,4",
    }  # fmt: skip
    hosts = hosts_of_job(environ, nodes_of)
    assert hosts == (
        Host("n1+0", roles=SERVERS, slots=2), Host("n1+1", roles=("worker",)), Host("n2+1", roles=("worker",), slots=4),
    )  # fmt: skip
    assert [slurm.node_and_component(host) for host in hosts] == [("n1", "0"), ("n1", "1"), ("n2", "1")]


def test_outside_of_a_job_it_says_how_to_make_one() -> None:
    with pytest.raises(UsageError, match="rallypoint slurm"):
        hosts_of_job({}, nodes_of)
    with pytest.raises(UsageError, match="3 components"):
        hosts_of_job({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "3"}, nodes_of)


@pytest.mark.parametrize(("text", "counts"), [("3", [3]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x1)", [1, 2])])
def test_how_many_tasks_each_node_has_is_read(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x", "2 (x3)"])
def test_what_is_no_list_of_tasks_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="tasks"):
        tasks_per_node(text)


def test_the_step_on_a_node_has_all_that_the_job_has_there() -> None:
    argv = srun_command(Host("n2+1", python="/py"), {})
    assert argv[0] == "srun"
    assert {"--het-group=1", "--nodelist=n2", "--nodes=1", "--ntasks=1", "--overlap"} <= set(argv)
    assert argv[-6:-3] == ["/py", "-P", "-m"]
    assert not any(word.startswith("--het-group") for word in srun_command(Host("n2", python="/py"), {}))


@pytest.mark.parametrize(("host", "asked", "option"), [
    (Host("n1", slots=4), {"SLURM_GPUS_PER_TASK": "2"}, ["--gpus-per-node=8"]),
    (Host("n1+1", slots=2), {"SLURM_GPUS_PER_TASK_HET_GROUP_1": "h100:1"}, ["--gpus-per-node=h100:2"]),
    (Host("n1+0", slots=2), {"SLURM_GPUS_PER_TASK_HET_GROUP_1": "1"}, []),
    (Host("n1", slots=4), {}, []),  # the job's GPUs were asked for in another way: a step gets them all
])  # fmt: skip
def test_a_step_asks_for_the_gpus_of_all_tasks_on_its_node(
    host: Host, asked: dict[str, str], option: list[str]
) -> None:
    """Else its one task would get one task's share: every worker of the node on one GPU."""
    found = [word for word in srun_command(replace(host, python="/py"), asked) if word.startswith("--gpus")]
    assert found == option


# ---- the script ---------------------------------------------------------------------------------------------------


def directives(text: str) -> list[list[str]]:
    """The options of each component."""
    components: list[list[str]] = [[]]
    for line in text.splitlines():
        if line == "#SBATCH hetjob":
            components.append([])
        elif line.startswith("#SBATCH "):
            components[-1].append(line.removeprefix("#SBATCH "))
    return components


def test_the_script_asks_for_servers_and_workers_apart() -> None:
    batch = Batch(name="job", workers=8, servers=3, aggregators=1, gpus=1, worker_cpus=4, time="4:00:00",
                  lines=["--account=me"])  # fmt: skip
    servers, workers = directives(script_of(batch, ["rallypoint"], ["run"]))
    assert {"--job-name=job", "--requeue", "--open-mode=append", "--signal=B:USR1@120"} <= set(servers)
    assert {"--ntasks=4", "--cpus-per-task=2"} <= set(servers)
    assert {"--ntasks=8", "--cpus-per-task=4", "--gpus-per-task=1"} <= set(workers)
    for component in (servers, workers):
        assert {"--no-kill", "--time=4:00:00", "--account=me"} <= set(component)
    assert not any("gpus" in option for option in servers)


def test_together_is_one_component() -> None:
    batch = Batch(name="job", workers=8, servers=3, together=True, gpus=1, worker_cpus=4)
    (both,) = directives(script_of(batch, ["rallypoint"], ["run"]))
    assert {"--ntasks=8", "--gpus-per-task=1"} <= set(both)  # no GPU is for a server
    assert "--cpus-per-task=5" in both  # 3 servers of 2 cores are less than a core for each of 8 workers


def test_words_are_quoted_for_the_shell_but_the_folder_has_the_jobs_number() -> None:
    text = script_of(
        Batch(name="j", workers=1, servers=1), ["rallypoint", "a b"],
        ["rallypoint", "--folder", "runs/slurm-$SLURM_JOB_ID", "my script.py", "$HOME"],
    )  # fmt: skip
    assert "# Written by: rallypoint 'a b'" in text
    assert text.splitlines()[-1] == "exec rallypoint --folder \"runs/slurm-$SLURM_JOB_ID\" 'my script.py' '$HOME'"
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=120, check=False).returncode == 0


def test_a_newline_on_the_command_line_does_not_end_the_comment_that_quotes_it(tmp_path: Path) -> None:
    made_by = ["rallypoint", "slurm", "--note", f"a\ntouch {tmp_path}/done\n#SBATCH -x"]
    text = script_of(Batch(name="j", workers=1, servers=1), made_by, ["echo", "two\nlines"])
    done = subprocess.run(["bash"], input=text, text=True, timeout=120, check=True, capture_output=True)
    assert done.stdout == "two\nlines\n"
    assert not list(tmp_path.iterdir())
    assert "#SBATCH -x" not in text.splitlines()


def test_a_script_gets_odd_words_as_they_are_written(tmp_path: Path) -> None:
    """From the job script, which a shell reads."""
    tell = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", *WORDS]
    text = script_of(Batch(name="j", workers=1, servers=1), ["rallypoint", *WORDS], tell)
    done = subprocess.run(["bash"], input=text, text=True, timeout=120, check=True, capture_output=True, cwd=tmp_path)
    assert json.loads(done.stdout) == list(WORDS)
    assert not list(tmp_path.iterdir())


def test_a_python_in_an_odd_place_is_started_by_ssh_s_shell(tmp_path: Path) -> None:
    place = tmp_path / "it's $(echo executed) `x` \"a b\""
    place.mkdir()
    python = place / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    command = ssh_command(Host("n1", python=str(python)))
    assert command[-2] == "n1"  # sshd has the user's shell run the rest
    done = subprocess.run(["sh", "-c", command[-1]], text=True, timeout=120, check=True, capture_output=True)
    assert done.stdout == f"-P -m {FAR_END}\n"


def test_the_kept_copy_of_a_script_gets_odd_words_as_they_are_written(tmp_path: Path) -> None:
    script = tmp_path / "my $(x) train.py"
    script.write_text("import json, sys; print(json.dumps(sys.argv[1:]))\n")
    kept_code.keep(str(script), tmp_path / "run")
    argv = kept_code.worker_argv([sys.executable, str(script), *WORDS], str(script), tmp_path / "run")
    done = subprocess.run(argv, text=True, timeout=120, check=True, capture_output=True)
    assert json.loads(done.stdout) == list(WORDS)


def test_what_slurm_reads_is_quoted_where_it_must_be() -> None:
    batch = Batch(name='my "job"', workers=1, servers=1, lines=["--comment=a b", "--constraint=a&(b|c)"], together=True)
    (options,) = directives(script_of(batch, ["rallypoint"], ["run"]))
    assert {r'--job-name="my \"job\""', '--comment="a b"', "--constraint=a&(b|c)"} <= set(options)


@pytest.mark.parametrize("wrong", [
    {"time": "tomorrow"}, {"lines": ["account=me"]}, {"lines": ["--account=me\n#SBATCH"]},
])  # fmt: skip
def test_what_slurm_would_not_take_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"tomorrow|account"):
        Batch(name="j", workers=1, servers=1, **wrong)  # type: ignore[arg-type]
    for name in ("a/b", "a\nb"):
        with pytest.raises(UsageError, match="a"):
            Batch(name=name, workers=1, servers=1)


# ---- the command --------------------------------------------------------------------------------------------------


def test_options_become_the_words_that_mean_them() -> None:
    options = RunOptions(workers="2:8", backup_tasks=True, sets=["a=1", "b=2"], folder="x", snapshot_seconds=2.5)
    assert arguments_of(options) == [
        "--workers", "2:8", "--backup-tasks", "--snapshot-seconds", "2.5", "--folder", "x",
        "--set", "a=1", "--set", "b=2",
    ]  # fmt: skip
    assert arguments_of(RunOptions(watch=True)) == ["--watch"]
    assert arguments_of(RunOptions(watch=False)) == ["--no-watch"]
    assert arguments_of(RunOptions()) == []


@pytest.mark.programs
def test_the_command_writes_a_script_from_options_on_both_sides_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    argv = ["slurm", "--servers", "3", "train.py", "--workers", "2:8", "--lr", "0.1", "--gpus=1"]
    status, text = run_program(["-m", "rallypoint.cli", *argv], tmp_path / "output", env=dict(os.environ), cwd=tmp_path)
    assert status == 0, text
    servers, workers = directives(text)
    assert "--ntasks=3" in servers
    assert {"--ntasks=8", "--gpus-per-task=1", "--no-kill"} <= set(workers)
    command = text.splitlines()[-1]
    assert command.startswith(f"exec {sys.executable} -P -m rallypoint.cli run --workers 2:8 --servers 3 ")
    assert " --engine slurm " in command
    assert command.endswith(" --or-resume train.py --lr 0.1")
    misspelt = ["-m", "rallypoint.cli", "slurm", "train.py", "--worker", "8"]
    status, text = run_program(misspelt, tmp_path / "output", env=dict(os.environ), cwd=tmp_path)
    assert "hint: --worker goes to train.py: did you mean --workers?" in text
    argv = ["-m", "rallypoint.cli", "slurm", "no.py"]
    status, text = run_program(argv, tmp_path / "output", env=dict(os.environ), cwd=tmp_path)
    assert (status, text.strip()) == (1, "error: there is no script no.py")
