"""A model's tensors and their places in the flat vector: trained parameters and shared buffers."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

from rallypoint.config import JobConfig, group_of, matrices_of, ranks_of
from rallypoint.core.layout import Entry, Layout, Shard, TensorSpec, build_layout
from rallypoint.core.modes import Feature, why_not
from rallypoint.core.optimizer import ENTRY
from rallypoint.errors import ModelError
from rallypoint.optim.rows import refusal
from rallypoint.worker.carried import Carried, Carry
from rallypoint.worker.model_checks import check_apart, check_kept, check_model, check_trained


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of the model and its place in the flat vector."""

    tensor: torch.Tensor
    entry: Entry

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """Return this tensor's part of a flat fp32 vector, in the tensor's shape (a buffer's also in its dtype)."""
        return self.of_part(vector, 0)

    def words(self) -> torch.Tensor:
        """Return the tensor as its words of the flat vector: 1-D fp32.

        For a contiguous fp32 parameter this is a view.
        """
        if self.entry.spec.group >= 0:
            return self.tensor.detach().reshape(-1)
        words = torch.zeros(self.entry.stop - self.entry.start, dtype=torch.float32, device="cpu")
        self.of_part(words, self.entry.start).copy_(self.tensor)
        return words

    def write(self, start: int, values: torch.Tensor) -> None:
        """Set the part of a parameter that begins at word `start` of the vector (1-D fp32 values)."""
        words, first = self.words(), start - self.entry.start
        words[first : first + len(values)].copy_(values)
        if words.data_ptr() != self.tensor.data_ptr():  # not contiguous: `words` is a copy
            self.tensor.copy_(words.view(self.tensor.shape))

    def swap(self, start: int, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """Swap `values` (1-D fp32) with the part of a parameter that begins at word `start` of the vector.

        `scratch` (1-D fp32, on the parameter's device) bounds how much is swapped at once. On a GPU the copies are
        queued on the current stream, and `values` is pinned.
        """
        words, first = self.words(), start - self.entry.start
        for at in range(0, len(values), len(scratch)):
            there = values[at : at + len(scratch)]
            own, kept = words[first + at :][: len(there)], scratch[: len(there)]
            kept.copy_(own)
            own.copy_(there, non_blocking=True)
            there.copy_(kept, non_blocking=True)
        if words.data_ptr() != self.tensor.data_ptr():  # not contiguous: `words` is a copy
            self.tensor.copy_(words.view(self.tensor.shape))

    def of_part(self, vector: torch.Tensor, start: int) -> torch.Tensor:
        """Like `of`, for a `vector` whose first word is word `start` of the flat vector."""
        words = vector[self.entry.start - start : self.entry.stop - start]
        if self.entry.spec.group >= 0:
            return words.view(self.entry.spec.shape)
        raw = words.view(torch.uint8)[: self.tensor.numel() * self.tensor.element_size()]
        return raw.view(self.tensor.dtype).view(self.entry.spec.shape)


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
        shared = {name: b for name, b in model.named_buffers() if name in kept}
        check_kept(self.frozen, shared)
        moves = config.streamed or config.hold == "bf16"  # parameters get other memory now and then
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
        self.tables = list(tables.values())
        self.layout: Layout = build_layout(
            specs, config.shard_bytes, ranks_of(config), rows, matrices_of(config, specs)
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
        """Words `start` to `stop` of the flat vector, as a new 1-D fp32 CPU tensor; gaps between groups are zero."""
        vector = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        begin = bisect_right(self._in_order, start, key=lambda placed: placed.entry.stop)
        end = bisect_left(self._in_order, stop, key=lambda placed: placed.entry.start)
        for placed in self._in_order[begin:end]:
            first, last = max(start, placed.entry.start), min(stop, placed.entry.stop)
            if first < last:
                words = placed.words()[first - placed.entry.start : last - placed.entry.start]
                vector[first - start : last - start].copy_(words)
        return vector

    @torch.no_grad()
    def read_from(self, vector: torch.Tensor) -> None:
        """Copy parameters and buffers from a flat fp32 CPU vector."""
        for placed in (*self.parameters, *self.buffers):
            placed.tensor.copy_(placed.of(vector), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the caller reuses the vector after this

    @torch.no_grad()
    def read_shards_from(self, vector: torch.Tensor, shards: Sequence[Shard]) -> None:
        """Copy only these shards. Of a parameter that lies partly in them, copy only that part."""
        for shard in shards:
            for placed, start, stop in self.parts_in(shard):
                placed.write(start, vector[start:stop])
        if any(shard.role == "buffers" for shard in shards):  # the buffers' shards always arrive together
            for placed in self.buffers:
                placed.tensor.copy_(placed.of(vector))

    def parts_in(self, shard: Shard) -> list[tuple[Placed, int, int]]:
        """The parameters in a shard, each with its first word and the word after its last (words of the vector)."""
        touching = [p for p in self.parameters if p.entry.start < shard.stop and shard.start < p.entry.stop]
        return [(p, max(p.entry.start, shard.start), min(p.entry.stop, shard.stop)) for p in touching]


def weights_hash(model: torch.nn.Module) -> str:
    """Return the sha256 over the names, dtypes, shapes and bytes of the model's state_dict.

    The bytes of tables are left out, because workers do not hold them.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(b"" if tensor.is_meta else _raw(tensor))
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
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), group)


def hash_of(tensor: torch.Tensor) -> str:
    """Return a hash of a tensor's bytes."""
    return hashlib.blake2b(_raw(tensor), digest_size=16).hexdigest()


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()
