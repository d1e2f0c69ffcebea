"""Tensors of a script's own as vectors that servers can add up: fp32 on the CPU; and back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from rallypoint.worker.collective import Sums

SUMMED = (torch.float32, torch.bfloat16, torch.float16)
T = TypeVar("T")


class SumPart:
    """One tensor of a sum: `given` is what this rank adds, `into` gets the words `keeps` of the sum times `factor`.

    `before` multiplies what this rank adds. Numbers of 16 bits are added up in fp32, and the result is rounded once.
    """

    def __init__(
        self, given: torch.Tensor, into: torch.Tensor, *, keeps: range | None = None, factor: float = 1.0,
        before: float | torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._into, self._factor = into, factor
        words = given.detach().reshape(-1).to("cpu", torch.float32)
        self._words = words if before is None else words * before
        self._keeps = range(words.numel()) if keeps is None else keeps
        here = into.is_contiguous() and into.dtype is torch.float32 and into.device.type == "cpu"
        self._target = (
            into.detach().view(-1) if here else torch.empty(len(self._keeps), dtype=torch.float32, device="cpu")
        )
        self._in_place = here

    def ask(self, made: Sums, then: Callable[[BaseException | None], None]) -> None:
        """Ask for the sum. `then` is called when `into` has it, or with the error."""

        def ended(error: BaseException | None) -> None:
            try:
                if error is None:
                    self._finish()
            except Exception as fault:  # it belongs to who waits for this sum
                error = fault
            then(error)

        made.reducer.sum(self._words, self._target, self._keeps).then(ended)

    def _finish(self) -> None:
        if self._factor != 1.0:
            self._target.mul_(self._factor)
        if not self._in_place:
            self._into.copy_(self._target.view(self._into.shape))


def sum_of(made: Sums, parts: Sequence[SumPart], result: T, device: torch.device) -> torch.futures.Future[T]:
    """Ask for the sums of all `parts`; the future has `result` when all are there, or the first error.

    The error is one for C++ too, as a RuntimeError with the error's sentence in it: DDP's reducer looks at the future.
    (`Future.set_exception` makes an error for Python only. C++ takes the exception for the result, and crashes.)
    """
    over: torch.futures.Future[None] = torch.futures.Future(devices=None if device.type == "cpu" else [device])
    lock, left, errors = threading.Lock(), [len(parts)], list[BaseException]()

    def outcome(_: torch.futures.Future[None]) -> T:
        if errors:
            raise errors[0]
        return result

    def ended(error: BaseException | None) -> None:
        if error is not None:
            made.failed = made.failed or error
        with lock:
            left[0] -= 1
            errors.extend([] if error is None else [error])
            last = left[0] == 0
        if last:  # on a thread of its own: what a script has hung on the future may wait for the next sum
            try:
                threading.Thread(target=over.set_result, args=(None,), name="sums-result", daemon=True).start()
            except RuntimeError as fault:  # no more threads: else the script would wait for ever
                made.failed = made.failed or fault
                errors.insert(0, fault)
                over.set_result(None)

    future = over.then(outcome)
    for part in parts:
        part.ask(made, ended)
    if not parts:
        over.set_result(None)
    return future
