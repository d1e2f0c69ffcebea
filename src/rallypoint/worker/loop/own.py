"""The optimizer on the worker (AllReduce): of a specification, or the user's own torch optimizer."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import torch

from rallypoint.config import JobConfig
from rallypoint.core.layout import DTYPE_BYTES, Shard
from rallypoint.core.modes import StateHolder
from rallypoint.core.schedule import rate_at
from rallypoint.errors import ConfigError, ProtocolError
from rallypoint.optim import NUMBERS, Pieces, load_exactly, number
from rallypoint.store.record import MASTER, OWN, ShardRecord
from rallypoint.worker.habits import by_the_job
from rallypoint.worker.tensors import ModelTensors, Placed, optimizer_of

# ---- The optimizer steps with the mean gradient; its state can be uploaded and loaded ----


class WorkerOptimizer:
    """A model and its optimizer's state, equal on all workers at the same `version` (-1: before the first).

    Parameters and state are plain torch: in the parameters' own precision, on their device. A parameter without a
    gradient gets a gradient of zeros, as in every mode. All methods are called on the main thread.
    """

    def __init__(self, tensors: ModelTensors, stepper: SpecifiedStepper | OwnStepper) -> None:
        self.version = -1
        self.means: dict[int, Pieces] = {}  # of a server of this process: see `optim.InPlace`
        self._tensors, self._stepper, self.settings_digest = tensors, stepper, stepper.settings_digest

    def install(self, version: int, vector: torch.Tensor, states: Mapping[int, ShardRecord], *, skipped: bool) -> None:
        """Update the model to `version`.

        If there are `states` (shard -> record), load them. Otherwise step the optimizer once with the mean gradient in
        `vector` (flat fp32), unless the step is `skipped`. In each case take the buffers from `vector`.
        """
        if steps := not states and not skipped:
            if self.means:
                self._tensors.set_gradients(self.means)
                self.means.clear()
            else:
                for placed in self._tensors.parameters:
                    tensor = placed.tensor
                    mean = placed.of(vector).to(tensor.device, tensor.dtype, non_blocking=True)
                    # A fused optimizer takes for granted that both are in one order of dimensions (channels_last)
                    tensor.grad = mean if tensor.is_contiguous() else torch.empty_like(tensor).copy_(mean)
        copied = None if self._tensors.buffers else self._tensors.mark()
        if states:
            self._load(states)
        elif steps:
            self._step(version - 1)
        if copied is None:  # last: what a hook of the optimizer has written there does not count
            self._tensors.read_buffers_from(vector)
            copied = self._tensors.mark()
        copied()  # the caller reuses the vector after this; a GPU may go on stepping
        self.version = version

    def record(self, shard: Shard) -> ShardRecord:
        """Return a copy of a shard's state at `version`, in the form that servers store in other modes."""
        arrays = {MASTER: self._tensors.part(shard.start, shard.stop)}
        scalars: dict[str, float] = {}
        if shard.role == "parameters":
            kept, scalars = self._stepper.state_in(shard)
            arrays |= kept
        return ShardRecord(shard.index, self.version, {n: a.numpy() for n, a in arrays.items()}, scalars)

    def _step(self, step: int) -> None:
        with by_the_job():
            self._stepper.step(step)
        for placed in self._tensors.parameters:
            placed.tensor.grad = None

    @torch.no_grad()
    def _load(self, states: Mapping[int, ShardRecord]) -> None:
        for shard in (s for s in self._tensors.layout.shards if s.role == "parameters"):
            master = torch.from_numpy(states[shard.index].arrays[MASTER])
            for placed, start, stop in self._tensors.parts_in(shard):
                placed.write(start, master[start - shard.start : stop - shard.start])
        self._stepper.load(states)


class SpecifiedStepper:
    """The optimizer of the job's configuration, with its groups and its schedule.

    The records hold its state element by element beside the parameters, as servers write it in other modes.
    """

    def __init__(self, tensors: ModelTensors, config: JobConfig) -> None:
        self._tensors, self._config, self._optimizer = tensors, config, optimizer_of(tensors, config)

    def step(self, step: int) -> None:
        rate = rate_at(self._config.schedule, step, self._config.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self._optimizer.step()

    def settings_digest(self) -> str:
        return ""  # the job's configuration holds them all

    def state_in(self, shard: Shard) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        arrays: dict[str, torch.Tensor] = {}
        scalars: dict[str, float] = {}
        for placed, start, stop in self._tensors.parts_in(shard):
            for name, value in self._optimizer.state.get(placed.tensor, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == placed.tensor.shape and name not in NUMBERS:
                    part = value.detach().reshape(-1)[start - placed.entry.start : stop - placed.entry.start]
                    array = arrays.setdefault(name, torch.zeros(shard.words, dtype=torch.float32, device="cpu"))
                    array[start - shard.start : stop - shard.start].copy_(part)
                elif value is not None:
                    scalars[name] = float(value)
        return arrays, scalars

    @torch.no_grad()
    def load(self, states: Mapping[int, ShardRecord]) -> None:
        of_parameter: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for shard in (s for s in self._tensors.layout.shards if s.role == "parameters"):
            record = states[shard.index]
            for placed, start, stop in self._tensors.parts_in(shard):
                kept = of_parameter.setdefault(placed.tensor, {})
                for name, array in record.arrays.items():
                    if name != MASTER:
                        whole = torch.empty(placed.tensor.numel(), dtype=torch.float32, device="cpu")
                        flat = kept.setdefault(name, whole)
                        part = torch.from_numpy(array)[start - shard.start : stop - shard.start]
                        flat[start - placed.entry.start : stop - placed.entry.start].copy_(part)
                kept.update({name: number(value) for name, value in record.scalars.items()})
        load_exactly(self._optimizer, {p: _shaped(p, kept) for p, kept in of_parameter.items() if kept})


def _shaped(parameter: torch.Tensor, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    like = torch.empty_like(parameter)
    return {name: like.clone().copy_(t.view(parameter.shape)) if t.dim() else t for name, t in kept.items()}


# ---- The user's own torch optimizer under AllReduce: its state to shard records and back ----
#
# The state's tensors (any shape and dtype) are cut over the shards of their parameter, as bytes. Everything else
# (numbers, strings, lists of them) is one `_Head` of plain data in the first shard. Neither can run code.

OwnOptimizer = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
OwnSchedule = torch.optim.lr_scheduler.LRScheduler | Sequence[torch.optim.lr_scheduler.LRScheduler]

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_FUNCTIONS = ("lr_lambdas", "lmbda_list")  # torch's LambdaLR: entries of its state that hold callable objects


class _Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor of the state: its parameter's name, its own name, shape and dtype; is it always on the host?"""

    parameter: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    host: bool


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of the state that is no tensor: the parameters' values, each optimizer's groups, each schedule's state."""

    tensors: list[_Tensor]
    numbers: dict[str, dict[str, Any]]
    groups: list[list[dict[str, Any]]]
    schedules: list[dict[str, Any]]


_S = TypeVar("_S")
_heads = msgspec.msgpack.Decoder(_Head)


class OwnStepper:
    """Steps `optimizers`, which together hold each trained parameter once, and then `schedules`.

    `state_in` and `load` write the state of a shard to its record and read it, as those of `SpecifiedStepper` do.

    Raises ConfigError when they hold other parameters, or a state that no shard record can hold: a parameter's state
    must be a dict of tensors and plain data. Main thread only.
    """

    def __init__(
        self, tensors: ModelTensors, optimizers: Sequence[torch.optim.Optimizer],
        schedules: Sequence[torch.optim.lr_scheduler.LRScheduler] = (),
    ) -> None:  # fmt: skip
        for optimizer in optimizers:
            _check_step(optimizer)
        for schedule in schedules:
            _check_step(schedule)
            if all(schedule.optimizer is not optimizer for optimizer in optimizers):
                raise ConfigError(
                    f"own_schedule has a {type(schedule).__qualname__} of an optimizer that is not in own_optimizer: "
                    "build it with one that is"
                )
        self._tensors, self._optimizers, self._schedules = tensors, optimizers, schedules
        self._name_of = {id(placed.tensor): placed.entry.spec.name for placed in tensors.parameters}
        self._placed = {p.entry.spec.name: p for p in tensors.parameters if p.tensor.numel()}
        self._owner = self._check_parameters()
        self._checked = False
        self._history = ""  # a digest of the settings of all steps from the start, or from the last `load`
        self._head()  # check the groups' values now

    def step(self, step: int) -> None:
        self._history = self.settings_digest()
        for optimizer in self._optimizers:
            optimizer.step()
        for schedule in self._schedules:
            schedule.step()
        if not self._checked:  # check at the first step, not only when a worker joins
            self._head()
            self._checked = True

    def state_in(self, shard: Shard) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        arrays: dict[str, torch.Tensor] = {}
        if shard.index == 0:  # parameters come first in the layout, so shard 0 always holds some
            head = bytearray(msgspec.msgpack.encode(self._head()))
            arrays[OWN] = torch.frombuffer(head, dtype=torch.uint8)
        for placed, _, _ in self._tensors.parts_in(shard):
            name = placed.entry.spec.name
            for key, value in self._kept(name).items():
                if isinstance(value, torch.Tensor):
                    raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
                    start, stop = _share(placed, shard, len(raw))
                    arrays[f"{OWN}.{key}.{name}"] = raw[start:stop].to("cpu", copy=True)
        return arrays, {}

    def load(self, states: Mapping[int, ShardRecord]) -> None:
        try:
            head = _heads.decode(states[0].arrays[OWN].tobytes())
        except (KeyError, msgspec.DecodeError) as error:
            raise ProtocolError(f"the state of an optimizer that cannot be read: {error}") from None
        kept: dict[str, dict[str, Any]] = {name: dict(numbers) for name, numbers in head.numbers.items()}
        for about in head.tensors:
            kept.setdefault(about.parameter, {})[about.name] = self._whole(about, states)
        groups = [len(optimizer.param_groups) for optimizer in self._optimizers]
        if [len(came) for came in head.groups] != groups or len(head.schedules) != len(self._schedules):
            raise ProtocolError("the state of other optimizers than these")
        for optimizer, came in zip(self._optimizers, head.groups, strict=True):
            known = optimizer.state_dict()["param_groups"]
            merged = [_as_before(group, new) for group, new in zip(known, came, strict=True)]
            load_exactly(optimizer, {self._placed[n].tensor: of for n, of in kept.items() if n in self._placed}, merged)
        self._history = ""  # every worker loads at the same version
        for schedule, new in zip(self._schedules, head.schedules, strict=True):
            schedule.load_state_dict(_as_before(schedule.state_dict(), new))

    def settings_digest(self) -> str:
        """Return a short digest of the groups' hyperparameters and the schedules' state, now and at each step so far.

        All workers have the same digest at a version, unless a script changed a setting on some of them only. It reads
        no tensor of a GPU, because that would wait for the device.
        """
        groups = [
            [(key, _readable(value)) for key, value in group.items() if key != "params"]
            for optimizer in self._optimizers for group in optimizer.param_groups
        ]  # fmt: skip
        schedules = [
            [(key, _readable(value)) for key, value in schedule.state_dict().items() if key not in _FUNCTIONS]
            for schedule in self._schedules
        ]
        return hashlib.blake2b(repr((self._history, groups, schedules)).encode(), digest_size=8).hexdigest()

    # ---- the state as plain data ----

    def _check_parameters(self) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizer of each parameter, by the parameter's name. Raises ConfigError like the class."""
        owner: dict[str, torch.optim.Optimizer] = {}
        for optimizer in self._optimizers:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if (name := self._name_of.get(id(p))) is None:
                    raise ConfigError(
                        f"own_optimizer steps a tensor of shape {list(p.shape)} that is no trained parameter of this "
                        "model: build it from the model's parameters, after freezing what is frozen"
                    )
                if name in owner:
                    raise ConfigError(f"own_optimizer has parameter {name} twice: each is to be stepped once")
                owner[name] = optimizer
        if missing := sorted(set(self._name_of.values()) - owner.keys()):
            raise ConfigError(
                f"parameter {missing[0]} is trained, and own_optimizer does not step it: add it there, or freeze it "
                "(requires_grad=False)"
            )
        return owner

    def _head(self) -> _Head:
        tensors: list[_Tensor] = []
        numbers: dict[str, dict[str, Any]] = {}
        for name in self._placed:
            for key, value in self._kept(name).items():
                if isinstance(value, torch.Tensor):
                    kind, host = str(value.dtype).removeprefix("torch."), value.device.type == "cpu"
                    if kind not in _DTYPES:
                        raise _refused(f"{key} of {name}, a tensor of {kind}")
                    tensors.append(_Tensor(name, key, kind, tuple(value.shape), host))
                else:
                    numbers.setdefault(name, {})[key] = _plain(f"{key} of {name}", value)
        groups = [
            [{k: _plain(f"{k} in a group", v) for k, v in group.items() if k != "params"} for group in o.param_groups]
            for o in self._optimizers
        ]
        schedules = [
            {k: _plain(f"{k} in its schedule", v) for k, v in schedule.state_dict().items() if k not in _FUNCTIONS}
            for schedule in self._schedules
        ]
        return _Head(tensors, numbers, groups, schedules)

    def _kept(self, name: str) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._owner[name].state.get(self._placed[name].tensor, {})
        return state

    def _whole(self, about: _Tensor, states: Mapping[int, ShardRecord]) -> torch.Tensor:
        placed, dtype = self._placed.get(about.parameter), _DTYPES.get(about.dtype)
        if placed is None or dtype is None or min(about.shape, default=0) < 0:
            raise ProtocolError(f"the state of an optimizer with a {about.dtype} of {about.parameter}: there is none")
        touched = self._tensors.layout.shards_touching(placed.entry.start, placed.entry.stop)
        pieces = [states[shard].arrays.get(f"{OWN}.{about.name}.{about.parameter}") for shard in touched]
        raw = np.concatenate([np.empty(0, np.uint8), *(piece for piece in pieces if piece is not None)])
        count = math.prod(about.shape)
        if len(raw) != count * dtype.itemsize:
            raise ProtocolError(f"{about.name} of {about.parameter} has {len(raw)} bytes, which are not {about.shape}")
        value = torch.from_numpy(raw).view(dtype) if count else torch.empty(0, dtype=dtype, device="cpu")
        value, device = value.view(about.shape), "cpu" if about.host else placed.tensor.device
        like = placed.tensor if value.shape == placed.tensor.shape else value  # in that order, as a gradient
        return torch.empty_like(like, dtype=dtype, device=device).copy_(value)


def worker_optimizer(
    tensors: ModelTensors, config: JobConfig, own: Sequence[torch.optim.Optimizer],
    schedules: Sequence[torch.optim.lr_scheduler.LRScheduler],
) -> WorkerOptimizer | None:  # fmt: skip
    """Return the optimizer that steps on this worker; None where the servers step.

    Raises ConfigError for an unusable one.
    """
    if schedules and not own:
        raise ConfigError("own_schedule goes with own_optimizer: without, give optimizer a schedule as its lr")
    if config.mode.holder is StateHolder.SERVERS:
        return None
    return WorkerOptimizer(tensors, OwnStepper(tensors, own, schedules) if own else SpecifiedStepper(tensors, config))


def several(given: object, kind: type[_S], name: str) -> list[_S]:
    """Return one, several or no (None) objects of `kind` as a list. Raises ConfigError for anything else."""
    if given is None:
        return []
    items = list(given) if isinstance(given, Sequence) else [given]
    for item in items:
        if not isinstance(item, kind):
            what = item.__qualname__ if isinstance(item, type) else type(item).__qualname__
            raise ConfigError(
                f"{name} is {'the class ' if isinstance(item, type) else 'a '}{what}: give a {kind.__module__}."
                f"{kind.__qualname__} that is built, or several in a list"
            )
    return cast(list[_S], items)


def _check_step(stepped: torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler) -> None:
    """Raise ConfigError when `step()` needs an argument that the job does not have."""
    kind = type(stepped).__qualname__
    if isinstance(stepped, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            f"own_schedule is a {kind}, whose step needs a metric that only the evaluating worker has: use a schedule "
            "by steps, or a rule on the loss inside own_optimizer's own step()"
        )
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(type(stepped).step).parameters.values())[1:]  # (the class's: schedules wrap it)
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind not in several]
    if wanted:
        raise ConfigError(
            f"{kind}.step() needs {', '.join(wanted)}: the job steps once for the mean gradient of all replicas, and "
            "cannot compute the loss again; use an optimizer whose step() needs nothing, such as torch.optim.AdamW"
        )


def _readable(value: Any) -> Any:
    """A setting in the form in which it is compared."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else str(value.shape)
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [_readable(item) for item in value]
    if isinstance(value, dict):
        return [(key, _readable(item)) for key, item in value.items()]
    return type(value).__qualname__


def _share(placed: Placed, shard: Shard, nbytes: int) -> tuple[int, int]:
    """The range of a state's `nbytes` bytes that belongs to this shard, in proportion to its words of the parameter."""
    entry = placed.entry
    words = entry.stop - entry.start
    first, last = max(entry.start, shard.start) - entry.start, min(entry.stop, shard.stop) - entry.start
    return nbytes * first // words, nbytes * last // words


def _plain(what: str, value: Any) -> Any:
    """Return `value` if it is plain data; raise ConfigError if not."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_plain(what, item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return {key: _plain(what, item) for key, item in value.items()}
    raise _refused(f"{what}, a {type(value).__name__}")


def _as_before(before: Mapping[str, Any], came: Mapping[str, Any]) -> dict[str, Any]:
    """Return `before` with the values of `came` under the same names, converted to tuples and tensors like `before`."""
    result = dict(before)
    for key in before.keys() & came.keys():
        value, old = came[key], before[key]
        if isinstance(old, torch.Tensor):
            value = torch.full_like(old, value)
        result[key] = tuple(value) if isinstance(old, tuple) else value
    return result


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"own_optimizer keeps {what}: that cannot be given to a worker that joins, tensors and plain data can"
    )
