"""The parts of a run, and the guard of its model: it detects changes that the job would miss, or that happen on one
worker only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook as on_buffer_registered
from torch.nn.modules.module import register_module_module_registration_hook as on_module_registered
from torch.nn.modules.module import register_module_parameter_registration_hook as on_parameter_registered
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_any_step

from rallypoint.config import JobConfig
from rallypoint.core.view import ViewNumber
from rallypoint.data.loader import MicroBatches
from rallypoint.errors import UsageError
from rallypoint.net.member import CoordinatorLink
from rallypoint.observe.trace import Tracer
from rallypoint.parallel import persistent_buffers
from rallypoint.worker.evaluations import EvaluationReports
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.habits import script_line
from rallypoint.worker.loop.own import WorkerOptimizer
from rallypoint.worker.membership import Stopping
from rallypoint.worker.ranks.followers import OtherRanks, RankFollowers
from rallypoint.worker.sources.hooks import DeltaSource, Staging
from rallypoint.worker.sources.streamed import StreamedParameters
from rallypoint.worker.tensors import ModelTensors, check_apart, plain_parts

# ---- The parts of a run ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one run on this worker."""

    model: torch.nn.Module
    tensors: ModelTensors
    config: JobConfig
    batches: MicroBatches
    exchange: Exchange
    source: DeltaSource
    staging: Staging
    coordinator: CoordinatorLink
    tracer: Tracer
    # Tells the coordinator that this worker holds the last version, in which generation, and which that is
    done: Callable[[ViewNumber, int], None]
    leads: Callable[[], bool]  # true on the worker that evaluates (now) and saves (when the job is over)
    say: Callable[[str], None]  # shows a line to the user
    reports: EvaluationReports  # tells the coordinator of evaluations
    stopping: Stopping  # tells the coordinator that the script stops the job
    optimizer: WorkerOptimizer | None = None  # the optimizer that steps on this worker; None where the servers step
    streamed: StreamedParameters | None = None  # the model's parameters, where they stay on the servers; else None
    followers: RankFollowers = field(default_factory=RankFollowers)  # the other ranks of this worker, if it is a group
    leases: bool = False  # evaluations are leased, to this worker or another. Else the lead makes them.
    decides_not: str = ""  # the sentence that refuses `run.stop_when`; "" if the job's mode supports it

    def forget_gradients(self) -> None:
        """Drop the gradients that the script's own passes have left."""
        for placed in self.tensors.parameters:
            placed.tensor.grad = None

    @property
    def alone(self) -> bool:
        return not isinstance(self.followers, OtherRanks)


# ---- The guard of the model ----


class BufferGuard:
    """Notices buffers that come into the model after `job.train`, as those that the first forward pass makes.

    They would be in no version: each worker would have its own. Nothing else is compared: parameters come and go while
    the script's code runs, by FSDP2 or because they are streamed. Main thread only. The hooks are global to the
    process and end with `remove`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._buffer_is_new = model, False  # True: some buffer in the model may be new
        self._known_buffers = persistent_buffers(model).keys()
        self._hooks = [on_buffer_registered(self._on_buffer), on_module_registered(self._on_registered)]

    def remove(self) -> None:
        """The run is over: take the global hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @contextmanager
    def script(self, step: int, *, values: bool, late: bool = False) -> Iterator[None]:
        """Watch the script's own code, which runs in the body. `values`: compare all values too.

        With `late` a GPU's result is not waited for: a later call, or `read`, raises its error.

        Raises UsageError when that code has changed what it must not change.
        """
        yield
        self._look_for_buffers(step)

    def cast(self) -> None:
        """The job itself has given parameters another type: the present ones are right."""

    def wrote(self, tensor: torch.Tensor, times: int) -> None:
        """While the script's code runs, the job has written to this parameter so many times: allow that."""

    def read(self, *, wait: bool = True) -> None:
        """Read the results of the pending comparisons; without `wait`, only those that the device has finished.

        Raises UsageError for a parameter that the script has changed, naming the step.
        """

    def _look_for_buffers(self, step: int) -> None:
        if not self._buffer_is_new:
            return
        self._buffer_is_new = False
        if new := persistent_buffers(self._model).keys() - self._known_buffers:
            raise UsageError(
                f"buffer {min(new)} came into the model after job.train (seen at step {step}), so no version has it "
                "and every worker would keep its own: build all buffers before job.train (one that forward makes: run "
                "one batch first), or make it persistent=False if it can be made again at any time"
            )

    def _on_buffer(self, module: torch.nn.Module, name: str, _: torch.Tensor | None) -> None:
        if module._buffers.get(name) is None:  # else one that is there is set again, as some forward passes do
            self._buffer_is_new = True

    def _on_registered(self, *_: Any) -> None:
        self._buffer_is_new = True


class ModelGuard(BufferGuard):
    """Compares the model before and after each time that the script's own code runs.

    Checked at every step, because it is cheap: parameters written in place (torch's `_version` counters); parameters
    frozen or unfrozen; an optimizer that steps them; new layers (reported by torch's registration hooks). Values, which
    `parameter.data` changes without a trace, are compared at steps 0, 1, 2, 4, 8, ... and around evaluations. On a GPU
    the comparisons of steps run asynchronously, and their results are read when they are there.
    """

    @classmethod
    def of(cls, parts: Parts) -> BufferGuard:
        """Return the guard of a run's model. Nothing is compared of one of several ranks, or of streamed parameters."""
        if not parts.alone or parts.streamed is not None:
            return BufferGuard(parts.model)
        own, in_place = parts.config.reading.order == "own", bool(parts.exchange.in_place.parameters)
        return cls(parts.model, parts.tensors, wrapped=own, in_place=in_place)

    def __init__(self, model: torch.nn.Module, tensors: ModelTensors, *, wrapped: bool, in_place: bool = False) -> None:
        """`wrapped`: the loop is the script's own (`rp.wrap`). `in_place`: the model itself is the servers' state."""
        self._wrapped, self._in_place = wrapped, in_place
        super().__init__(model)
        trained = {placed.entry.spec.name: placed.tensor for placed in tensors.parameters}
        self._named = {**trained, **tensors.frozen}
        self._tensors = list(self._named.values())
        self._trains = [name in trained for name in self._named]
        self._known = {id(tensor) for tensor in self._tensors} | {id(m.weight) for same in tensors.tables for m in same}
        self._places = {name: (tensor.device, tensor.dtype) for name, tensor in self._named.items()}
        owners = dict(model.named_modules(remove_duplicate=False))
        self._buffers = [
            (owners[owner], leaf, placed.tensor)
            for placed in tensors.buffers
            if placed.tensor is not tensors.loss_scale and placed.entry.spec.group == -1
            for owner, _, leaf in [placed.entry.spec.name.rpartition(".")]
        ]
        self._registered = True  # True: something in the model may be new, so look at it
        self._script_runs = False
        self._versions: list[int] = []  # torch's counters, as they must be when the script's code ends
        self._place = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        self._unread: list[tuple[int, Comparison]] = []  # (step, a comparison that a GPU has not finished)
        self._hooks += [on_parameter_registered(self._on_registered), before_any_step(self._on_optimizer_step)]

    def remove(self) -> None:
        """Results that were not read are dropped."""
        self._unread = []
        super().remove()

    @contextmanager
    def script(self, step: int, *, values: bool, late: bool = False) -> Iterator[None]:
        self.read(wait=False)
        self._versions = [tensor._version for tensor in self._tensors]
        if values:  # (a script may tie parameters by .data after job.train, which leaves no trace either)
            check_apart({name: one for name, one in self._named.items() if one.requires_grad}, {})
        comparison = Comparison(self._tensors) if values else None
        self._script_runs = True
        try:
            yield
        finally:
            self._script_runs = False
        if [tensor.requires_grad for tensor in self._tensors] != self._trains:
            self._refuse_freezing(step)
        if comparison is not None:
            comparison.end()
            self._unread.append((step, comparison))
            self.read(wait=not late)
        elif self._versions != [tensor._version for tensor in self._tensors]:
            for name, tensor, before in zip(self._named, self._tensors, self._versions, strict=True):
                if tensor._version != before:
                    raise UsageError(self._written(name, step))
        if self._registered:
            self._registered = False
            for name, parameter in self._model.named_parameters():
                if id(parameter) not in self._known:
                    raise UsageError(
                        f"parameter {name} came into the model after job.train (seen at step {step}), so it would not "
                        "be trained: build all layers before job.train (one that forward makes: run one batch first)"
                    )
            for name, tensor in self._named.items():
                if (tensor.device, tensor.dtype) != self._places[name]:
                    raise UsageError(
                        f"parameter {name} was moved or cast to {tensor.device}, {tensor.dtype} after job.train: do "
                        "that before"
                    )
        self._look_for_buffers(step)
        for owner, leaf, tensor in self._buffers:
            if _bound(owner, leaf) is not tensor:
                self._take_back(owner, leaf, tensor)

    def cast(self) -> None:
        for module in self._model.modules():
            if isinstance(module, torch.nn.RNNBase):
                module.flatten_parameters()  # else cuDNN copies all of its weights into one piece at each forward
        self._places = {name: (tensor.device, tensor.dtype) for name, tensor in self._named.items()}

    def wrote(self, tensor: torch.Tensor, times: int) -> None:
        self._versions[self._place[id(tensor)]] += times

    def read(self, *, wait: bool = True) -> None:
        names = list(self._named)
        while self._unread and (wait or self._unread[0][1].ready):
            step, comparison = self._unread.pop(0)
            for index in comparison.changed():
                raise UsageError(self._written(names[index], step))

    # ---- what was found ----

    def _refuse_freezing(self, step: int) -> None:
        for name, tensor, trains in zip(self._named, self._tensors, self._trains, strict=True):
            if tensor.requires_grad != trains:
                what = "frozen (requires_grad=False)" if trains else "unfrozen (requires_grad=True)"
                raise UsageError(
                    f"parameter {name} was {what} at step {step}, after job.train: which parameters a job trains is "
                    "fixed when it begins. Set requires_grad before job.train, and train the next stage in a job of "
                    "its own; a layer that is only to move slowly gets rp.Group(match=..., lr_scale=...)"
                )

    def _written(self, name: str, step: int) -> str:
        if not self._named[name].requires_grad:
            return (
                f"the frozen parameter {name} was changed at step {step}: frozen parameters are not sent, so other "
                "workers would keep the old values. Make it a buffer (register_buffer) and change it inside "
                "`with micro:`: buffers are shared, and those that replica 0 leaves are kept"
            )
        if self._wrapped:
            return (
                f"parameter {name} was changed at step {step} by the script, in this process alone: let the optimizer "
                "that rp.wrap has got change it in its step(), put a limit into forward "
                "(torch.nn.utils.parametrize; not max_norm), or evaluate and average on a copy (copy.deepcopy(model))"
            )
        replaced = "on a cluster the next version would replace that" if self._in_place else (
            "the next version would replace that, on this worker alone"
        )  # fmt: skip
        return (
            f"parameter {name} was changed at step {step} by the script: {replaced}. Put a limit into forward "
            "(torch.nn.utils.parametrize; not max_norm), evaluate and average on a copy (copy.deepcopy(model)), "
            "or give sync=rp.AllReduce() an own_optimizer whose step() does it"
        )

    def _take_back(self, owner: torch.nn.Module, leaf: str, tensor: torch.Tensor) -> None:
        """A module has replaced a buffer by a new tensor: copy its values into the tensor that the job shares."""
        new = _bound(owner, leaf)
        if new is None or new.shape != tensor.shape or new.dtype != tensor.dtype:
            raise UsageError(
                f"buffer {leaf} of {type(owner).__qualname__} was replaced by one of another shape or type: buffers "
                "are shared and keep theirs; write into it (copy_), or make it persistent=False"
            )
        with torch.no_grad():
            tensor.copy_(new)
        owner._buffers[leaf] = tensor

    def _on_registered(self, *_: Any) -> None:
        self._registered = self._buffer_is_new = True

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer of this process is about to step. In an embedded job it may be a server's, on the server's
        thread."""
        if not self._script_runs:
            return
        for group in optimizer.param_groups:
            if self._known.isdisjoint(map(id, group["params"])):
                continue
            if self._wrapped:
                raise UsageError(
                    f"{script_line()}: the script calls {type(optimizer).__qualname__}.step() on the model that "
                    "rp.wrap has got, in this process alone: step the optimizer that rp.wrap has returned "
                    "(optimizer = rp.wrap(model, optimizer, ...)), which steps this one with the mean gradient"
                )
            raise UsageError(
                f"the script calls {type(optimizer).__qualname__}.step() on the model's parameters: the job steps "
                "them, with optimizer= (or, with sync=rp.AllReduce(), own_optimizer=, also by itself). Take step(), "
                "zero_grad() and a scheduler's step() out of the loop (give lr=rp.cosine(...)); clip with clip=, as "
                "gradients have left when backward returns"
            )


def _bound(owner: torch.nn.Module, leaf: str) -> torch.Tensor | None:
    """The tensor that a module has as this buffer now. (TorchScript's modules have no dict of them.)"""
    return owner._buffers[leaf] if leaf in owner._buffers else None  # noqa: SIM401


def compares(step: int) -> bool:
    """True if the parameters' values are compared around the script's code of this step: 0, 1, 2, 4, 8, ..."""
    return step & (step - 1) == 0


class Comparison:
    """Compares tensors at construction with the same tensors at `end`; `changed` says which differ.

    It keeps one number for each tensor: the sum of all its bits. On a GPU everything is queued on the current stream::

        comparison = Comparison(tensors)
        ...                                  # something may write to them
        comparison.end()
        ...                                  # the device works on; comparison.ready becomes True
        comparison.changed()                 # [2]: the third one
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._before = [_sum(tensor) for tensor in tensors]
        self._found: list[tuple[list[int], torch.Tensor]] = []  # of each device: indices, and their flags on the host
        self._events: list[torch.cuda.Event] = []

    def end(self) -> None:
        """Compare. A GPU copies its results to the host asynchronously."""
        of_device: dict[torch.device, list[int]] = {}
        for index, before in enumerate(self._before):
            of_device.setdefault(before.device, []).append(index)
        for device, indices in of_device.items():
            flags = torch.stack([_sum(self._tensors[index]) != self._before[index] for index in indices])
            if device.type == "cuda":
                on_host = torch.empty(len(indices), dtype=torch.bool, device="cpu", pin_memory=True)
                flags = on_host.copy_(flags, non_blocking=True)
                self._events.append(torch.cuda.current_stream(device).record_event())
            self._found.append((indices, flags))
        self._before = []

    @property
    def ready(self) -> bool:
        """True if `changed` does not have to wait for a device."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def changed(self) -> list[int]:
        """Return the indices of the tensors that differ, ascending. Call it after `end`; it waits for the devices."""
        for event in self._events:
            event.synchronize()
        pairs = [pair for indices, flags in self._found for pair in zip(indices, flags.tolist(), strict=True)]
        return sorted(index for index, differs in pairs if differs)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all bits of a tensor (int64, on its device). It differs when any one element differs."""
    if tensor.is_meta or not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device="cpu")
    if (parts := plain_parts(tensor))[0] is not tensor:
        return torch.stack([_sum(part) for part in parts]).sum()
    raw = tensor.detach().reshape(-1).contiguous().view(torch.uint8)  # (a row of every second element stays one)
    even = raw.numel() // 8 * 8
    if not even or raw.storage_offset() % 8:
        return raw.sum()
    total = raw[:even].view(torch.int64).sum()
    return total + raw[even:].sum() if even < raw.numel() else total
