"""The streamed parameters of one model: each has values only while something uses it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from rallypoint.config import JobConfig
from rallypoint.core.order import derive_seed
from rallypoint.data.randomness import seeded
from rallypoint.errors import NO_SNAPSHOT, ConfigError, JobAborted, ModelError, UsageError
from rallypoint.worker.exchange.arrivals import PulledParameter, ranges_of
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.exchange.locked import Rewound, empty_like
from rallypoint.worker.module_hooks import ModuleHooks
from rallypoint.worker.tensors import ModelTensors, Placed, late_kind, part_of

# ---- The first values of streamed parameters: those of a model that was built, or made one module at a time ----

Init = Callable[[torch.nn.Module], Any]


class FirstValues:
    """Version 0 of a model's parameters and buffers. Main thread only.

    A parameter that has values gives those, until the first version is installed. One without (built on the meta
    device) gets them when it is uploaded: its module is given memory for its own parameters, and
    ``module.reset_parameters()``, then ``init(module)``, fill it. The random generators are seeded from the job's seed
    and the module's name, so that every worker makes the same.
    """

    def __init__(
        self, model: torch.nn.Module, tensors: ModelTensors, made: frozenset[str], seed: int, init: Init | None
    ) -> None:
        """`made` are the names of the parameters without values."""
        self._model, self._tensors, self._made, self._seed, self._init = model, tensors, made, seed, init
        self._last: tuple[str, dict[str, torch.Tensor]] = "", {}  # the module made last, and its parameters
        self._gone = False

    def installed(self) -> None:
        """A version is installed: the values of a model that was built are not kept."""
        self._last = "", {}
        self._gone = any(placed.entry.spec.name not in self._made for placed in self._tensors.parameters)

    @torch.no_grad()
    def words(self, start: int, stop: int) -> torch.Tensor:
        """Words [start, stop) of the flat vector, a new 1-D fp32 CPU tensor; gaps between groups are zero.

        Raises ModelError when nothing initialises a parameter, JobAborted when the values are not kept any more.
        """
        if self._gone:
            raise JobAborted(NO_SNAPSHOT)
        placed = (*self._tensors.parameters, *self._tensors.buffers)
        return part_of([(one.entry, partial(self._words_of, one)) for one in placed], start, stop)

    def _words_of(self, placed: Placed) -> torch.Tensor:
        if (name := placed.entry.spec.name) not in self._made:
            return placed.words()
        owner, _, leaf = name.rpartition(".")
        if self._last[0] != owner or not self._last[1]:
            self._last = "", {}  # free it first
            with seeded(derive_seed(self._seed, "init", owner)):
                self._last = owner, initialised(self._model.get_submodule(owner), owner, self._init)
        return self._last[1][leaf].reshape(-1)


@torch.no_grad()
def initialised(module: torch.nn.Module, name: str, init: Init | None) -> dict[str, torch.Tensor]:
    """The first values of a module's own parameters, on the CPU. The module is as before when this returns.

    Raises ModelError when nothing initialises one of them.
    """
    before = dict(module._parameters)
    try:
        for leaf, parameter in before.items():
            if parameter is not None:
                values = torch.full(parameter.shape, torch.nan, dtype=parameter.dtype, device="cpu")
                module._parameters[leaf] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        initialise(module, init)
        found = {leaf: p.detach() for leaf, p in module._parameters.items() if p is not None}
    finally:
        module._parameters.update(before)
    for leaf, value in found.items():
        if value.isnan().any():
            raise ModelError(
                f"{name}.{leaf} was built on the meta device, and nothing gives it first values: "
                f"{type(module).__qualname__} has no reset_parameters() that sets it; give job.train init=, a function "
                "of a module that sets the parameters of the module itself"
            )
    return found


def initialise(module: torch.nn.Module, init: Init | None) -> None:
    """Call ``module.reset_parameters()``, if there is one, then ``init(module)``."""
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()
    if init is not None:
        init(module)


# ---- Prepares a model: parameters on the meta device get a place without memory, buffers get values ----


def prepare(model: torch.nn.Module, config: JobConfig, init: Init | None) -> frozenset[str]:
    """Take a model's trained parameters off the meta device. Returns the names of those that have no values yet.

    Does nothing where parameters are not streamed.

    They get a shape without memory on the device of the model's other tensors, else on torch's default one. Buffers on
    the meta device get memory, and the values that ``reset_parameters()`` and `init` give them.

    Raises ModelError for a model whose parameters cannot be streamed, ConfigError for `init` where they are not.
    """
    if not config.streamed or not isinstance(model, torch.nn.Module):  # (ModelTensors says what is wrong)
        if init is not None:
            raise ConfigError('init= is for models on the meta device, with parameters="streamed": leave it out')
        return frozenset()
    _check(model)
    device = next((t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta), None)
    if device is None:  # the script's default; where that is the meta device, the CPU
        device = torch.device("cpu") if (usual := torch.get_default_device()).type == "meta" else usual
    made: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for owner, module in model.named_modules():
        _fill_buffers(module, owner, device, config.seed, init)
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            name = f"{owner}.{leaf}" if owner else leaf
            if not parameter.requires_grad:
                raise ModelError(f"{name} is frozen and on the meta device: frozen parameters need values; load them")
            if id(parameter) not in made:
                made[id(parameter)] = name, torch.nn.Parameter(empty_like(parameter, device))
            setattr(module, leaf, made[id(parameter)][1])
    return frozenset(name for name, _ in made.values())


def _fill_buffers(module: torch.nn.Module, owner: str, device: torch.device, seed: int, init: Init | None) -> None:
    empty = [leaf for leaf, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
    if not empty:
        return
    for leaf in empty:
        buffer = module._buffers[leaf]
        assert buffer is not None
        if buffer.dtype == torch.bool:
            raise _without_values(owner, leaf)
        unset = torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min
        module._buffers[leaf] = torch.full(buffer.shape, unset, dtype=buffer.dtype, device=device)
    with seeded(derive_seed(seed, "init", owner)), torch.no_grad():
        parameters = dict(module._parameters)
        try:
            for leaf, parameter in parameters.items():
                module._parameters[leaf] = None if parameter is None else torch.nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                )
            initialise(module, init)
        finally:
            module._parameters.update(parameters)
    for leaf in empty:
        buffer = module._buffers[leaf]
        assert buffer is not None
        left = buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min
        if left.any():
            raise _without_values(owner, leaf)


def _without_values(owner: str, leaf: str) -> ModelError:
    return ModelError(
        f"buffer {owner}.{leaf} was built on the meta device, and nothing gives it values: build it on the CPU "
        "(register_buffer(..., torch.ones(n, device='cpu'))), or set it in init="
    )


def _check(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(f'{name} is TorchScript, which reads parameters unseen: parameters="streamed" cannot')
        if module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule":
            raise ModelError(
                f'{name or type(module).__qualname__} is compiled, and compiled code reads parameters unseen: with '
                'parameters="streamed" leave torch.compile out'
            )
        if getattr(module, "max_norm", None) is not None:
            raise ModelError(
                f'{name} has max_norm, which writes into its weight: parameters="streamed" would lose that'
            )
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter.is_meta:
            continue
        if type(parameter) is not torch.nn.Parameter:
            raise ModelError(f'{name} is a {type(parameter).__qualname__}: parameters="streamed" needs plain ones')
        if parameter.dtype != torch.float32:
            raise ModelError(f'{name} is {parameter.dtype}: parameters="streamed" needs float32')
        if not parameter.is_contiguous():
            raise ModelError(f'{name} is not contiguous: with parameters="streamed" make it so (.contiguous())')


# ---- The streamed parameters of one model: each has values only while something uses it ----
#
# Between two uses a parameter has its shape and no memory. It is *late* then (`tensors.py`): a torch function that
# gets it as an argument makes it pull its values, also where a module reads another module's parameter. What autograd
# keeps of a parameter for the backward pass, such as the transposed view in a linear layer, is kept as a name, and
# pulled again when backward needs it (`torch.autograd.graph.saved_tensors_hooks`).


MOST_USES = 1 << 16  # that are learnt of one pass
MOST_AHEAD = 1 << 10  # parameters: a server keeps so many requests of a worker, and more


class UseOrder:
    """Uses of parameters, by index. A pass may use one several times: forward, and backward once more.

    Calls for each pass: `begin`, then `use` each time; at last `end`. What a pass does in another order than the one
    before is learnt from it.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` are the parameters' bytes."""
        self._sizes = sizes
        self._known: list[int] = []
        self._seen: list[int] = []
        self._at = 0  # how many of `_known` are behind

    def begin(self) -> None:
        self._seen, self._at = [], 0

    def use(self, index: int) -> None:
        if len(self._seen) < MOST_USES:
            self._seen.append(index)
        with suppress(ValueError):  # not in the pass before, or earlier there: the place stays
            self._at = self._known.index(index, self._at) + 1

    def end(self) -> None:
        self._known = self._seen or self._known
        self._seen, self._at = [], 0

    def ahead(self, nbytes: int) -> list[int]:
        """The parameters that are expected next, each once, of `nbytes` bytes at most; the first in any case."""
        found: dict[int, None] = {}
        left = nbytes
        for index in self._known[self._at :]:
            if index in found:
                continue
            left -= self._sizes[index]
            if (found and left < 0) or len(found) == MOST_AHEAD:
                break
            found[index] = None
        return list(found)


log = logging.getLogger("rallypoint")

NOT_HERE = (
    "the model's parameters stay on the servers, and the job is over: rallypoint export RUN --to model.safetensors "
    "writes them, or save them in an evaluation (run.every)"
)


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd keeps of a parameter: which view of which."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(slots=True)
class Counts:
    """Uses of parameters. `ready`: here when needed; `late`: asked for, and waited for; `missed`: not asked for."""

    ready: int = 0
    late: int = 0
    missed: int = 0

    @property
    def uses(self) -> int:
        return self.ready + self.late + self.missed


class StreamedParameters:
    """Pulls the parameters of one model for a worker's passes. Main thread, or autograd's while the main one waits.

    Until the first version is installed, a model that was built with values keeps them: they are what it uploads.

    Calls: `install` for each version; for each pass of training `begin`, `leave`; `evaluating` around evaluations; at
    last `remove`.
    """

    def __init__(
        self, model: torch.nn.Module, tensors: ModelTensors, exchange: Exchange, first: FirstValues,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`say` gets a line for the user."""
        self.counts, self._say = Counts(), say
        self._model, self._tensors, self._exchange, self._pulls = model, tensors, exchange, exchange.words
        self._first, self._ahead = first, exchange.prefetch_bytes
        self.first_words = first.words  # of the flat vector at version 0
        self._placed = [placed for placed in tensors.parameters if placed.tensor.numel()]
        self._index = {id(placed.tensor): index for index, placed in enumerate(self._placed)}
        self._ranges = [ranges_of(tensors.layout, placed.entry) for placed in self._placed]
        self._sizes = [4 * placed.tensor.numel() for placed in self._placed]
        self._orders = {"training": UseOrder(self._sizes), "evaluation": UseOrder(self._sizes)}
        self._order = self._orders["training"]
        self._kind = late_kind(self._settle, self._before_settling)
        self._hooks = ModuleHooks(model, self._enter, self._leave_module)
        self._streams = self._over = self._evaluates = False
        self._here: dict[int, PulledParameter] = {}  # asked for, or here
        self._users: dict[int, int] = {}  # how many frames hold a parameter
        self._storages: dict[int, int] = {}  # the address of a held parameter's memory -> its index
        self._frames: list[tuple[int, list[int]]] = [(0, [])]  # of the modules that run: their id, what they hold
        self._version: object = None
        self._saving: saved_tensors_hooks | None = None
        self._own: tuple[int, saved_tensors_hooks] | None = None  # of the module that the script itself has called

    @torch.no_grad()
    def install(self) -> None:
        """A version exists on all servers: take its buffers, and pull its parameters from now on."""
        self._first.installed()
        buffers = [shard for shard in self._tensors.layout.shards if shard.role == "buffers"]
        if buffers:
            whole = torch.cat([self._exchange.memory.words(shard.index) for shard in buffers])
            for placed in self._tensors.buffers:
                placed.tensor.copy_(placed.of(whole, buffers[0].start))
        if not self._streams:
            self._streams = True
            self._hooks.on()
            for index in range(len(self._placed)):
                self._empty(index)
        self._forget()

    # ---- passes ----

    def begin(self) -> None:
        """A pass of training begins: ``with micro:``."""
        self._forget_if_stale()
        self._begin("training")
        self._saving = saved_tensors_hooks(self._pack, self._unpack)
        self._saving.__enter__()

    def leave(self) -> None:
        """It is over, also by an error; called outside of `begin`, this does nothing."""
        if (saving := self._saving) is None:
            return
        self._saving = None
        saving.__exit__(None, None, None)
        self._order.end()
        self._release_all()

    @contextmanager
    def evaluating(self, step: int) -> Iterator[None]:
        """In the body the script evaluates the version. The body is given up when no server keeps that version."""
        self._forget()
        self._evaluates = True
        try:
            with saved_tensors_hooks(self._pack, self._unpack):  # it may turn gradients on
                yield
        except Rewound:
            log.warning("the evaluation at step %d is given up: the servers do not have that version any more", step)
        finally:
            self._order.end()
            self._evaluates = False
            self._release_all()

    def remove(self) -> None:
        """The run is over: parameters have no values any more."""
        self.leave()
        self._hooks.off()
        if self._streams:
            self._over = True
            self._forget()

    def report(self) -> None:
        """Say how often parameters were here when they were needed."""
        counts, mib = self.counts, self._pulls.nbytes / (1 << 20)
        self._say(
            f"{self._exchange.me} has pulled {mib:,.0f} MiB of parameters: of {counts.uses:,} uses {counts.ready:,} "
            f"were here in time, {counts.late:,} were on their way, {counts.missed:,} were not asked for before"
        )

    def _begin(self, order: str) -> None:
        self._release_all()
        self._order = self._orders[order]
        self._order.begin()
        self._prefetch()

    # ---- modules ----

    def _enter(self, module: torch.nn.Module) -> None:
        """A module is about to run."""
        if own := self._saving is None and len(self._frames) == 1:  # a forward pass outside of ``with micro:``
            self._order.end()
            self._forget_if_stale()
            self._begin("evaluation")
        frame: list[int] = []
        self._frames.append((id(module), frame))
        for parameter in module._parameters.values():
            if parameter is not None and (index := self._index.get(id(parameter))) is not None:
                self._hold(index)
                frame.append(index)
        if own and self._own is None:
            self._own = id(module), saved_tensors_hooks(self._pack, self._unpack)
            self._own[1].__enter__()

    def _leave_module(self, module: torch.nn.Module) -> None:
        """It has run, also by an error."""
        if self._own is not None and self._own[0] == id(module):
            self._own[1].__exit__(None, None, None)
            self._own = None
        if all(owner != id(module) for owner, _ in self._frames[1:]):
            return
        while True:
            owner, frame = self._frames.pop()
            for index in frame:
                self._release(index)
            if owner == id(module):
                return

    def _before_settling(self) -> None:
        """A torch function gets parameters that are late. What the script read before, outside of modules, may go."""
        if len(self._frames) == 1 and sum(self._sizes[index] for index in self._frames[0][1]) > self._ahead:
            self._release_all()

    def _settle(self, parameter: torch.nn.Parameter) -> None:
        """A torch function gets a parameter that is late: the innermost module that runs holds it from now on."""
        if (index := self._index.get(id(parameter))) is None:
            parameter.__class__ = torch.nn.Parameter  # a copy
            return
        if not self._exchange.had_version:
            name = self._placed[index].entry.spec.name
            raise UsageError(f"{name} has no values before the first version: use it inside the run's loop")
        self._hold(index)
        self._frames[-1][1].append(index)

    @torch.no_grad()
    def _hold(self, index: int) -> None:
        self._users[index] = self._users.get(index, 0) + 1
        parameter = self._placed[index].tensor
        if self._users[index] > 1 and parameter.__class__ is not self._kind:
            return
        try:
            value = self._use(index)
        except BaseException:
            self._users[index] -= 1
            raise
        parameter.__class__ = torch.nn.Parameter
        parameter.data = value
        self._storages[value.untyped_storage().data_ptr()] = index

    def _release(self, index: int) -> None:
        self._users[index] -= 1
        if not self._users[index]:
            self._empty(index)

    def _release_all(self) -> None:
        for _, frame in self._frames:
            for index in frame:
                self._release(index)
        self._frames = [(0, [])]

    @torch.no_grad()
    def _empty(self, index: int) -> None:
        """Take the values of a parameter away, but for its shape."""
        parameter = self._placed[index].tensor
        if parameter.__class__ is not self._kind:
            self._storages.pop(parameter.untyped_storage().data_ptr(), None)
            parameter.data = empty_like(parameter, parameter.device)
            parameter.__class__ = self._kind

    # ---- values ----

    def _use(self, index: int) -> torch.Tensor:
        """The values of a parameter, which something needs now. Raises Rewound when they cannot be had any more."""
        if self._over:
            raise UsageError(NOT_HERE)
        if self._evaluates:
            self._forget_if_stale()
        pulled = self._here.get(index)
        if pulled is None:
            self.counts.missed += 1
            pulled = self._here[index] = self._ask(index)
        elif pulled.over:
            self.counts.ready += 1
        else:
            self.counts.late += 1
        self._order.use(index)
        self._prefetch(index)
        if not self._pulls.wait(pulled, unwinds=self._saving is not None):
            self._forget()
            raise Rewound
        placed = self._placed[index]
        return pulled.values.view(placed.entry.spec.shape).to(self._tensors.device, non_blocking=True)

    def _ask(self, index: int) -> PulledParameter:
        """Ask for a parameter. The script's own use, outside of passes and evaluations, gets what there is."""
        own = self._saving is None and not self._evaluates
        return self._pulls.ask(self._ranges[index], newest=own)

    def _prefetch(self, used: int = -1) -> None:
        """Ask for what is expected next; drop what is not, unless something holds it."""
        ahead = self._order.ahead(self._ahead)
        for index in self._here.keys() - {used, *ahead}:
            self._pulls.drop(self._here.pop(index))
        for index in ahead:
            if index not in self._here:
                self._here[index] = self._ask(index)

    def _forget_if_stale(self) -> None:
        if self._version == self._now:
            return
        self._forget()
        if self._evaluates:
            raise Rewound  # a roll-back: the version may not come again before this worker computes

    def _forget(self) -> None:
        self._release_all()
        for pulled in self._here.values():
            self._pulls.drop(pulled)
        self._here.clear()
        self._version = self._now

    @property
    def _now(self) -> object:
        return self._exchange.end.generation, self._exchange.step

    def _pack(self, kept: torch.Tensor) -> Saved | torch.Tensor:
        if kept.layout is not torch.strided or kept.dtype != torch.float32 or not kept.numel():
            return kept
        index = self._storages.get(kept.untyped_storage().data_ptr())
        if index is None:
            return kept
        return Saved(index, kept.size(), kept.stride(), kept.storage_offset())

    @torch.no_grad()
    def _unpack(self, kept: Saved | torch.Tensor) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        return torch.as_strided(self._use(kept.index), kept.size, kept.stride, kept.offset)
