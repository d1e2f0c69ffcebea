"""The coordinator's machine: gathering, preparing, running, over; and a sentence for whoever is turned away."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.config import AdamW, JobConfig
from rallypoint.core.cluster import (
    Abort,
    ClusterMachine,
    Done,
    Effect,
    Event,
    Failed,
    Finish,
    Joined,
    Left,
    Phase,
    Prepare,
    Prepared,
    Proposed,
    Refuse,
    Start,
)
from rallypoint.core.job import JobRecord, disagreement
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.view import Member

PURE = settings(derandomize=True, deadline=None, max_examples=50)


def _record(width: int = 4, frozen: dict[str, str] | None = None, **config: Any) -> JobRecord:
    specs = [TensorSpec("body.weight", (8, 8), "float32", 0), TensorSpec("head.weight", (width,), "float32", 0)]
    tree = msgspec.to_builtins(JobConfig(replicas=4, **config))
    return JobRecord(tree, build_layout(specs, 64), frozen or {})


def _joined(name: str) -> Joined:
    role = "server" if name.startswith("s") else "worker"
    return Joined(Member(name, f"host-of-{name}", f"{name}:1" if role == "server" else ""), role)


def _play(machine: ClusterMachine, *events: Event) -> list[Effect]:
    return [effect for event in events for effect in machine.handle(event)]


def _gathered() -> ClusterMachine:
    machine = ClusterMachine(2, 2)
    _play(machine, *(_joined(name) for name in ("s0", "s1", "w0", "w1")))
    return machine


def _preparing() -> ClusterMachine:
    machine = _gathered()
    _play(machine, Proposed("w0", _record()), Proposed("w1", _record()))
    return machine


def _running() -> ClusterMachine:
    machine = _preparing()
    _play(machine, Prepared("s0"), Prepared("s1"))
    return machine


@PURE
@given(st.permutations(["s0", "s1", "w0", "w1", "w2"]), st.data())
def test_whatever_order_members_come_in_the_job_is_prepared_started_and_finished_once(
    order: list[str], data: st.DataObject
) -> None:
    machine = ClusterMachine(3, 2)
    effects = []
    to_propose = []
    while order or to_propose:
        if to_propose and (not order or data.draw(st.booleans())):
            effects += machine.handle(Proposed(to_propose.pop(), _record()))
        else:
            name = order.pop()
            effects += machine.handle(_joined(name))
            to_propose += [name] if name.startswith("w") else []
    assert machine.phase is Phase.PREPARING
    (prepare,) = effects
    assert isinstance(prepare, Prepare)
    view = prepare.view
    assert view.deal == {"w0": (0, 3), "w1": (1,), "w2": (2,)}  # sorted: not by who came first
    assert [member.id for member in view.workers] == ["w0", "w1", "w2"]
    assert [member.address for member in view.servers] == ["s0:1", "s1:1"]
    assert view.lead == "w0"
    assert sorted(view.primary) == [shard.index for shard in prepare.record.layout.shards]
    first, second = data.draw(st.permutations(["s0", "s1"]))
    assert _play(machine, Prepared(first), Prepared(first)) == []
    assert _play(machine, Prepared(second)) == [Start(view)]
    assert machine.phase is Phase.RUNNING
    a, b, c = data.draw(st.permutations(["w0", "w1", "w2"]))
    assert _play(machine, Done(a), Done(b), Done(a)) == []
    assert _play(machine, Done(c)) == [Finish()]
    assert machine.phase is Phase.OVER


def test_it_says_what_it_waits_for_all_the_way() -> None:
    machine = ClusterMachine(3, 2)
    assert machine.waiting_for() == "2 more servers and 3 more workers"
    _play(machine, _joined("s0"), _joined("w0"), _joined("w1"))
    assert machine.waiting_for() == "1 more server and 1 more worker"
    _play(machine, _joined("s1"))
    assert machine.waiting_for() == "1 more worker"
    _play(machine, _joined("w2"), Proposed("w1", _record()))
    assert machine.waiting_for() == "the model of w0, w2"
    _play(machine, Proposed("w0", _record()), Proposed("w2", _record()))
    assert machine.waiting_for() == "room for the shards on s0, s1"
    _play(machine, Prepared("s1"))
    assert machine.waiting_for() == "room for the shards on s0"
    _play(machine, Prepared("s0"))
    assert machine.waiting_for() is None
    _play(machine, Done("w0"), Done("w1"), Done("w2"))
    assert machine.waiting_for() is None


def test_a_late_worker_or_server_is_refused_with_a_sentence_and_the_job_goes_on() -> None:
    for machine in (_gathered(), _preparing(), _running()):
        phase = machine.phase
        assert machine.handle(_joined("w2")) == [Refuse("w2", "the job has all of its 2 workers already")]
        assert machine.handle(_joined("s2")) == [Refuse("s2", "the job has all of its 2 servers already")]
        assert machine.handle(Left("w2", "it was refused")) == []
        assert machine.handle(Proposed("w2", _record(width=9))) == []
        assert machine.phase is phase


def test_whoever_comes_after_the_end_is_refused() -> None:
    machine = _running()
    _play(machine, Done("w0"), Done("w1"))
    assert machine.handle(_joined("w2")) == [Refuse("w2", "the job is over")]
    assert _play(machine, Left("w0", "it closed its connection"), Failed("w1", "late"), Done("w0")) == []


def test_a_different_model_aborts_the_job_naming_worker_host_and_parameter() -> None:
    machine = _gathered()
    _play(machine, Proposed("w0", _record()))
    (abort,) = machine.handle(Proposed("w1", _record(width=5)))
    assert abort == Abort(
        "w1 on host-of-w1 brought a different model: parameter head.weight [5] float32 (group 0) here, "
        "parameter head.weight [4] float32 (group 0) there (w1 is here, w0 is there)"
    )
    assert machine.phase is Phase.OVER


def test_different_settings_abort_the_job_naming_the_key_and_both_values() -> None:
    machine = _gathered()
    _play(machine, Proposed("w0", _record(optimizer=AdamW(lr=0.1))))
    (abort,) = machine.handle(Proposed("w1", _record(optimizer=AdamW(lr=0.2))))
    assert isinstance(abort, Abort)
    assert "different settings: optimizer.lr is 0.2 here, 0.1 there" in abort.reason


def test_different_frozen_parameters_abort_the_job_naming_the_first() -> None:
    machine = _gathered()
    _play(machine, Proposed("w0", _record(frozen={"a": "1", "b": "2", "c": "3"})))
    (abort,) = machine.handle(Proposed("w1", _record(frozen={"a": "1", "b": "9"})))
    assert isinstance(abort, Abort)
    assert "other values in the frozen parameter b:" in abort.reason


@PURE
@given(st.sampled_from(["s0", "s1", "w0", "w1"]), st.booleans())
def test_a_member_that_leaves_while_the_job_gathers_may_be_replaced(name: str, proposed: bool) -> None:
    machine = _gathered()
    if proposed:
        _play(machine, Proposed("w0", _record()))
    assert machine.handle(Left(name, "it closed its connection")) == []
    assert machine.phase is Phase.GATHERING
    assert machine.waiting_for() == f"1 more {'server' if name.startswith('s') else 'worker'}"
    newcomer = f"{name}-again"
    assert machine.handle(_joined(newcomer)) == []
    workers = sorted(machine._workers)
    (prepare,) = _play(machine, *(Proposed(worker, _record()) for worker in workers))
    assert isinstance(prepare, Prepare)
    assert newcomer in {member.id for member in (*prepare.view.workers, *prepare.view.servers)}


def test_when_the_only_one_that_proposed_has_left_another_model_may_be_brought() -> None:
    machine = _gathered()
    _play(machine, Proposed("w0", _record(width=9)), Left("w0", "it closed its connection"), _joined("w2"))
    effects = _play(machine, Proposed("w1", _record()), Proposed("w2", _record()))
    assert [type(effect) for effect in effects] == [Prepare]


@pytest.mark.parametrize("name", ["s1", "w0"])
def test_a_member_that_leaves_a_job_under_way_ends_it_with_its_name_and_the_reason(name: str) -> None:
    for machine in (_preparing(), _running()):
        assert machine.handle(Left(name, "it closed its connection")) == [
            Abort(f"{name} is gone: it closed its connection")
        ]
        assert machine.phase is Phase.OVER


def test_a_member_that_gives_up_ends_the_job_with_its_words() -> None:
    assert _running().handle(Failed("w1", "the loss is nan")) == [Abort("w1: the loss is nan")]


@PURE
@given(st.permutations(["replicas", "seed", "clip"]), st.integers(1, 3))
def test_the_disagreement_names_the_first_setting_in_alphabetical_order(keys: list[str], count: int) -> None:
    other = _record()
    changed = dict.fromkeys(keys[:count], 77)
    found = disagreement(_record(), JobRecord({**other.config, **changed}, other.layout))
    assert found is not None
    assert found.startswith(f"different settings: {min(changed)} is 77 here, ")


def test_equal_records_agree_before_and_after_the_wire() -> None:
    record = _record(optimizer=AdamW(betas=(0.8, 0.9)))
    assert disagreement(record, _record(optimizer=AdamW(betas=(0.8, 0.9)))) is None
    sent = [msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=JobRecord) for _ in range(2)]
    assert disagreement(*sent) is None




def test_a_prepared_from_somebody_who_is_no_server_starts_nothing() -> None:
    assert _preparing().handle(Prepared("w0")) == []


def test_a_done_from_somebody_who_is_no_worker_finishes_nothing() -> None:
    assert _running().handle(Done("s0")) == []


def test_a_model_proposed_again_while_the_job_runs_changes_nothing() -> None:
    machine = _running()
    assert machine.handle(Proposed("w0", _record())) == []
    assert machine.phase is Phase.RUNNING


def test_a_refused_worker_that_gives_up_does_not_end_the_job() -> None:
    machine = _running()
    machine.handle(_joined("w2"))
    assert machine.handle(Failed("w2", "I was refused")) == []
