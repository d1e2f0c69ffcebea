"""Sums of a script's own, in one process: the tree's bytes, through lost servers; a sentence when a worker is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch

from rallypoint.bridges.joining import SumPart, sum_of
from rallypoint.config import resolve, with_own_optimizer
from rallypoint.coordinator.service import JoinInfo
from rallypoint.errors import ConfigError, JobAborted
from rallypoint.testing.reference import tree_sum
from rallypoint.worker.collective import CLOCK, Cutter, Sums, layout_of
from rallypoint.worker.loop.session import Job
from support.beside import until
from support.gathering import PATIENCE_S, Roles

SMALL = 1 << 20  # bytes under way: two large shards
LENGTHS = (1, 16, 63, 64, 65, 1000, 1024, 4097, 70_000, (1 << 18) + 1, 1_300_000)


class Cluster(Roles):
    """A coordinator and servers on threads; `run` adds the workers."""

    def __init__(self, world: int, servers: int = 2, *, overrides: dict[str, Any] | None = None, **terms: Any) -> None:
        workers = {"workers_start": world, "workers_max": world}
        super().__init__(JoinInfo(overrides or {}), servers=servers, **workers, **terms)
        self.add_servers(servers)
        self.world, self.jobs, self.threads = world, list[Job](), list[threading.Thread]()

    def run(self, script: Callable[[Sums], Any]) -> list[Any]:
        """Run this on every worker, on a thread of its own; return what each returned, or the error that ended it."""
        results: list[Any] = [None] * self.world

        def work(rank: int) -> None:
            job = self.member(f"worker{rank}")
            self.jobs.append(job)
            try:
                made = Sums(job, rank=rank, world=self.world, under_way_bytes=SMALL)
                try:
                    results[rank] = script(made)
                    made.finish()
                finally:
                    made.close()
            except BaseException as error:
                results[rank] = error
            finally:
                job.close()

        self.threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.world)]
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        return results

    def close(self) -> None:
        self.coordinator.abort("the test is over")
        for thread in self.threads:
            thread.join(PATIENCE_S)
        super().close()


def cluster(world: int, servers: int = 2, **given: Any) -> closing[Cluster]:
    return closing(Cluster(world, servers, **given))


def given(rank: int, index: int, words: int) -> torch.Tensor:
    """What a rank adds to a sum: values of very different sizes, so that another order of additions shows."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    values = torch.randn(words, generator=generator)
    return values * torch.randint(0, 2, (words,), generator=generator).mul(12).sub(6).exp2()


def expected(world: int, index: int, words: int) -> torch.Tensor:
    return tree_sum([given(rank, index, words) for rank in range(world)])


def all_right(made: Sums, lengths: tuple[int, ...], found: list[torch.Tensor]) -> bool:
    right = [expected(made.world, index, words) for index, words in enumerate(lengths)]
    return all(torch.equal(one, other) for one, other in zip(right, found, strict=True))


def ask_for_all(made: Sums, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    """Ask for all sums at once, in place; wait for each."""
    values = [given(made.rank, index, words) for index, words in enumerate(lengths)]
    for asked in [made.reducer.sum(one) for one in values]:
        asked.wait()
    return values


@pytest.mark.some("3")
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_sums_of_any_length_have_the_bytes_of_the_tree_over_ranks(world: int) -> None:
    def script(made: Sums) -> list[bool]:
        return [all_right(made, LENGTHS, ask_for_all(made)) for _ in range(2)]

    with cluster(world) as here:
        assert here.run(script) == [[True, True]] * world


@pytest.mark.some("0")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_that_is_lost_costs_no_byte_with_a_backup(victim: int) -> None:
    lost = threading.Event()

    def script(made: Sums) -> list[bool]:
        found = [all_right(made, LENGTHS, ask_for_all(made))]
        values = [given(made.rank, index, words) for index, words in enumerate(LENGTHS)]
        under_way = [made.reducer.sum(one) for one in values[:5]]
        if made.rank == 0:  # the others' contributions to the rest are at the server when it goes
            here.safely_lose(victim)
            lost.set()
        under_way += [made.reducer.sum(one) for one in values[5:]]
        for asked in under_way:
            asked.wait()
        return [*found, all_right(made, LENGTHS, values), all_right(made, LENGTHS, ask_for_all(made))]

    with cluster(3, replication=2) as here:
        assert here.run(script) == [[True] * 3] * 3
        assert lost.is_set()


def test_without_a_backup_the_loss_of_a_server_is_said_and_ends_the_scripts() -> None:
    def script(made: Sums) -> None:
        ask_for_all(made, (100,))
        if made.rank == 0:
            here.servers[0].close()
        for _ in range(100):
            ask_for_all(made, (100, 2000))

    with cluster(2) as here:
        results = here.run(script)
    assert all(isinstance(result, JobAborted) for result in results), results


def test_when_a_worker_is_gone_every_other_one_s_sum_says_so() -> None:
    def script(made: Sums) -> None:
        ask_for_all(made, (100,))
        if made.rank == 1:
            made.close()  # its connections end, as if the process were killed
        else:
            ask_for_all(made, (100,))

    with cluster(3) as here:
        results = here.run(script)
    for rank in (0, 2):
        assert isinstance(results[rank], JobAborted)
        assert "worker1 is gone, and this script's world is fixed: start all of it again" in str(results[rank])


def test_a_worker_that_is_gone_while_another_has_ended_already_fails_the_job() -> None:
    """The worker that has ended tells the coordinator: else the lost one's place would be waited for without an end."""

    ended: list[Sums] = []

    def script(made: Sums) -> None:
        ask_for_all(made, (100,))
        if made.rank == 0:
            ended.append(made)
        else:
            until(lambda: bool(ended and ended[0].reducer._queues.get(CLOCK)), "worker0 has not ended")
            made.close()

    with cluster(2) as here:
        results = here.run(script)
        until(lambda: "worker1 is gone" in (here.coordinator._failure or ""), "the job goes on")
    assert isinstance(results[0], JobAborted)


def test_what_follows_a_sum_may_wait_for_another_one() -> None:
    """As torch's PowerSGD hook does it: the sums go on beside what was to be called when one is there."""

    def script(made: Sums) -> list[float]:
        first, second = torch.ones(100), torch.ones(100)

        def next_one(_: object) -> torch.Tensor:
            return sum_of(made, [SumPart(second, second)], second, second.device).wait() * 3

        return sum_of(made, [SumPart(first, first)], first, first.device).then(next_one).wait()[:2].tolist()

    with cluster(2) as here:
        assert here.run(script) == [[6.0, 6.0]] * 2


def test_only_the_wanted_part_of_a_sum_is_written_and_what_was_given_stays() -> None:
    words, own = 300_000, range(100_000, 280_000)

    def script(made: Sums) -> bool:
        values, into = given(made.rank, 0, words), torch.zeros(len(own))
        made.reducer.sum(values, into, own).wait()
        part = expected(made.world, 0, words)[own.start : own.stop]
        return torch.equal(into, part) and torch.equal(values, given(made.rank, 0, words))

    with cluster(2) as here:
        assert here.run(script) == [True, True]


def test_infinities_and_nans_are_summed_as_numbers_are() -> None:
    def script(made: Sums) -> list[str]:
        values = torch.tensor([float("inf"), float("nan"), 1.0, -float("inf") if made.rank else float("inf")])
        made.reducer.sum(values).wait()
        return [str(float(one)) for one in values]

    with cluster(2) as here:
        assert here.run(script) == [["inf", "nan", "2.0", "nan"]] * 2


def test_a_job_of_sums_takes_no_snapshots_where_the_cluster_would() -> None:
    with cluster(2, snapshots=True) as here:
        assert here.run(lambda made: all_right(made, (50,), ask_for_all(made, (50,)))) == [True, True]
        assert not here.coordinator._shell.machine.course.terms.snapshots


def test_settings_that_do_not_fit_sums_are_refused() -> None:
    with cluster(1, overrides={"clip": 1.0}) as here:
        (error,) = here.run(lambda made: None)
    assert isinstance(error, ConfigError)
    assert "clip_grad_norm_" in str(error)


def test_a_job_that_trains_a_model_is_not_given_sums() -> None:
    with pytest.raises(ConfigError, match="use another optimizer"):
        with_own_optimizer(resolve({"optimizer": {"type": "sum"}}), "")


def test_a_world_of_another_size_than_the_cluster_s_is_refused() -> None:
    with cluster(2) as here:
        job = Job(id="worker0", coordinator=here.coordinator.address, transport=here.transport)
        beside = Job(id="worker1", coordinator=here.coordinator.address, transport=here.transport)
        errors: list[BaseException] = []

        def join(one: Job) -> None:
            try:
                Sums(one, rank=0, world=3, under_way_bytes=SMALL)
            except ConfigError as error:
                errors.append(error)

        (thread := threading.Thread(target=join, args=(beside,))).start()
        join(job)
        thread.join(PATIENCE_S)
        for one in (job, beside):
            one.close()
    assert len(errors) == 2
    assert all("has 2 workers, and the script's world is 3: start as many" in str(error) for error in errors)


@pytest.mark.parametrize("shard_bytes", [1, 64 << 10, 384 << 10, 512 << 10, 1 << 20])
def test_every_worker_cuts_the_same_sums_in_the_same_way_and_wastes_little(shard_bytes: int) -> None:
    layout = layout_of(16 << 20, shard_bytes)
    one, other = Cutter(layout), Cutter(layout)
    for words in (*LENGTHS, 1, 17, 999_999, 5_000_000, 262_143, 300_000):
        pieces = one.cut(words)
        assert pieces == other.cut(words)
        assert [piece.start for piece in pieces] == [0, *[piece.stop for piece in pieces[:-1]]]
        assert pieces[-1].stop == words
        sizes = [layout.shards[piece.shard].words for piece in pieces]
        assert all(size >= piece.stop - piece.start for size, piece in zip(sizes, pieces, strict=True))
        assert sum(sizes) <= words * 9 // 8 + 1024
        assert CLOCK not in [piece.shard for piece in pieces]


def test_a_script_that_asks_for_more_sums_than_one_that_has_ended_is_told_which_rank_has_ended() -> None:
    def script(made: Sums) -> None:
        for _ in range(3 if made.rank == 1 else 4):
            try:
                ask_for_all(made, (100,))
            except JobAborted as error:
                made.fail(error)  # as the end of a script does
                raise

    with cluster(3) as here:
        results = here.run(script)
    for rank in (0, 2):
        assert isinstance(results[rank], JobAborted)
        assert "rank 1 (worker1) has ended its script after 3 sums, and sum 4 needs all ranks" in str(results[rank])
    assert isinstance(results[1], JobAborted), "it does not wait for the others for ever"


def test_torchs_words_around_a_sums_error_are_left_away() -> None:
    with cluster(1) as here:

        def script(made: Sums) -> None:
            assert made.told(ValueError("mine")).args == ("mine",)
            made.failed = JobAborted("rank 1 has ended")
            assert made.told(RuntimeError("Unable to cast rank 1 has ended to Tensor")) is made.failed
            assert made.told(ValueError("mine")).args == ("mine",)

        assert here.run(script) == [None]


def test_scripts_that_end_one_after_the_other_with_as_many_sums_end_well() -> None:
    ended: list[Sums] = []

    def script(made: Sums) -> int:
        ask_for_all(made, (100, 2000))
        if made.rank == 0:
            ended.append(made)
        else:
            until(lambda: bool(ended and ended[0].reducer._queues.get(CLOCK)), "worker0 has not ended")
        return made.reducer.asked

    with cluster(2) as here:
        assert here.run(script) == [2, 2]
