"""A roll-back or a failure during an evaluation or an install; handlers of the script that catch too much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_rewind import undisturbed

import rallypoint as rp
from rallypoint.core.protocol import Evaluated
from rallypoint.errors import JobAborted, NonFiniteLoss, UsageError
from rallypoint.worker.tensors import weights_hash
from support.rewinds import AT, SETTINGS, Cluster, Once, Trap, build, cluster, loss_of
from support.training import finish

__all__ = ["cluster", "undisturbed"]  # the fixtures


@pytest.mark.parametrize("at", [2, 6], ids=["in the middle", "after the last step"])
def test_a_roll_back_during_an_evaluation_changes_neither_bytes_nor_results(
    cluster: Cluster, undisturbed: str, at: int
) -> None:
    """The worker is not done in the new generation with what it held in the old one."""
    model, data = build()
    disturb = Once((at, 0, 0), cluster.lose_the_server)
    results: dict[int, set[float]] = {}
    with cluster.job as job:
        run = job.train(model, data, **SETTINGS)
        sent: list[Evaluated] = []
        send = run._parts.reports._send

        def watched(message: Any) -> None:
            if isinstance(message, Evaluated):
                sent.append(message)
            send(message)

        run._parts.reports._send = watched

        @run.every(2)
        def evaluate(step: int) -> dict[str, float]:
            before = loss_of(model, data[:]).item()
            disturb.where = (step, 0, 0)
            disturb()
            assert loss_of(model, data[:]).item() == before, "nothing is installed meanwhile"
            results.setdefault(step, set()).add(before)
            return {"loss": before}

        finish(run, model, loss_of)
        last = run._exchange.view.generation
    assert disturb.done
    assert weights_hash(model) == undisturbed
    assert results.keys() == {2, 4, 6}
    assert all(len(values) == 1 for values in results.values()), "a version evaluated again gives the same"
    ours = [message for message in sent if message.version == at]
    assert ours[0].generation != last, "its result belongs to the generation in which that version was installed"


def test_a_roll_back_right_before_an_evaluation_takes_nothing_from_it(cluster: Cluster, undisturbed: str) -> None:
    """The version is installed; the roll-back comes before the run asks which evaluations are due with it."""
    model, data = build()
    seen: list[int] = []
    with cluster.job as job:
        run = job.train(model, data, **SETTINGS)
        run.every(2)(lambda step: seen.append(step))
        due, disturb = run._evaluations.due_at, Once((4, 0, 0), cluster.lose_the_server)

        def disturbed(step: int, before: int) -> Any:
            disturb.where = (step, 0, 0)
            disturb()
            return due(step, before)

        run._evaluations.due_at = disturbed  # type: ignore[method-assign]
        finish(run, model, loss_of)
    assert disturb.done
    assert weights_hash(model) == undisturbed
    assert set(seen) == {2, 4, 6}


def with_a_table() -> tuple[torch.nn.Sequential, torch.utils.data.TensorDataset]:
    torch.manual_seed(3)
    table = torch.nn.Embedding(30, 4, sparse=True, device="meta")
    model = torch.nn.Sequential(table, torch.nn.Flatten(), torch.nn.Linear(8, 3))
    return model, torch.utils.data.TensorDataset(torch.randint(0, 30, (40, 2)), torch.randn(40, 3))


def train_with_a_table(cluster: Cluster, place: str, disturb: Once) -> tuple[dict[int, float], str]:
    """The results of the evaluations, and the last weights."""
    model, data = with_a_table()
    results: dict[int, float] = {}
    with cluster.job as job:
        run = job.train(model, data, **{**SETTINGS, "optimizer": rp.SGD(lr=1e-2), "clip": None})

        @run.every(2)
        def evaluate(step: int) -> dict[str, float]:
            if place == "evaluation":
                loss_of(model, data[:])
                disturb.where = (step, 0, 0)
                disturb()
            results[step] = loss_of(model, data[:]).item()
            return {"loss": results[step]}

        for micro in run:
            if place == "loop":
                disturb.where = (micro.step, micro.replica, micro.index)
                disturb()
                loss_of(model, data[:])
            with micro:
                micro.backward(loss_of(model, micro.batch))
    return results, weights_hash(model)


@pytest.mark.parametrize("place", ["evaluation", "loop"])
def test_a_roll_back_while_the_script_looks_up_rows_outside_of_its_micro_batches_changes_no_byte(
    cluster: Cluster, tmp_path: Path, place: str
) -> None:
    other = Cluster(tmp_path / "undisturbed")
    try:
        undisturbed = train_with_a_table(other, "", Once(AT, lambda: None))
    finally:
        other.close()
    disturb = Once((2, 0, 0), cluster.lose_the_server)
    assert train_with_a_table(cluster, place, disturb) == undisturbed
    assert disturb.done


def test_rows_that_only_this_worker_could_bring_back_end_the_job_with_a_sentence() -> None:
    """All servers are lost, there is no snapshot, and the thread that has the first weights waits for rows."""
    cluster = Cluster(None)
    try:
        disturb = Once((0, 0, 0), cluster.lose_the_server)
        with pytest.raises(JobAborted, match="parameters were lost with their servers and there is no snapshot"):
            train_with_a_table(cluster, "loop", disturb)
        assert disturb.done
    finally:
        cluster.close()


@pytest.mark.parametrize("version", [0, 4, 6], ids=["first", "middle", "last"])  # none is installed by a forward pass
def test_a_roll_back_during_an_install_changes_no_byte(cluster: Cluster, undisturbed: str, version: int) -> None:
    model, data = build()
    disturb = Once((version, 0, 0), cluster.lose_the_server)
    with cluster.job as job:
        run = job.train(model, data, **SETTINGS)
        read = run._parts.tensors.read_from

        def disturbed(*vectors: torch.Tensor) -> None:
            disturb.where = (run._exchange.step + 1, 0, 0)
            disturb()
            read(*vectors)

        run._parts.tensors.read_from = disturbed  # type: ignore[method-assign]
        finish(run, model, loss_of)
    assert disturb.done
    assert weights_hash(model) == undisturbed


def test_a_job_that_fails_during_an_evaluation_ends_after_it(cluster: Cluster) -> None:
    """The model's hooks are off then, so that it can be saved: nothing unwinds an evaluation."""
    model, data = build()
    evaluated = []

    def trained() -> None:
        with cluster.job as job:
            run = job.train(model, data, **SETTINGS)

            @run.every(2)
            def evaluate(step: int) -> None:
                cluster.abort()
                loss_of(model, data[:])
                evaluated.append(step)

            finish(run, model, loss_of)

    with pytest.raises(JobAborted, match="enough"):
        trained()
    assert evaluated == [2]


# ---- handlers that catch too much ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_no_handler_of_the_scripts_stops_a_roll_back_or_takes_it_for_a_fault(
    cluster: Cluster, undisturbed: str, place: str
) -> None:
    model, data = build()
    disturb = Once(AT, cluster.lose_the_server)
    setattr(model[2], f"in_{place}", disturb)
    abandoned, caught = [], []
    with cluster.job as job:
        for micro in job.train(model, data, **SETTINGS):
            disturb.where = (micro.step, micro.replica, micro.index)
            with micro:
                try:
                    micro.backward(loss_of(model, micro.batch))
                except Exception as error:
                    caught.append(f"a fault: {error}")
                except BaseException as error:  # one that catches everything
                    caught.append(type(error).__name__)
            if micro.abandoned:
                abandoned.append(disturb.where)
    assert abandoned == [AT]
    assert caught == ["Rewound"]
    assert weights_hash(model) == undisturbed


def test_a_handler_of_errors_does_not_hide_that_the_job_has_failed(cluster: Cluster) -> None:
    model, data = build()
    trap, fail = model[2], Once(AT, cluster.abort)
    assert isinstance(trap, Trap)
    trap.in_forward = fail

    def trained() -> None:
        with cluster.job as job:
            for micro in job.train(model, data, **SETTINGS):
                fail.where = (micro.step, micro.replica, micro.index)
                with micro:
                    try:
                        loss = loss_of(model, micro.batch)
                    except Exception:  # out of memory, say
                        continue
                    micro.backward(loss)

    with pytest.raises(JobAborted, match="enough"):
        trained()


def test_a_handler_of_errors_does_not_hide_why_a_backward_has_failed(cluster: Cluster) -> None:
    model, data = build()

    def trained() -> None:
        with cluster.job as job:
            for micro in job.train(model, data, **SETTINGS):
                with micro:
                    try:
                        micro.backward(loss_of(model, micro.batch) * float("nan"))
                    except Exception:
                        continue

    with pytest.raises(NonFiniteLoss, match="the loss of replica 0 at step 0 is nan"):
        trained()


# ---- run.every inside run.every --------------------------------------------------------------------------------


def test_a_function_may_be_registered_twice_and_another_one_by_an_evaluation(cluster: Cluster) -> None:
    model, data = build()
    seen: list[tuple[str, int]] = []
    with cluster.job as job:
        run = job.train(model, data, **SETTINGS)

        @run.every(2)
        @run.every(3)
        def evaluate(step: int) -> None:
            if step == 2:
                run.every(2)(lambda step: seen.append(("inner", step)))
            seen.append(("outer", step))

        finish(run, model, loss_of)
    outer = [step for name, step in seen if name == "outer"]
    assert outer == [2, 3, 4, 6, 6]
    assert [step for name, step in seen if name == "inner"] == [4, 6]


def test_an_evaluation_that_trains_is_refused(cluster: Cluster) -> None:
    model, data = build()

    def trained() -> None:
        with cluster.job as job:
            run: rp.Run = job.train(model, data, **SETTINGS)
            run.every(2)(lambda step: next(iter(run)))  # type: ignore[arg-type, return-value]
            finish(run, model, loss_of)

    with pytest.raises(UsageError, match="a run is iterated once"):
        trained()
