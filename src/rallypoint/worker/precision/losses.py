"""The losses of one replica, read late: the main thread never waits for a device because of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from rallypoint.config import JobConfig
from rallypoint.errors import NonFiniteLoss
from rallypoint.worker.sources.staging import Staging

Examine = Callable[[int, float], None]


class Losses:
    """The losses of a replica's micro-batches in one round, in order. Main thread only, but for `finite`.

    A loss is copied to the host as gradients are (`Staging`), before the backward pass begins. So it is read after its
    own copy and before anything of its gradient is sent: ``staging.then(...)`` after `add` comes later, too. `examine`
    is called with (step, loss) at that moment, on the staging's thread. If it raises an error, nothing that was staged
    later leaves, and the main thread gets the error.
    """

    def __init__(self, staging: Staging, examine: Examine) -> None:
        self._staging, self._examine = staging, examine
        self._values: list[float] = []
        self._added, self._step = 0, 0

    def __len__(self) -> int:
        """How many were added, read or not."""
        return self._added

    def add(self, loss: torch.Tensor, step: int) -> None:
        """Add the loss (one element, on any device) of a micro-batch of `step`.

        Raises what `examine` raises, if the loss is on the host already.
        """
        self._added, self._step = self._added + 1, step
        slot = torch.empty((), dtype=torch.float64, device="cpu", pin_memory=loss.device.type == "cuda")
        self._staging.write(slot, loss.detach(), add=False)
        self._staging.then(partial(self._read, slot, step))

    def _read(self, slot: torch.Tensor, step: int) -> None:
        value = float(slot)
        self._values.append(value)
        self._examine(step, value)

    def examine(self, value: float) -> None:
        """Do with the last step's loss, as several ranks have it, what is done with one that was added."""
        self._examine(self._step, value)

    def finite(self) -> bool:
        """True if all losses that were read so far are finite."""
        return all(map(math.isfinite, self._values))

    def read(self) -> list[float]:
        """Wait until all are on the host, and return them: fewer if `examine` has raised an error."""
        self._staging.drain()
        return self._values


def losses_of(staging: Staging, config: JobConfig, say: Callable[[str], None]) -> Callable[[int], Losses]:
    """Return a function that makes new `Losses` for a replica's round.

    For a loss that is not finite they do what `nonfinite` says: "stop" raises NonFiniteLoss, "continue" tells the user
    through `say`.
    """

    def examine(replica: int, step: int, value: float) -> None:
        if math.isfinite(value):
            return
        what = f"the loss of replica {replica} at step {step} is {value}"
        if config.nonfinite == "stop":
            unit = "step" if config.steps_per_round == 1 else "round"
            raise NonFiniteLoss(
                f"{what}: nothing of that {unit} was applied; lower the learning rate, clip, or set nonfinite to "
                "'skip' or 'continue'"
            )
        if config.nonfinite == "continue":
            say(f"{what}; continuing as told")

    return lambda replica: Losses(staging, partial(examine, replica))
