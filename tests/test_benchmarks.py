"""The benchmarks run, end, and write what they promise; how fast they were is nobody's business here."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))  # its modules import one another by name

import quick
import reduce

FOLDER = Path(quick.__file__).parent


def run(script: str, *arguments: str, into: Path) -> list[dict[str, Any]]:
    """The results that the benchmark wrote."""
    path = into / "figures.json"
    argv = [sys.executable, str(FOLDER / script), *arguments, "--rounds", "1", "--json", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert document["machine"]["cores"] >= 1
    results: list[dict[str, Any]] = document["results"]
    return results


def test_the_cases_of_make_bench_can_be_set() -> None:
    for _, settings in reduce.GOALS:
        assert settings.keys() <= set(reduce.Size.__slots__)


def test_a_ratio_is_worse_only_by_more_than_the_noise() -> None:
    kept = quick.Found([1.0, 1.1, 1.2])
    assert not quick.Found([0.95, 1.0, 1.15]).got_worse(kept)  # one round was as good
    assert not quick.Found([0.95, 1.0, 1.05]).got_worse(kept)  # all were worse, by less than the kept ones differ
    assert quick.Found([0.8, 0.85, 0.9]).got_worse(kept)
    assert not quick.Found([2.0]).got_worse(kept)
    assert quick.Found([310.0], more_is_better=False).got_worse(quick.Found([300.0], more_is_better=False))
    assert not quick.Found([280.0], more_is_better=False).got_worse(quick.Found([300.0], more_is_better=False))


@pytest.mark.slow
def test_reduce_measures_all_designs(tmp_path: Path) -> None:
    found = run(
        "reduce.py", "--loopback", "--workers", "2", "--servers", "2", "--megabytes", "1.5", "--steps", "2",
        into=tmp_path,
    )  # fmt: skip
    assert [figures["design"] for figures in found] == ["rallypoint", "gloo", "gloo-step"]
    assert all(len(figures["all_seconds"]) == 2 for figures in found)


@pytest.mark.slow
def test_train_follows_the_same_loss_curve_as_ddp(tmp_path: Path) -> None:
    found = run(
        "train.py", "--loopback", "--workers", "2", "--servers", "1", "--layers", "1", "--width", "32", "--block", "32",
        "--steps", "3", "--warm-up", "1", into=tmp_path,
    )  # fmt: skip
    ours, theirs, alone = found
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert len(ours["losses"]) == 5
    assert alone["losses"] == []


@pytest.mark.slow
def test_a_failing_member_is_one_sentence_and_its_own_words() -> None:
    argv = [sys.executable, str(FOLDER / "reduce.py"), "--loopback", "--workers", "1", "--servers", "1"]
    done = subprocess.run([*argv, "--shard-kib", "100000"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert done.stderr.startswith("error: worker0 ended with status 1")
    assert "shard_bytes is 102400000" in done.stderr


LATE = """
import sys, threading
import msgspec, torch
from torch.nn.parallel import DistributedDataParallel
from cluster import finish, join_gloo

class Done(msgspec.Struct):
    done: bool = True

def late(began):  # as a thread of Gloo that takes the GIL when the interpreter ends
    square = torch.zeros(400, 400)
    while True:
        torch.mm(square, square, out=square)
        began.set()

torch.set_num_threads(1)
join_gloo(0, 1)
wrapped = DistributedDataParallel(torch.nn.Linear(2, 2))
wrapped(torch.ones(1, 2)).sum().backward()
began = threading.Event()
threading.Thread(target=late, args=(began,), daemon=True).start()
began.wait()
print("the last line")
finish(Done())
"""


@pytest.mark.slow
def test_a_member_of_a_gloo_group_does_not_abort_at_its_end(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(FOLDER), "RALLYPOINT_BENCHMARK_RESULT": str(tmp_path / "result.json")}
    done = subprocess.run([sys.executable, "-c", LATE], env=env, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "the last line\n"), done.stderr
    assert json.loads((tmp_path / "result.json").read_text()) == {"done": True}


@pytest.mark.slow
def test_uneven_links_measures_both_placements_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ("--workers", "2", "--servers", "2", "--megabytes", "2", "--steps", "2", "--after", "0")
    argv = [sys.executable, str(FOLDER / "uneven_links.py"), *arguments, "--rounds", "1", "--json", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    if "a lab needs Linux" in done.stderr or "netlab needs" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["results"]["placements"]
    assert [figures["placement"] for figures in found] == ["even", "told"]
    assert len({figures["sha256"] for figures in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("curl", "no cache", "cache"), ("cache", "S3, cache"), ("cache", "cache, fails")],
    ids=["cache", "S3", "fails"],
)  # fmt: skip
def test_remote_reads_a_store_once_for_each_host_with_caches(names: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads the web with aiohttp")
    path = tmp_path / "figures.json"
    argv = [sys.executable, str(FOLDER / "remote.py"), "--megabytes", "6", "--rate-mbit", "0", "--hosts", "2"]
    argv += [word for name in names for word in ("--only", name)]
    done = subprocess.run([*argv, "--json", str(path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {(row["hosts"], row["name"]): row for row in json.loads(path.read_text())["results"]}
    for number in (1, 2):  # whatever is cached, whoever fails: the same weights
        assert len({row["digest"] for (at, name), row in found.items() if at == number and name != "curl"}) == 1
    assert set(found) == {(at, name) for name in names for at in ((1,) if name in ("curl", "S3, cache") else (1, 2))}
    if "no cache" in names:
        twice = 2.1 * found[2, "cache"]["nbytes"]
        assert found[2, "cache"]["sent"] < twice < found[2, "no cache"]["sent"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_for_a_gpu_works_on_a_cpu_and_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    argv = [sys.executable, str(FOLDER / "gpu.py"), "--cpu", "--json", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(path.read_text())
    assert Counter(name.partition(": ")[0] for name in made) == {"fact": 6, "check": 19, "tax": 7, "streamed": 1}
    assert {name: part["says"] for name, part in made.items() if part["outcome"] != "ok"} == {}
    assert all(part["figures"] or part["says"] for part in made.values())
    there = {name: part for name, part in made.items() if part["outcome"] == "ok"}
    again = subprocess.run([*argv, "--only", "fact"], capture_output=True, text=True, timeout=240)
    assert "what a step costs" in again.stdout, again.stderr
    assert json.loads(path.read_text()) | there == json.loads(path.read_text())
