"""The run of a script whose loop is its own: it is driven by `step`, and its gradients are in ``.grad``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from rallypoint.core.placing.pinned import lost_place, lost_step
from rallypoint.core.view import View
from rallypoint.data.randomness import seed_everything, untouched
from rallypoint.errors import StartAgain, UsageError
from rallypoint.net.messages import GiveUp
from rallypoint.observe.lenient import say
from rallypoint.worker.loop.micro import Micro
from rallypoint.worker.loop.parts import Parts
from rallypoint.worker.loop.run import Run

Figures = Mapping[str, float | torch.Tensor]


class OneSample:
    """The data set of a job whose batches are the script's: nothing reads what it holds."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return 0


class OwnRun(Run):
    """A run whose micro-batches are the steps of the script's own loop. Main thread only.

    This process computes one replica, from `begin` to its end. When a server is lost it sends its gradients again. When
    the job goes back to a snapshot, or has gone on without this process, its loop is at the wrong step: StartAgain. So
    it ends too when it is told to leave: its replica needs another process.

    Attributes:
        position: the step that the loop is to compute next: updates that the model holds.
        replica: which replica this process computes.
        seeded: the global random generators are seeded for each step; else they are the loop's alone.
        over: the job has ended.
        replaced: this process is at the wrong step, and ends.
        released: the run has let go of its model.
    """

    own = True
    seeded = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.position, self.replica, self.over, self.replaced = -1, -1, False, False
        self.released = False
        self._micros: Iterator[Micro] = iter(())
        self._micro: Micro | None = None
        parts.exchange.viewed = self._viewed

    def begin(self) -> bool:
        """Wait until this process has a replica, and the model its version. Returns False if the job is over."""
        self._micros = iter(self)
        with self._generators():
            if not self._advance():
                return False
        assert self._micro is not None
        self.position, self.replica = self._micro.step, self._micro.replica
        self._viewed(self._exchange.view)
        self._passes.watch(self._micro)
        self._seed()
        return True

    def push(self, loss: torch.Tensor | None, figures: Figures) -> None:
        """Send the gradients that are in ``.grad`` (None: zeros), and wait for the next version.

        `loss` (one element) is shown and logged; None: it is not known. Afterwards ``.grad`` is None.

        Raises StartAgain when the loop is not where the job is. Raises UsageError after the last step.
        """
        if self.over or self._micro is None:
            raise UsageError(f"the job has ended with step {self.position}: let the loop end there (optimizer.over)")
        gradients = [placed.tensor.grad for placed in self._parts.tensors.parameters]
        buffers = [placed.tensor.clone() for placed in self._parts.tensors.buffers]
        while True:
            with self._generators():
                with self._micro as micro:
                    micro.log(**figures)
                    micro.computed(loss)
                if not self._advance():
                    self.position = self._exchange.step
                    return
            if why := lost_step(self.position, self.replica, self._micro.step, self._micro.replica):
                raise self._start_again(why)
            if self._micro.step > self.position:
                self.position = self._micro.step
                self._seed()
                return
            self._put_back(gradients, buffers)

    def leave(self) -> None:
        """End the job with the version that the model holds: the loop has ended, on all processes at this step."""
        if not self.over and self._micro is not None:
            self._micros.close()  # type: ignore[attr-defined]
            self.finish()
            self.over = True

    def give_up(self, reason: str) -> None:
        """The script ends before the job: nobody else can compute its replica."""
        end = self._exchange.end
        self._parts.coordinator.send(GiveUp(reason, max(0, self.position), end.generation, torn=end.torn))
        end.wait_until_applied()

    def trains(self, model: torch.nn.Module) -> bool:
        """True if this run is not over, and a parameter of `model` is one of its own."""
        own = {id(placed.tensor) for placed in self._parts.tensors.parameters}
        return not self.released and any(id(parameter) in own for parameter in model.parameters())

    def release_model(self) -> None:
        """Take the hooks off the model."""
        self.released = True
        super().release_model()

    def _advance(self) -> bool:
        """Go on to the next micro-batch; False if the job is over."""
        self._micro = next(self._micros, None)
        self.over = self._micro is None
        return not self.over

    def _generators(self) -> AbstractContextManager[None]:
        """What a micro-batch does to the global generators, which it seeds, is none of the loop's without `seeded`."""
        return nullcontext() if self.seeded else untouched()

    def _seed(self) -> None:
        if self.seeded:
            seed_everything(self._parts.batches.compute_seed(self.position, self.replica, 0))

    @torch.no_grad()
    def _put_back(self, gradients: list[torch.Tensor | None], buffers: list[torch.Tensor]) -> None:
        for placed, gradient in zip(self._parts.tensors.parameters, gradients, strict=True):
            placed.tensor.grad = gradient
        for placed, value in zip(self._parts.tensors.buffers, buffers, strict=True):
            placed.tensor.copy_(value)

    def _viewed(self, view: View) -> None:
        if self.replica >= 0 and (why := lost_place(view, self._exchange.me, self.replica)):
            self._exchange.fail(self._start_again(why))

    def _end(self) -> None:
        if self._exchange.gone and not self.replaced:
            raise self._start_again("it was told to leave")
        super()._end()

    def _start_again(self, why: str) -> StartAgain:
        self.replaced = True
        say(StartAgain.LINE)
        sentence = f"{self._exchange.me} ends, to be started again: {why}, and its loop has batches of its own"
        self.say(sentence)
        return StartAgain(sentence)
