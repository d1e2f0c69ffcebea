"""A model's tensors: what it must be, their places in the flat vector, state that replicas carry, late parameters."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rallypoint.config import JobConfig, Settings, group_of, matrices_of, ranks_of, settings_of
from rallypoint.core.layout import DTYPE_BYTES, Entry, Layout, Shard, TensorSpec, build_layout, carried_by
from rallypoint.core.modes import Feature
from rallypoint.core.modes.table import why_not
from rallypoint.core.optimizer import ENTRY
from rallypoint.core.typed import named
from rallypoint.errors import ConfigError, ModelError, UsageError
from rallypoint.optim import Pieces, build_optimizer, refusal
from rallypoint.parallel import persistent_buffers

# ---- What a model must be before a job trains it: each sentence names the tensor, and says what to do ----

Named = Mapping[str, torch.Tensor]


def check_model(model: object) -> None:
    """Raise ModelError for what is no module, and for a tensor that has no shape yet."""
    if isinstance(model, Mapping):
        raise ModelError(
            "a dict was given as the model: give one torch.nn.Module, such as a ModuleDict. Models that take turns, "
            "each with its own optimizer, are keys of job.store: see examples/gan.py"
        )
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"a {type(model).__qualname__} was given as the model: give a torch.nn.Module")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ModelError(
                f"{name} has no shape yet (a lazy module): run one batch through the model before job.train"
            )


def refuse_unmatched(config: JobConfig, trained: Sequence[TensorSpec]) -> None:
    """Raise ConfigError for a group of settings that none of these is in: its pattern is mistyped, most likely."""
    used = {spec.group for spec in trained}
    for number, group in enumerate(config.groups, 2):
        if number not in used:
            raise ConfigError(
                f"no trained parameter is in the group match={list(group.match)}: write it as the names are, "
                f"{named([spec.name for spec in trained if spec.group >= 0], 4)}; the first group that matches counts"
            )


def check_trained(trained: Named) -> None:
    """Raise ModelError for a parameter without readable and writable memory of its own, or for several devices."""
    devices: dict[torch.device, str] = {}
    for name, parameter in trained.items():
        if parameter.is_meta:
            raise ModelError(
                f"parameter {name} is on the meta device and has no values: build the model on the CPU or a GPU, or "
                "give it memory and values first (model.to_empty(device='cpu'), then initialise); only "
                "torch.nn.Embedding(sparse=True, device='meta') stays there, as a table"
            )
        if parameter.layout is not torch.strided:
            raise ModelError(f"parameter {name} is {parameter.layout}: only dense parameters can be trained")
        if _shares_with_itself(parameter):
            raise ModelError(
                f"parameter {name} is an expanded view, whose elements share memory: make it one with memory of its "
                "own, torch.nn.Parameter(tensor.clone()), or keep the small one and expand it in forward"
            )
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        where = " and ".join(f"{name} on {device}" for device, name in devices.items())
        raise ModelError(f"the model lies on several devices ({where}): a worker trains on one; move it to one device")


def check_kept(frozen: Named, buffers: Named) -> None:
    """Raise ModelError for a frozen parameter that has no values, and for a buffer that cannot be set in place."""
    for what, tensors in (("frozen parameter", frozen), ("buffer", buffers)):
        for name, tensor in tensors.items():
            if tensor.is_meta:
                raise ModelError(
                    f"{what} {name} is on the meta device and has no values: build it on the CPU or a GPU, or give "
                    "it memory and values before job.train"
                )
            if tensor.layout is not torch.strided or tensor.is_quantized:
                kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
                raise ModelError(
                    f"{what} {name} is {kind}, and only dense ones are compared and shared: make it dense "
                    f"({'dequantize()' if tensor.is_quantized else 'to_dense()'}), or keep it as a plain attribute "
                    "of the module that every worker makes alike"
                )
    for name, buffer in buffers.items():
        if _shares_with_itself(buffer):
            raise ModelError(
                f"buffer {name} is an expanded view, whose elements share memory, so nobody can write into it: give "
                "it memory of its own (.clone()), or make it persistent=False"
            )


def check_apart(trained: Named, others: Named) -> None:
    """Raise ModelError for a trained parameter whose memory another one, or one of `others`, has a part of.

    `others` are buffers and frozen parameters. One Parameter under several names is one here.
    """
    for first, second in _overlapping({**others, **trained}):
        both = [name for name in (first, second) if name in trained]
        if len(both) == 2:
            raise ModelError(
                f"parameters {first} and {second} share memory (.data), and are two to an optimizer, which would "
                "update the same numbers twice: make them one parameter (a.weight = b.weight), or, where the tie is "
                "transposed, keep one and use it in forward (torch.nn.functional.linear(x, self.a.weight.t()))"
            )
        if both:
            parameter, other = both[0], first if second == both[0] else second
            raise ModelError(
                f"{other} shares memory with the parameter {parameter}, which the job trains: a version would set "
                f"those numbers twice, and one of the two values is old. Give {other} memory of its own (.clone()), "
                f"or read {parameter} where you need it"
            )


def _overlapping(tensors: Named) -> Iterator[tuple[str, str]]:
    """Pairs of tensors with a byte in common, in the order of their addresses."""
    found = [
        (tensor.device, start, stop, name) for name, tensor in tensors.items()
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel()
        and not hasattr(tensor, "__tensor_flatten__")  # made of other tensors: it has no memory itself
        for start, stop in [_range(tensor)]
    ]  # fmt: skip
    found.sort(key=lambda one: (str(one[0]), one[1]))
    open_ones: list[tuple[torch.device, int, int, str]] = []
    for one in found:
        open_ones = [other for other in open_ones if other[0] == one[0] and other[2] > one[1]]
        for other in open_ones:
            if _share(tensors[other[3]], tensors[one[3]]):
                yield other[3], one[3]
        open_ones.append(one)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of the one after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors whose ranges overlap have a byte in common. (Columns of one matrix have not.)"""
    (start, stop), (begin, end) = _range(one), _range(other)
    if _dense(one) and _dense(other):
        return True
    first = min(start, begin)
    mine = torch.zeros(max(stop, end) - first, dtype=torch.bool, device="cpu")
    _bytes_of(one, mine, first).fill_(True)
    return bool(_bytes_of(other, mine, first).any())


def _shares_with_itself(tensor: torch.Tensor) -> bool:
    """True if two elements of a tensor have a byte in common, as those of an expanded one."""
    if not tensor.numel() or _dense(tensor):
        return False
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return True
    start, stop = _range(tensor)
    taken = torch.zeros(stop - start, dtype=torch.bool, device="cpu")
    _bytes_of(tensor, taken, start).fill_(True)
    return int(taken.sum()) < tensor.numel() * tensor.element_size()


def _dense(tensor: torch.Tensor) -> bool:
    """True if a tensor fills its range, in whichever order of its dimensions."""
    strides = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    before = [(1, 1), *strides]
    return all(stride == of * size for (of, size), (stride, _) in pairwise(before))


def _bytes_of(tensor: torch.Tensor, memory: torch.Tensor, first: int) -> torch.Tensor:
    """The view of `memory`, one element a byte from the address `first` on, that lies where the tensor does."""
    size = tensor.element_size()
    places = [(1 if stride == 0 else n, stride * size) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return memory.as_strided(
        [*(n for n, _ in places), size], [*(stride for _, stride in places), 1], tensor.data_ptr() - first
    )


# ---- The state that replicas carry from step to step, such as the hidden state of a recurrent model ----
#
# It is a part of the version, like a buffer, with a tensor for each replica: only that replica changes it. So it is
# kept, published, replicated and stored by the same machines, and whoever computes a replica has its state. The layout
# calls the tensors ``carry[REPLICA]`` and their place in the tree: ``carry[3].h``, ``carry[3][0]``.

Carry = torch.Tensor | tuple["Carry", ...] | list["Carry"] | dict[str, "Carry"]
"""A tensor, or tensors in tuples, lists and dicts."""

MOST_BYTES = 1 << 28  # of all replicas together: every worker gets all of it with each version


class TrainSettings(Settings, total=False):
    """The settings of `job.train`: those of `JobConfig`, and what is no data."""

    carry: Carry | None


class Carried:
    """The state of each of `replicas` replicas. Main thread only.

    `first` is what each replica begins with. Raises ConfigError when it cannot be carried.
    """

    def __init__(self, first: Carry, replicas: int, device: torch.device) -> None:
        self._first = first
        leaves = dict(_leaves(first, ""))
        _check(leaves, replicas)
        self._names = list(leaves)
        # By the layout's names, the values in the model's version, or those that a replica has left since
        self.tensors: dict[str, torch.Tensor] = {}
        self.specs: list[TensorSpec] = []  # the layout's, in the same order
        for replica in range(replicas):
            for name, leaf in leaves.items():
                place = _named(replica, name)
                own = self.tensors[place] = leaf.detach().to(device).clone(memory_format=torch.contiguous_format)
                self.specs.append(_spec(place, own, carried_by(replica)))
        self._given: tuple[int, list[torch.Tensor]] | None = None

    def of(self, replica: int) -> Carry:
        """Return what the replica carries now: new tensors without a graph, in the form of `first`."""
        if self._given is not None and self._given[0] == replica:
            values = self._given[1]
        else:
            values = [self.tensors[_named(replica, name)].clone() for name in self._names]
        return _filled(self._first, iter(values))

    def give(self, replica: int, state: Carry) -> None:
        """Set what the replica carries, from `keep` on. Its graph is cut off.

        Raises UsageError unless it has the form, the shapes and the types of `first`.
        """
        given = dict(_leaves(state, ""))
        if list(given) != self._names:
            other = sorted(set(given) ^ set(self._names)) or list(given)
            where = "has no" if other[0] in self._names else "has a"
            raise UsageError(
                f"the state that replica {replica} is to carry {where} tensor {_named(replica, other[0])}, unlike "
                "carry= of job.train: give it the same form"
            )
        for name, tensor in given.items():
            own = self.tensors[_named(replica, name)]
            if tensor.shape != own.shape or tensor.dtype != own.dtype:
                do = "is carry= for one replica's batch? is the last batch shorter?" if tensor.dtype == own.dtype else (
                    "give carry= this type, or convert what you assign"
                )  # fmt: skip
                raise UsageError(
                    f"{_named(replica, name)} is {_type(tensor)} {list(tensor.shape)}, and carry= of job.train "
                    f"has {_type(own)} {list(own.shape)} there: what a replica carries keeps its shape and type ({do})"
                )
        self._given = replica, [tensor.detach() for tensor in given.values()]

    @torch.no_grad()
    def keep(self) -> None:
        """The micro-batch is over: what was given is what the replica carries."""
        if self._given is not None:
            replica, values = self._given
            self._given = None
            for name, value in zip(self._names, values, strict=True):
                self.tensors[_named(replica, name)].copy_(value)


def _named(replica: int, leaf: str) -> str:
    return f"carry[{replica}]{leaf}"


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _leaves(tree: object, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a tree with their places, such as ``.h[0]``. Raises UsageError for anything else in it."""
    if isinstance(tree, torch.Tensor):
        yield place, tree
    elif isinstance(tree, (tuple, list)):
        for index, part in enumerate(tree):
            yield from _leaves(part, f"{place}[{index}]")
    elif isinstance(tree, Mapping) and all(isinstance(name, str) for name in tree):
        for name, part in tree.items():
            yield from _leaves(part, f"{place}.{name}")
    else:
        raise UsageError(
            f"the state that a replica carries has a {type(tree).__name__} at carry{place}: it is made of tensors, in "
            "tuples, lists and dicts with names"
        )


def _filled(tree: Carry, values: Iterator[torch.Tensor]) -> Carry:
    """Return a tree of the same form with these tensors."""
    if isinstance(tree, torch.Tensor):
        return next(values)
    if isinstance(tree, dict):
        return {name: _filled(part, values) for name, part in tree.items()}
    parts = [_filled(part, values) for part in tree]
    return parts if isinstance(tree, list) else tuple(parts)


def _check(leaves: Mapping[str, torch.Tensor], replicas: int) -> None:
    if not leaves:
        raise ConfigError("carry= has no tensor: give what each replica begins with, or leave it out")
    for name, tensor in leaves.items():
        if _type(tensor) not in DTYPE_BYTES or tensor.layout is not torch.strided or tensor.is_meta:
            raise ConfigError(
                f"carry{name} is {_type(tensor)}, {tensor.layout}, on {tensor.device}: a replica carries dense tensors "
                f"of {', '.join(DTYPE_BYTES)}"
            )
        real = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # torch cannot ask this of 8-bit floats
        if not bool(torch.isfinite(real).all()):
            raise ConfigError(f"carry{name} has values that are not finite: no replica can go on from it")
    one = sum(tensor.numel() * tensor.element_size() for tensor in leaves.values())
    if one * replicas > MOST_BYTES:
        raise ConfigError(
            f"carry= is {math.ceil(one / 1e6)} MB for each of {replicas} replicas, and every worker gets all of it "
            f"with each version: {MOST_BYTES >> 20} MiB are supported. Carry less, or compute it again from the "
            "samples before"
        )


# ---- A model's tensors and their places in the flat vector: trained parameters and shared buffers ----


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of the model and its place in the flat vector."""

    tensor: torch.Tensor
    entry: Entry

    def of(self, vector: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return this tensor's part of a flat fp32 vector, in the tensor's shape (a buffer's also in its dtype).

        `start`: the word of the flat vector with which `vector` begins.
        """
        words = vector[self.entry.start - start : self.entry.stop - start]
        if self.entry.spec.group >= 0:
            return words.view(self.entry.spec.shape)
        raw = words.view(torch.uint8)[: self.tensor.numel() * self.tensor.element_size()]
        return raw.view(self.tensor.dtype).view(self.entry.spec.shape)

    def words(self) -> torch.Tensor:
        """Return the tensor as its words of the flat vector: 1-D fp32.

        For a contiguous fp32 parameter this is a view.
        """
        if self.entry.spec.group >= 0:
            return self.tensor.detach().reshape(-1)
        words = torch.zeros(self.entry.stop - self.entry.start, dtype=torch.float32, device="cpu")
        self.of(words, self.entry.start).copy_(self.tensor)
        return words

    def write(self, start: int, values: torch.Tensor) -> None:
        """Set the part of a parameter that begins at word `start` of the vector (1-D fp32 values)."""
        words, first = self.words(), start - self.entry.start
        words[first : first + len(values)].copy_(values)
        if words.data_ptr() != self.tensor.data_ptr():  # not contiguous: `words` is a copy
            self.tensor.copy_(words.view(self.tensor.shape))

    def swap(self, start: int, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Swap `values` (1-D fp32) with the part of a parameter that begins at word `start` of the vector.

        `scratch` (1-D fp32) bounds how much is swapped at once.
        """
        words, first = self.words(), start - self.entry.start
        for at in range(0, len(values), len(scratch)):
            there = values[at : at + len(scratch)]
            own, kept = words[first + at :][: len(there)], scratch[: len(there)]
            kept.copy_(own)
            own.copy_(there)
            there.copy_(kept)
        if words.data_ptr() != self.tensor.data_ptr():  # not contiguous: `words` is a copy
            self.tensor.copy_(words.view(self.tensor.shape))


def part_of(tensors: Iterable[tuple[Entry, Callable[[], torch.Tensor]]], start: int, stop: int) -> torch.Tensor:
    """Words [start, stop) of the flat vector that these tensors make, as a new 1-D fp32 CPU tensor; gaps are zero.

    Each has its place, and what returns its words (1-D fp32): it is called only for one that is needed.
    """
    vector = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
    for entry, words in tensors:
        first, last = max(start, entry.start), min(stop, entry.stop)
        if first < last:
            vector[first - start : last - start].copy_(words()[first - entry.start : last - entry.start])
    return vector


def marked(stream: torch.cuda.Stream) -> Callable[[], None]:
    """Return what waits until the stream has done all that it was given so far. Any thread may call that."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # else the wait takes a core
    event.record(stream)
    return event.synchronize


class ModelTensors:
    """The trainable parameters (tied ones once), the shared buffers and the frozen parameters of a model.

    Persistent buffers (for example BatchNorm statistics) are shared; the other buffers stay private to this worker.
    `tables` has, for each of the layout's tables, the modules that use it. `tied` maps each further name of a tied
    tensor to its name in the layout. With fp16, `loss_scale` is shared like a buffer: the scale, and the steps applied
    with it (fp32, shape (2,)). What replicas carry is among `buffers`, with tensors of each replica.

    Raises ModelError when the model or a table cannot be trained like this.
    """

    loss_scale: torch.Tensor | None = None

    def __init__(
        self, model: torch.nn.Module, config: JobConfig, made: Container[str] = (), carry: Carry | None = None
    ) -> None:
        """`made` are the names of streamed parameters that have no values yet. `carry` is what each replica begins
        with, of a state that it carries from step to step."""
        check_model(model)
        tables = _tables(model, config)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and name not in tables}
        with_values = {name: p for name, p in trained.items() if name not in made}
        check_trained(with_values)
        self.frozen: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        kept = model.state_dict(keep_vars=True)
        shared = persistent_buffers(model)
        check_kept(self.frozen, shared)
        moves = config.streamed or config.memory.hold == "bf16"  # parameters get other memory now and then
        views = {name: b for name, b in model.named_buffers() if moves or name in shared}
        check_apart(with_values, {**self.frozen, **views})
        device = next((p.device for p in trained.values()), torch.device("cpu"))
        if config.precision == "fp16":
            scale = [config.loss_scale.init_scale, 0.0]
            self.loss_scale = shared[ENTRY] = torch.tensor(scale, dtype=torch.float32, device=device)
        specs = [_spec(name, p, group_of(config, name, p.dim())) for name, p in trained.items()]
        specs += [_spec(name, b, -1) for name, b in shared.items()]
        self.carried = Carried(carry, config.replicas, device) if carry is not None else None
        if self.carried is not None:
            specs += self.carried.specs
            shared |= self.carried.tensors
        rows = [_spec(name, sharing[0].weight, group_of(config, name, 2)) for name, sharing in tables.items()]
        refuse_unmatched(config, [*specs, *rows])
        self.tables = list(tables.values())
        self.layout: Layout = build_layout(
            specs, config.network.shard_bytes, ranks_of(config), rows, matrices_of(config, specs)
        )
        by_name = {**trained, **shared}
        placed = [Placed(by_name[entry.spec.name], entry) for entry in self.layout.entries]
        self.parameters = [p for p in placed if p.entry.spec.group >= 0]
        self.buffers = [p for p in placed if p.entry.spec.group < 0]
        self._in_order = placed  # as in the flat vector
        self.device = device
        names = {id(p.tensor): p.entry.spec.name for p in placed}
        names |= {id(sharing[0].weight): name for name, sharing in tables.items()}
        known = {*by_name, *tables}
        self.tied = {n: names[id(t)] for n, t in kept.items() if n not in known and id(t) in names}

    def frozen_hashes(self) -> dict[str, str]:
        """Return a hash of every frozen parameter's bytes.

        Frozen parameters are never sent, so all workers must hold the same.
        """
        return {name: hash_of(p) for name, p in self.frozen.items()}

    @torch.no_grad()
    def part(self, start: int, stop: int) -> torch.Tensor:
        """See `part_of`."""
        begin = bisect_right(self._in_order, start, key=lambda placed: placed.entry.stop)
        end = bisect_left(self._in_order, stop, key=lambda placed: placed.entry.start)
        return part_of([(placed.entry, placed.words) for placed in self._in_order[begin:end]], start, stop)

    @torch.no_grad()
    def read_from(self, vector: torch.Tensor, buffers: torch.Tensor | None = None) -> None:
        """Copy parameters from a flat CPU vector (fp32 or bf16), and buffers from `buffers` (fp32; None: the same)."""
        for placed in self.parameters:
            placed.tensor.copy_(placed.of(vector), non_blocking=True)
        self.read_buffers_from(vector if buffers is None else buffers)
        self.mark()()  # the caller reuses the vector after this

    @torch.no_grad()
    def read_buffers_from(self, vector: torch.Tensor) -> None:
        """Begin to copy the buffers: see `mark`. Nothing waits for copies to another GPU, so those are made at once."""
        for placed in self.buffers:
            placed.tensor.copy_(placed.of(vector), non_blocking=placed.tensor.device == self.device)

    def mark(self) -> Callable[[], None]:
        """Return what waits until all copies between host and device that this thread has begun so far are made."""
        return marked(torch.cuda.current_stream(self.device)) if self.device.type == "cuda" else lambda: None

    @torch.no_grad()
    def read_shards_from(self, vector: torch.Tensor, shards: Sequence[Shard]) -> None:
        """Copy only these shards. Of a parameter that lies partly in them, copy only that part."""
        for shard in shards:
            for placed, start, stop in self.parts_in(shard):
                placed.write(start, vector[start:stop])
        if any(shard.role == "buffers" for shard in shards):  # the buffers' shards always arrive together
            for placed in self.buffers:
                placed.tensor.copy_(placed.of(vector))

    @cached_property
    def cut(self) -> dict[int, list[tuple[Placed, int, int]]]:
        """By shard of parameters: `parts_in`."""
        return {shard.index: self.parts_in(shard) for shard in self.layout.shards if shard.role == "parameters"}

    def pieces_of(self, values: Callable[[Placed], torch.Tensor]) -> dict[int, Pieces]:
        """By shard: what `values` returns of each parameter (1-D, all of its words), cut as shards are."""
        flat = {id(placed): values(placed) for placed in self.parameters}
        return {
            shard: Pieces(flat[id(p)][start - p.entry.start : stop - p.entry.start] for p, start, stop in parts)
            for shard, parts in self.cut.items()
        }

    def in_place(self) -> dict[int, Pieces]:
        """The parameters, by shard, for a server that steps them where they lie; none if servers keep other bytes. Nor
        of a GPU: a norm has other bits there than on a host, and a server's thread would not know the script's streams.
        """
        plain = all(
            type(one) is torch.nn.Parameter and one.dtype is torch.float32 and one.is_contiguous() and one.is_cpu
            for one in (placed.tensor for placed in self.parameters)
        )
        return self.pieces_of(Placed.words) if plain else {}

    @torch.no_grad()
    def follow(self, pieces: Mapping[int, Pieces]) -> None:
        """Copy what is stepped in place into parameters that a script has given other memory (``.data = ...``)."""
        for shard, parts in self.cut.items():
            for (placed, start, _), words in zip(parts, pieces[shard].parts, strict=True):
                first = placed.tensor.data_ptr() + 4 * (start - placed.entry.start)
                if first != words.data_ptr() or not placed.tensor.is_contiguous():
                    placed.write(start, words)

    def set_gradients(self, pieces: Mapping[int, Pieces]) -> None:
        """Set ``.grad`` of each parameter from the shards' pieces, in their memory if it is in one."""
        of: dict[int, list[torch.Tensor]] = {id(placed): [] for placed in self.parameters}
        for shard, parts in self.cut.items():
            for (placed, _, _), part in zip(parts, pieces[shard].parts, strict=True):
                of[id(placed)].append(part)
        for placed in self.parameters:
            found = of[id(placed)] or [torch.zeros(0, dtype=torch.float32, device="cpu")]
            follow = all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(found))
            flat = found[0].as_strided((placed.tensor.numel(),), (1,)) if follow else torch.cat(found)
            placed.tensor.grad = flat.view(placed.tensor.shape)

    def parts_in(self, shard: Shard) -> list[tuple[Placed, int, int]]:
        """The parameters in a shard, each with its first word and the word after its last (words of the vector)."""
        found = ((p, max(p.entry.start, shard.start), min(p.entry.stop, shard.stop)) for p in self.parameters)
        return [(placed, start, stop) for placed, start, stop in found if start < stop]


def optimizer_of(tensors: ModelTensors, config: JobConfig) -> torch.optim.Optimizer:
    """The job's optimizer over the model's parameters. Before a step set each group's lr, to lr_scale * the rate."""
    of_group: dict[int, list[torch.nn.Parameter]] = {}
    for placed in tensors.parameters:
        assert isinstance(placed.tensor, torch.nn.Parameter)
        of_group.setdefault(placed.entry.spec.group, []).append(placed.tensor)
    settings = [settings_of(config, group) for group in of_group]
    optimizer = build_optimizer(config.optimizer, list(zip(of_group.values(), settings, strict=True)))
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group["lr_scale"] = own.lr_scale
    return optimizer


def weights_hash(model: torch.nn.Module) -> str:
    """Return the sha256 over the names, dtypes, shapes and bytes of the model's parameters and persistent buffers.

    What else is in its state_dict is in no version. The bytes of tables are left out: workers do not hold them.
    """
    own = {id(one) for one in (*model.parameters(), *model.buffers())}
    return state_hash({name: one for name, one in model.state_dict(keep_vars=True).items() if id(one) in own})


def state_hash(state: Named) -> str:
    """Return the sha256 of these tensors: see `weights_hash`."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        for part in plain_parts(tensor):
            digest.update(b"" if part.is_meta else _raw(part))
    return digest.hexdigest()


def _tables(model: torch.nn.Module, config: JobConfig) -> dict[str, list[torch.nn.Embedding]]:
    """The embeddings whose rows stay on the servers, by the name of their weight."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    tables: dict[str, list[torch.nn.Embedding]] = {}
    for module in model.modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            name = names[id(module.weight)]
            if why := _refused(module, name, config):
                raise ModelError(f"{name} cannot be a table: {why}")
            assert isinstance(module, torch.nn.Embedding)
            tables.setdefault(name, []).append(module)
    return tables


def _refused(module: torch.nn.Embedding | torch.nn.EmbeddingBag, name: str, config: JobConfig) -> str:
    """Why this embedding cannot be a table; "" if it can."""
    if isinstance(module, torch.nn.EmbeddingBag):
        return "a sparse gradient is supported of torch.nn.Embedding only; use one and reduce its rows, or sparse=False"
    if not module.weight.is_meta:
        return "it has weights here; declare it with device='meta' (the servers make its first rows), or sparse=False"
    if not module.weight.requires_grad or module.weight.dtype != torch.float32 or not module.weight.numel():
        return "it must be fp32, trainable and not empty"
    if module.padding_idx is not None or module.max_norm is not None or module.scale_grad_by_freq:
        return "padding_idx, max_norm and scale_grad_by_freq are not supported with sparse=True"
    why = why_not(config.mode.name, Feature.TABLES, config.features)
    return why or refusal(config.optimizer)


def _spec(name: str, tensor: torch.Tensor, group: int) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), _type(tensor), group)


def hash_of(tensor: torch.Tensor) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in plain_parts(tensor):
        digest.update(_raw(part))
    return digest.hexdigest()


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor, or the plain ones of which it is made, as torchao's quantised weights are."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in plain_parts(getattr(tensor, name))]


def _raw(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


# ---- Parameters that are late: whatever reads one of them waits until its new values are installed ----

Settle = Callable[[torch.nn.Parameter], None]

_GETTERS = (
    "_post_accumulate_grad_hooks", "_version", "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf",
    "is_meta", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape",
)  # fmt: skip
_METHODS = (
    "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "ndimension", "nelement", "numel",
    "size", "storage_offset", "stride",
)  # fmt: skip
_READ_NO_VALUES = frozenset({
    *(getattr(torch.Tensor, name).__get__ for name in _GETTERS), *(getattr(torch.Tensor, name) for name in _METHODS),
    *(getattr(torch.Tensor.grad, name) for name in ("__set__", "__delete__")),
})  # fmt: skip


def late_kind(settle: Settle, before: Callable[[], None] = lambda: None) -> type[torch.nn.Parameter]:
    """Return a class for late parameters. Set a parameter's `__class__` to it, and later back to torch's own class.

    Torch calls `__torch_function__` of a subclass with every function that gets such a tensor as an argument, from
    whichever module: `settle` is called for it first. It must set the class back. A parameter of torch's own class
    costs nothing. `before` is called once for such a function, before the first `settle`.
    """

    class Late(torch.nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:  # fmt: skip
            if func in _READ_NO_VALUES:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            before()
            for parameter in _among((*args, *(kwargs or {}).values()), cls):
                settle(parameter)
            return func(*args, **(kwargs or {}))

    return Late


def _among(values: Iterable[Any], kind: type[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """The parameters of this class among a call's arguments, and in lists and dictionaries of them."""
    found: list[torch.nn.Parameter] = []
    for value in values:
        if type(value) is kind:
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _among(value, kind)
        elif isinstance(value, dict):
            found += _among(value.values(), kind)
    return found
