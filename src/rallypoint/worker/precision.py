"""The losses of one replica, read late: the main thread never waits for a device because of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from rallypoint.config import JobConfig
from rallypoint.errors import NonFiniteLoss
from rallypoint.worker.sources.hooks import Staging
from rallypoint.worker.tensors import ModelTensors

# Autocast around the script's code: forward passes and evaluations in bf16 or fp16, backward passes outside of it.
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Autocast:
    """`torch.autocast` on the model's device, as `precision` says; with "fp32" it does nothing.

    Main thread only, as autocast belongs to a thread. `enter` and `leave` are for ``with micro:``, which has no body to
    put into a context manager.
    """

    def __init__(self, config: JobConfig, device: torch.device) -> None:
        self._type, self._device = _TYPES.get(config.precision), device.type
        self._entered: Any = None

    def enter(self) -> None:
        if self._type is not None:
            self._entered = torch.autocast(self._device, dtype=self._type)
            self._entered.__enter__()

    def leave(self) -> None:
        """End what `enter` has begun, if it has begun anything. Drops the weights that autocast has cast."""
        if (entered := self._entered) is not None:
            self._entered = None
            entered.__exit__(None, None, None)

    @contextmanager
    def on(self) -> Iterator[None]:
        """The body runs with autocast."""
        with nullcontext() if self._type is None else torch.autocast(self._device, dtype=self._type):
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """The body runs without autocast, as torch recommends for backward passes: they use the forward's types."""
        with nullcontext() if self._type is None else torch.autocast(self._device, enabled=False):
            yield


# ---- Parameters that a worker holds in bf16, while the servers keep them in fp32 ----


class HeldParameters:
    """With ``hold="bf16"``, fp32 parameters of two or more dimensions are bf16 from the first version to the last.

    The model keeps its parameters' objects: only their memory changes. The first weights are uploaded as the script has
    made them, and the last version is installed in fp32. `on_cast` is called after each change. Main thread only.
    """

    def __init__(self, config: JobConfig, tensors: ModelTensors, on_cast: Callable[[], None]) -> None:
        held = config.memory.hold == "bf16"
        self._parameters = [
            placed.tensor for placed in tensors.parameters
            if held and placed.tensor.dim() > 1 and placed.tensor.dtype == torch.float32
        ]  # fmt: skip
        self._on_cast = on_cast
        self._narrow = False

    def before_install(self, *, last: bool) -> None:
        """A version is about to be installed; `last`: it is the job's last."""
        if self._narrow is not last or not self._parameters:
            return
        self._narrow = not last
        for parameter in self._parameters:
            parameter.data = parameter.data.to(torch.bfloat16 if self._narrow else torch.float32)
        self._on_cast()


class Losses:
    """The losses of a replica's micro-batches in one round, in order. Main thread only, but for `finite`.

    A loss is copied to the host as gradients are (`Staging`), before the backward pass begins. So it is read after its
    own copy and before anything of its gradient is sent: ``staging.then(...)`` after `add` comes later, too. `examine`
    is called with (step, loss) at that moment, on the staging's thread. If it raises an error, nothing that was staged
    later leaves, and the main thread gets the error.
    """

    def __init__(self, staging: Staging, examine: Callable[[int, float], None]) -> None:
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
