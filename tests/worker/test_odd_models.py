"""Tensors of a model that share memory, that are of unusual kinds, or that appear late: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.testing._internal.two_tensor import TwoTensor

import rallypoint as rp
from rallypoint.bridges.wrap import wrap_in
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.errors import ModelError, UsageError
from rallypoint.launch.embedded import EmbeddedJob
from rallypoint.parallel import persistent_buffers
from rallypoint.server.shard import first_that_became, float_ranges
from rallypoint.worker.loop import guard
from rallypoint.worker.tensors import hash_of, weights_hash

X = torch.linspace(-1, 1, 192).view(64, 3)
STEPS, BATCH = 6, 4
Change = Callable[[Any], None]


class Net(torch.nn.Module):
    """Two layers; `change` gives it what a test is about."""

    def __init__(self, change: Change | None = None, forward: Change | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = torch.nn.Linear(3, 5), torch.nn.Linear(5, 3)
        self.before_each = forward
        if change is not None:
            change(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before_each is not None:
            self.before_each(self)
        return self.last(torch.tanh(self.first(x)))


def train(model: torch.nn.Module, **settings: Any) -> dict[str, torch.Tensor]:
    with EmbeddedJob() as job:
        told: dict[str, Any] = {
            "batch": BATCH, "steps": STEPS, "reading.order": "sequential", "optimizer": rp.SGD(lr=0.1)
        }
        for micro in job.train(model, X, **{**told, **settings}):
            with micro:
                micro.backward(model(micro.batch).square().mean())
    return model.state_dict()


def train_plainly(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(X[BATCH * step : BATCH * (step + 1)]).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


# ---- memory that two tensors share ----


def ties_by_data(m: Any) -> None:
    m.last.weight.data = m.first.weight.data.t()


def ties_a_part(m: Any) -> None:
    m.last.bias.data = m.first.weight.data[1]


def shows_a_parameter(m: Any) -> None:
    m.register_buffer("shown", m.first.weight.data)


def shows_a_part(m: Any) -> None:
    m.register_buffer("shown", m.first.weight.detach()[1:, ::2])


def freezes_a_twin(m: Any) -> None:
    m.shown = torch.nn.Parameter(m.first.weight.data, requires_grad=False)


@pytest.mark.parametrize(("change", "sentence"), [
    (ties_by_data, r"parameters first\.weight and last\.weight share memory \(\.data\).*make them one parameter"),
    (ties_a_part, r"parameters first\.weight and last\.bias share memory"),
    (shows_a_parameter, r"shown shares memory with the parameter first\.weight.*\.clone\(\)"),
    (shows_a_part, r"shown shares memory with the parameter first\.weight"),
    (freezes_a_twin, r"shown shares memory with the parameter first\.weight"),
])  # fmt: skip
def test_memory_that_a_parameter_shares_is_refused_with_both_names(change: Change, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        train(Net(change))
    model = Net(change)
    with EmbeddedJob() as job, pytest.raises(ModelError, match=sentence):
        wrap_in(job, model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2, replicas=1)


def halves_of_one_matrix(m: Any) -> None:
    """Their ranges overlap, and no element is in both."""
    both = torch.randn(5, 8)
    m.first.weight, m.last.weight = torch.nn.Parameter(both[:, :3]), torch.nn.Parameter(both[:3, 3:])


def shows_for_now(m: Any) -> None:
    m.register_buffer("shown", m.first.weight.data, persistent=False)


def ties_as_one(m: Any) -> None:
    m.last.weight = torch.nn.Parameter(torch.randn(3, 5))
    m.again = torch.nn.Linear(5, 3, bias=False)
    m.again.weight = m.last.weight


@pytest.mark.parametrize("change", [halves_of_one_matrix, shows_for_now, ties_as_one])
def test_memory_that_does_no_harm_trains_as_plain_pytorch(change: Change) -> None:
    model, twin = Net(change), Net(change)
    check_equal(train(model), train_plainly(twin))
    if change is shows_for_now:
        assert torch.equal(model.shown, model.first.weight)


def test_a_view_of_a_parameter_that_gets_other_memory_is_refused() -> None:
    with pytest.raises(ModelError, match=r"shown shares memory with the parameter first\.weight"):
        train(Net(shows_for_now), precision="bf16", **{"memory.hold": "bf16"})


# ---- buffers that appear late ----


def makes_a_buffer(m: Any) -> None:
    if not hasattr(m, "seen"):
        m.register_buffer("seen", torch.zeros(3))


def makes_a_layer_with_one(m: Any) -> None:
    if not hasattr(m, "norm"):
        m.norm = torch.nn.BatchNorm1d(5, affine=False)


def makes_a_cache(m: Any) -> None:
    if not hasattr(m, "seen"):
        m.register_buffer("seen", torch.zeros(3), persistent=False)


@pytest.mark.parametrize("settings", [{}, {"sync": rp.AllReduce()}, {"memory.parameters": "streamed"}], ids=str)
@pytest.mark.parametrize(("forward", "name"), [(makes_a_buffer, "seen"), (makes_a_layer_with_one, r"norm\.\w+")])
def test_a_buffer_that_the_first_forward_pass_makes_is_refused(
    forward: Change, name: str, settings: dict[str, Any]
) -> None:
    sentence = rf"buffer {name} came into the model after job\.train \(seen at step 0\).*run one batch first"
    with pytest.raises(UsageError, match=sentence):
        train(Net(forward=forward), **settings)


def test_a_cache_that_is_no_part_of_the_state_may_come_at_any_time() -> None:
    check_equal(train(Net(forward=makes_a_cache)), train_plainly(Net(forward=makes_a_cache)))


def test_a_buffer_that_each_forward_pass_sets_again_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """To list the model's state takes as long as the model is large."""
    looked: list[int] = []

    def counted(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        looked.append(1)
        return persistent_buffers(model)

    def sets_again(m: Any) -> None:
        m.seen = m.seen + 1

    def build() -> Net:
        return Net(lambda m: m.register_buffer("seen", torch.zeros(3)), forward=sets_again)

    monkeypatch.setattr(guard, "persistent_buffers", counted)
    check_equal(train(build()), train_plainly(build()))
    assert len(looked) == 1


# ---- tensors of all kinds ----

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [torch.complex128, torch.complex64, torch.complex32, torch.uint16, torch.uint32, torch.uint64, *FLOAT8]


def test_dense_buffers_of_every_type_travel_as_they_are() -> None:
    """Each forward pass changes them."""

    def has_all(m: Any) -> None:
        for number, dtype in enumerate(DTYPES):
            m.register_buffer(f"b{number}", torch.ones(number + 1).to(dtype))
        m.register_buffer("conjugate", torch.full((2,), 1 + 2j).conj())

    def counts(m: Any) -> None:
        for number, dtype in enumerate(DTYPES):
            own = getattr(m, f"b{number}")
            kind = torch.complex128 if dtype.is_complex else torch.float64
            own.copy_((own.to(kind) + 1).to(dtype))

    model, twin = Net(has_all, counts), Net(has_all, counts)
    found, expected = train(model), train_plainly(twin)
    for name in expected:
        assert torch.equal(_numbers(found[name]), _numbers(expected[name])), name
    assert weights_hash(model) == weights_hash(twin)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def test_complex_numbers_of_16_bytes_lie_where_they_can_be_viewed() -> None:
    specs = [("w", (3,), "float32", 0), ("c", (2,), "complex128", -1), ("u", (1,), "uint8", -1)]
    layout = build_layout([TensorSpec(*spec) for spec in specs])
    entry = next(entry for entry in layout.entries if entry.spec.name == "c")
    vector = torch.zeros(layout.words)
    assert vector[entry.start : entry.stop].view(torch.uint8).view(torch.complex128).shape == (2,)


@pytest.mark.parametrize(("dtype", "word"), [("complex128", 6), ("complex64", 3), ("complex32", 1)])
def test_an_imaginary_part_that_became_infinite_is_found(dtype: str, word: int) -> None:
    """Of the second number: `word` is the one that holds it."""
    layout = build_layout([TensorSpec("w", (3,), "float32", 0), TensorSpec("c", (2,), dtype, -1)])
    shard = next(shard for shard in layout.shards if shard.role == "buffers")
    old, new = torch.zeros(shard.words), torch.zeros(shard.words)
    ranges = float_ranges(shard, layout.entries)
    assert first_that_became(ranges, new, old) == -1
    kind = getattr(torch, dtype)
    new.view(torch.uint8)[: 2 * kind.itemsize].view(kind)[1] = torch.complex(torch.tensor(0.0), torch.tensor(torch.inf))
    assert first_that_became(ranges, new, old) == word


@pytest.mark.parametrize("dtype", FLOAT8)
def test_a_number_of_8_bits_that_became_nan_is_found(dtype: torch.dtype) -> None:
    layout = build_layout([TensorSpec("w", (3,), "float32", 0), TensorSpec("c", (7,), str(dtype)[6:], -1)])
    shard = next(shard for shard in layout.shards if shard.role == "buffers")
    old, new = torch.zeros(shard.words), torch.zeros(shard.words)
    new.view(dtype)[5] = torch.nan
    assert first_that_became(float_ranges(shard, layout.entries), new, old) == 1


def checkpoints(m: Any) -> None:
    m.first = checkpoint_wrapper(torch.nn.Sequential(m.first, torch.nn.BatchNorm1d(5)))


def test_buffers_inside_of_a_wrapper_that_takes_its_name_out_of_the_state_dict_are_shared() -> None:
    """Each forward pass counts twice, as the backward pass repeats it; of two replicas those of the first are kept."""
    found = train(Net(checkpoints), replicas=2)
    assert int(found["first.1.num_batches_tracked"]) == 2 * STEPS


class WithNotes(Net):
    """Keeps something of its own beside its weights, as layers that count what they have seen do."""

    notes = torch.zeros(0)

    def get_extra_state(self) -> torch.Tensor:
        return self.notes

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.notes = state


@pytest.mark.parametrize("notes", [torch.eye(3).to_sparse(), torch.ones(2)], ids=["sparse", "dense"])
def test_the_last_line_is_of_what_versions_have_whatever_else_the_state_dict_has(
    notes: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a process keeps for itself is in no version: other processes may keep other things."""
    model, plain = WithNotes(), Net()
    model.notes = notes
    train(model)
    train(plain)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("weights sha256")]
    assert said == [f"weights sha256 {weights_hash(plain)}"] * 2


def test_a_frozen_weight_made_of_several_tensors_is_told_by_all_of_them() -> None:
    """As torchao's quantised weights are, whose bytes torch does not show as one."""
    halves = torch.arange(4.0), torch.arange(4.0) + 1
    made = {hash_of(TwoTensor(*pair)) for pair in (halves, halves[::-1], (halves[0], halves[0]))}
    assert len(made) == 3
    assert hash_of(TwoTensor(*(half.clone() for half in halves))) in made

    model, plain = Net(), Net()
    for one in (model, plain):
        one.register_parameter("base", torch.nn.Parameter(TwoTensor(*halves), requires_grad=False))
    train(model)
    assert weights_hash(model) != weights_hash(plain)
    assert torch.equal(model.base.b, halves[1])


def buffer(make: Callable[[], torch.Tensor]) -> Change:
    return lambda m: m.register_buffer("odd", make())


def frozen(make: Callable[[], torch.Tensor]) -> Change:
    return lambda m: m.register_parameter("odd", torch.nn.Parameter(make(), requires_grad=False))


@pytest.mark.parametrize(("change", "sentence"), [
    (buffer(lambda: torch.eye(3).to_sparse()), "buffer odd is sparse_coo.*to_dense"),
    (buffer(lambda: torch.zeros(3, device="meta")), "buffer odd is on the meta device"),
    (buffer(lambda: torch.zeros(1).expand(5)), r"buffer odd is an expanded view.*\.clone\(\)"),
    (buffer(lambda: torch.zeros(6).as_strided((4, 3), (1, 1))), "buffer odd is an expanded view"),
    (buffer(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)), "buffer odd is quantized"),
    (frozen(lambda: torch.eye(3).to_sparse()), "frozen parameter odd is sparse_coo"),
    (frozen(lambda: torch.zeros(3, device="meta")), "frozen parameter odd is on the meta device"),
])  # fmt: skip
def test_what_cannot_be_shared_is_refused_by_name(change: Change, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        train(Net(change))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["script", "trace"])
def test_torchscript_trains_as_the_model_that_it_was_made_of(kind: str) -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))

    made: torch.nn.Module = torch.jit.script(build()) if kind == "script" else torch.jit.trace(build(), X[:BATCH])
    if kind == "trace":  # tracing ran a batch through it
        made.load_state_dict(build().state_dict())
    check_equal(train(made), train_plainly(build()))


def test_parameters_that_are_tied_after_the_job_has_got_the_model_are_refused_too() -> None:
    model = Net()
    with EmbeddedJob() as job:
        run = iter(job.train(model, X, batch=BATCH, steps=STEPS, replicas=1, optimizer=rp.SGD(lr=0.1)))
        model.last.weight.data = model.first.weight.data.t()
        with pytest.raises(ModelError, match=r"parameters (first|last)\.weight and (first|last)\.weight share memory"):
            next(run)
