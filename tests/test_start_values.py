"""What a job begins with: with tune="auto" shards of the cost model's size, where no byte depends on it; and what it
says of its mode."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from rallypoint.codec.spec import Bf16, Int8
from rallypoint.config import record_of, resolve, with_start_values
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.optimizer import SGD, AdamW, Muon
from rallypoint.core.plan.candidates import advice_at_start
from rallypoint.core.plan.tuning import shards_for
from rallypoint.core.policy import AllReduce, Async, LocalSteps
from rallypoint.core.protocol import Welcome
from rallypoint.core.view import Member, View, ViewNumber
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.worker.loop import session
from rallypoint.worker.loop.session import mode_said

FACTS = Welcome(workers=4, servers=4)
NBYTES = 2_000_000
DEFAULT = 1 << 20


def started(nbytes: int = NBYTES, facts: Welcome = FACTS, **settings: Any) -> tuple[int, str]:
    given = {"tune": "auto", **settings}
    config, why = with_start_values(resolve(given), given, nbytes, facts)
    return config.network.shard_bytes, why


def test_a_small_model_is_cut_so_that_every_server_has_shards_and_the_log_says_why() -> None:
    size, why = started()
    assert NBYTES / size > 3 * FACTS.servers
    assert why.startswith(f"shard_bytes {size >> 10} KiB, by the cost model: for 2 MB on 4 servers with links of")


def test_a_slower_link_that_is_told_makes_them_smaller_and_a_large_model_keeps_the_default() -> None:
    assert started(facts=msgspec.structs.replace(FACTS, link_mbit=62.5))[0] < started()[0]
    assert started(1_000_000_000)[0] == DEFAULT


@pytest.mark.parametrize(
    "settings",
    [
        {"tune": "off"}, {"clip": 1.0}, {"codec": Int8()}, {"down": Int8()}, {"sync": Async()},
        {"groups": [{"match": ["*"], "codec": {"type": "int8"}}]}, {"network.shard_bytes": DEFAULT},
    ],
)  # fmt: skip
def test_nothing_is_chosen_where_bytes_depend_on_it_or_where_it_was_said(settings: dict[str, Any]) -> None:
    assert started(**settings) == (DEFAULT, "")


@pytest.mark.parametrize("settings", [{"codec": Bf16()}, {"optimizer": SGD(lr=0.1)}, {"optimizer": AdamW(lr=0.1)}])
def test_it_is_chosen_where_each_word_is_treated_by_itself(settings: dict[str, Any]) -> None:
    assert started(**settings)[0] < DEFAULT


def test_a_job_that_has_shards_keeps_them_whoever_comes_and_whatever_is_tuned() -> None:
    facts = msgspec.structs.replace(FACTS, shard_bytes=4096, servers=16)
    assert started(facts=facts) == (4096, "")
    assert started(facts=facts, tune="off") == (4096, "")
    assert started(facts=facts, **{"network.shard_bytes": 8192}) == (8192, "")


def test_on_one_host_shards_are_larger_and_each_server_has_some_of_them() -> None:
    facts = msgspec.structs.replace(FACTS, servers=2, one_host=True)
    for nbytes, size in ((4, 1), (15 << 20, 1), (16 << 20, 2), (32 << 20, 4), (1 << 33, 4)):
        assert started(nbytes, facts, tune="off", clip=1.0) == (size << 20, "")
    assert started(1 << 33, msgspec.structs.replace(facts, shard_bytes=DEFAULT)) == (DEFAULT, "")  # it has some already
    assert started(1 << 33, facts, **{"network.shard_bytes": DEFAULT}) == (DEFAULT, "")
    assert started(1 << 33, facts, sync=Async()) == (DEFAULT, "")


def test_nothing_is_chosen_for_a_part_of_a_model() -> None:
    assert started(0) == (DEFAULT, "")


def test_shards_are_never_larger_than_the_default_nor_smaller_than_32_kib() -> None:
    for nbytes in (4, 10_000, 10**6, 10**8, 10**10):
        assert 32 << 10 <= shards_for(nbytes, 8, 3)[0] <= DEFAULT


# ---- which mode: said once, where there is a GPU ----

LAYOUT = build_layout([TensorSpec("w", (50_000_000,), "float32", 0)])


def mode(device: str = "cuda", hosts: tuple[str, ...] = ("a",), ranks: int = 1, views: int = 1, **settings: Any) -> str:
    workers = tuple(Member(f"w{number}", host, incarnation=1) for number, host in enumerate(hosts))
    servers = (Member("s", "a", "nobody:1", 1),)
    view = View(ViewNumber(1, views), ViewNumber(1, 1), workers, servers, (), {}, {}, uploader="w0", contributors={})
    record = record_of(resolve({"replicas": 4, **settings}), LAYOUT)
    welcome = Welcome(workers=len(hosts), servers=2)
    return mode_said(record, view, welcome, torch.device(device), ranks)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80e9))


@pytest.mark.usefixtures("gpu")
def test_a_job_on_gpus_is_told_which_mode_suits_its_machines() -> None:
    assert mode() == advice_at_start(200_000_000, 1, 1, 2, memory=80e9).says
    assert "sync=rp.AllReduce()" in mode()
    assert mode(sync=AllReduce()) == mode()  # whatever it uses
    assert "(--ranks 8)" in mode(hosts=("a",) * 8)
    assert "rp.Sync(), the default" in mode(hosts=("a", "b", "c", "d"))
    assert "with workers of 2 ranks" in mode(ranks=2)
    assert mode(views=2) == "", "a worker that comes back says nothing: it has been said"


def test_a_job_on_processors_is_told_nothing() -> None:
    assert mode("cpu") == ""
    assert mode("cpu", hosts=("a", "b"), sync=AllReduce()) == ""


@pytest.mark.parametrize("settings", [
    {"sync": Async()}, {"sync": LocalSteps(8)}, {"memory.parameters": "streamed"}, {"optimizer": Muon(lr=0.02)},
])  # fmt: skip
def test_a_job_that_works_in_one_mode_only_is_told_nothing(settings: dict[str, Any]) -> None:
    assert mode(**settings) == ""


def train_alone(**options: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    model = torch.nn.Linear(4, 1)
    with EmbeddedJob(**options) as job:
        for micro in job.train(model, data, replicas=1, batch=4, steps=2, optimizer=SGD(lr=0.1)):
            with micro:
                micro.backward(model(micro.batch[0]).sum())


def test_python_train_py_alone_on_processors_says_nothing_of_modes(capfd: pytest.CaptureFixture[str]) -> None:
    train_alone()
    assert "mode" not in "".join(capfd.readouterr())


def test_what_is_said_of_the_mode_is_an_event_of_the_run_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A job on a GPU, of which only the sentence is played."""
    monkeypatch.setattr(session, "mode_said", lambda *of: "with servers, the mode is X")
    train_alone(folder=str(tmp_path))
    assert (tmp_path / "events.jsonl").read_text().count("with servers, the mode is X") == 1
