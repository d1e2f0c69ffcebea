"""A job of sums: joined by a script that has a loop of its own, from its first sum to its end."""

from __future__ import annotations

from rallypoint.config import record_of, resolve
from rallypoint.core.optimizer import Sum as SumOfAll
from rallypoint.core.sums import EndedScripts
from rallypoint.errors import ConfigError, JobAborted, UsageError
from rallypoint.net.sampling.messages import ScriptAt
from rallypoint.worker.collective.pieces import layout_of
from rallypoint.worker.collective.reducer import Reducer
from rallypoint.worker.loop.session import Job

UNDER_WAY_BYTES = 16 << 20
SHARD_BYTES = 256 << 10  # a quarter of a job's own: the first and the last shard of each sum travel alone
MOST_ROUNDS = (1 << 31) - 1  # of a shard: sums that it takes part in


class Sums:
    """This process as worker `rank` of `world`, which are the workers of `job`.

    Attributes:
        rank, world: the worker's number, and how many there are.
        reducer: makes the sums.
        failed: the first error of a sum, which torch has raised in the script in words of its own.

    Raises ConfigError where the cluster's settings do not fit, JobAborted when the job ends before it begins.
    """

    def __init__(self, job: Job, *, rank: int, world: int, under_way_bytes: int = UNDER_WAY_BYTES) -> None:
        """Wait until all workers and servers are here. `under_way_bytes`: about so much of the sums is, at once."""
        self.rank, self.world, self._job = rank, world, job
        ended = EndedScripts()
        job.script_ended = ended.told
        settings = {
            "replicas": world, "steps": MOST_ROUNDS, "optimizer": SumOfAll(), "nonfinite": "continue", "overlap": False,
            "presum_bytes": 0, "batch": 1, "item": "scripts", "shard_bytes": SHARD_BYTES,
        }  # fmt: skip
        config = resolve(settings, job.welcome.overrides)
        record = record_of(config, layout_of(under_way_bytes, config.shard_bytes))
        self._exchange = job.open_exchange(record, config, early=False)
        if (count := len(self._exchange.view.workers)) != world:
            raise ConfigError(f"the cluster has {count} workers, and the script's world is {world}: start as many")
        self.reducer = Reducer(self._exchange, rank, ended, self._say if rank == 0 else None)
        job.script_ended = self.reducer.other_ended
        self._over = False
        self.failed: BaseException | None = None

    def told(self, error: BaseException) -> BaseException:
        """Return what has failed, for an error that the script has got.

        torch raises a sum's error as ``RuntimeError: Unable to cast <the error's sentence> to Tensor``.
        """
        return self.failed if self.failed is not None and str(self.failed) in str(error) else error

    def finish(self) -> None:
        """End the job when all workers call this. Raises JobAborted, and fails the job, when one of them is gone."""
        if self._over:
            return
        self._say(self.reducer.asked, self.reducer.nbytes, ended=True)
        try:
            version = self.reducer.finish()
        except BaseException as error:
            self.fail(error)  # nobody asks this worker for anything more, so nobody else may notice
            raise
        self._over = True
        exchange = self._exchange
        loop, generation = exchange.own_loop, exchange.view.generation
        self._job.stopping.wish("the scripts have ended")
        self._job.stopping.say(version, generation)
        self._job.done(generation, version)
        with loop.locked.changed:
            loop.locked.wait(lambda: loop.finished, lambda: "the other workers to end")
        self.close()

    def _say(self, sums: int, nbytes: int, *, ended: bool = False) -> None:
        self._job.say_script(ScriptAt(self.rank, sums, nbytes, ended))

    def fail(self, error: BaseException) -> None:
        """This worker's script has failed: the job ends for all, with this reason."""
        if not self._over:
            self._over = True
            told = UsageError(str(error)) if isinstance(error, JobAborted) else error  # nobody else has told it
            self._job.__exit__(type(told), told, None)
            self.reducer.close()

    def close(self) -> None:
        """Leave the job: end every thread and link."""
        self._over = True
        self.reducer.close()
        self._job.close()

