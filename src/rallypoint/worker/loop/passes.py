"""The passes of the replica that is being computed: forward inside of ``with micro:``, and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rallypoint.data.randomness import seed_everything
from rallypoint.errors import UsageError
from rallypoint.parallel.holdings import whole_of
from rallypoint.worker.activations import Activations
from rallypoint.worker.carried import Carried, Carry
from rallypoint.worker.habits import Habits, WrappedHabits, by_the_job
from rallypoint.worker.loop.early import EarlyForward
from rallypoint.worker.loop.micro import Micro
from rallypoint.worker.loop.parts import Parts
from rallypoint.worker.precision import Autocast, Losses, losses_of
from rallypoint.worker.ranks.figures import Logged, mean_of


class Passes:
    """What the micro-batches of a `Run` call. Main thread only.

    Attributes:
        losses, weights: of the replica's micro-batches and steps so far.
        logged: the figures that the script has logged of the replica.
        autocast: as `precision` says.
        told: the script has told the loss. (A loop of its own need not.)
    """

    def __init__(self, parts: Parts, early: EarlyForward, installed_early: Callable[[int], None]) -> None:
        """`installed_early` is called with the step whose forward pass has installed its version."""
        self._parts, self._config, self._early = parts, parts.config, early
        self._exchange, self._installed_early = parts.exchange, installed_early
        self.autocast = Autocast(parts.config, parts.tensors.device)
        self._activations = Activations(parts.model, parts.config)
        self._streamed, self._carried = parts.streamed, parts.tensors.carried
        self._own = parts.config.order == "own"
        tables = [one.weight for same in parts.tensors.tables for one in same]
        known = [*(placed.tensor for placed in parts.tensors.parameters), *tables]
        self._habits = WrappedHabits(known) if self._own else Habits(known)
        self._new_losses = losses_of(parts.staging, parts.config, parts.say)
        self.begin(0)

    def begin(self, replica: int) -> None:
        """A replica begins its round."""
        self.logged, self.told = Logged(), True
        self.resume(self._new_losses(replica), [])

    def resume(self, losses: Losses, weights: list[float]) -> None:
        """A replica goes on with its round."""
        self.losses, self.weights = losses, weights

    def remove(self) -> None:
        """The run is over: the model computes as before."""
        self._habits.leave()
        self._activations.remove()

    def log_micro(self, figures: Mapping[str, float | torch.Tensor]) -> None:
        """Add figures of one micro-batch (called by Micro)."""
        self.logged.add(figures)

    def check(self) -> None:
        """Raise Rewound if what is being computed is stale. Raise the error of whatever has failed."""
        self._exchange.check()

    def watch(self, micro: Micro) -> None:
        """A loop of the script's own begins: watch its calls until the job is over."""
        self._habits.enter(micro)

    def enter_micro(self, micro: Micro) -> None:
        """Begin ``with micro:`` (called by Micro).

        It makes no check: `__exit__` could not swallow an error of `__enter__`.
        """
        self._early.inside = self._exchange.rows.in_micro = True
        if not self._own:  # else the script's optimizer is what steps, and its calls are right
            if self._parts.alone:  # else a pipeline's schedule back-propagates by itself
                self._habits.enter(micro)
            seed_everything(self._parts.batches.compute_seed(micro.step, micro.replica, micro.index))
        self.autocast.enter()
        if self._streamed is not None:
            self._streamed.begin()

    def exit_micro(self) -> None:
        """End ``with micro:`` (called by Micro)."""
        if self._streamed is not None:
            self._streamed.leave()
        if self._carried is not None:
            self._carried.keep()
        self.autocast.leave()
        self._habits.exit()
        self._early.inside = self._exchange.rows.in_micro = False

    def backward_at(self) -> str:
        """Where the script has called backward() itself in this micro-batch (called by Micro)."""
        return self._habits.backward_at

    def carried_micro(self, micro: Micro) -> Carry:
        """What the micro-batch's replica carries (called by Micro)."""
        return self._carrying(micro).of(micro.replica)

    def carry_micro(self, micro: Micro, state: Carry) -> None:
        """Set what the micro-batch's replica carries (called by Micro)."""
        self._carrying(micro).give(micro.replica, state)

    def _carrying(self, micro: Micro) -> Carried:
        if self._carried is None:
            raise UsageError(
                f"step {micro.step}, replica {micro.replica}: micro.carry, but replicas of this job carry nothing: "
                "give job.train(carry=...) the state that each of them begins with"
            )
        return self._carried

    def backward_micro(
        self, micro: Micro, loss: torch.Tensor, weight: float, *, last: bool = True, retain_graph: bool = False
    ) -> None:
        """Back-propagate one loss of a micro-batch (called by Micro). The gradients of those before it are kept."""
        if not last or micro.losses is not None:
            self._check_several(micro)
        if self._early.finish(loss):
            self._installed_early(micro.step)
        if micro.index == 0 and micro.losses is None:
            self._check_no_gradient(micro)
        micro.losses = loss.detach() if micro.losses is None else micro.losses + loss.detach()
        if last:
            self._count(micro, micro.losses, weight)
            weight = mean_of(self.weights)
        ends = last and micro.index == self._config.accumulate - 1 and self.ends_round(micro.step)
        self._parts.source.begin_backward(weight, finite=self.losses.finite, last=ends)
        with self._parts.tracer.span("backward", step=micro.step, replica=micro.replica), self.autocast.off():
            loss = loss / self._config.accumulate if self._config.accumulate > 1 else loss
            scale = self._parts.tensors.loss_scale
            scaled = loss if scale is None else loss * scale[0]
            with by_the_job():
                scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        self._parts.source.end_backward()

    def _check_several(self, micro: Micro) -> None:
        where = f"step {micro.step}, replica {micro.replica}"
        if self._streamed is not None:
            raise UsageError(
                f'{where}: micro.backward(more=True) with parameters="streamed" is not supported: gradients leave as '
                "they are made; add the losses"
            )
        if not self._parts.alone:
            raise UsageError(f"{where}: micro.backward(more=True) is for workers of one process: add the losses")

    def computed_micro(self, micro: Micro, loss: torch.Tensor | None, weight: float) -> None:
        """The script has back-propagated one micro-batch by itself (called by Micro)."""
        if self._own:
            self.told = loss is not None
            self._count(micro, loss, weight)
            self._parts.source.begin_backward(weight, finite=self.losses.finite, last=True)
            self._parts.source.end_backward()  # `end_replica` sends what is in .grad
            return
        if self._parts.alone:
            raise UsageError(
                "micro.computed is for a worker of several ranks (--ranks), whose script runs a pipeline schedule: "
                "here call micro.backward(loss)"
            )
        self._count(micro, loss, weight)

    def _count(self, micro: Micro, loss: torch.Tensor | None, weight: float) -> None:
        """Note a micro-batch's loss and weight. `loss` is None on a rank that has none."""
        if micro.index == 0:
            self.weights.append(weight)
        elif weight != self.weights[-1]:
            known = self.weights[-1]
            raise UsageError(f"replica {micro.replica}: its micro-batches weigh {known} and {weight}: pass one")
        none = torch.zeros((), dtype=torch.float32, device=self._parts.tensors.device)  # it takes the way of a loss
        self.losses.add(none if loss is None else whole_of(loss), micro.step)
        self._parts.followers.micro(has_loss=loss is not None)

    def _check_no_gradient(self, micro: Micro) -> None:
        for placed in self._parts.tensors.parameters:
            if placed.tensor.grad is not None:
                at = f" ({self._habits.backward_at})" if self._habits.backward_at else ""
                raise UsageError(
                    f"parameter {placed.entry.spec.name} has a gradient before micro.backward at step {micro.step}: "
                    f"the script has called backward() itself{at}. Give micro.backward the sum of all losses, or each "
                    "of them, all but the last with more=True; torch.autograd.grad leaves no gradient behind"
                )

    def ends_round(self, step: int) -> bool:
        """True if a round ends with this step."""
        return step + 1 == self._config.steps or (step + 1) % self._config.steps_per_round == 0
