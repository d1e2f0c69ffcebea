"""What a store's worker checks: what servers claim, and what a script gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import rallypoint as rp
from rallypoint.config import of_group
from rallypoint.core.layout import Layout
from rallypoint.core.policy import Async, ServerPolicy, Sync
from rallypoint.errors import ConfigError, ProtocolError, UsageError
from rallypoint.net.frames import LATEST, SKIP, Header, Kind, wants
from rallypoint.worker.keys import DenseKey, KeySettings, TableKey, declared
from rallypoint.worker.keys_exchange import KeyArrivals, KeyExchange

STEPS, CONTRIBUTORS, NBYTES = 9, 2, 16


class Arrivals(KeyArrivals):
    """Whatever is `heard` was not refused."""

    heard: list[tuple[Any, ...]]

    def valued(self, *what: Any) -> None:
        self.heard.append(what)

    def answered(self, *what: Any) -> None:
        self.heard.append(what)


def arrivals(sync: ServerPolicy) -> Arrivals:
    settings = cast(KeySettings, {"steps": STEPS, "contributors": CONTRIBUTORS, "sync": sync})
    config, layout = declared({"w": (4,)}, settings, {})
    exchange = SimpleNamespace(layout=layout, config=config, machine=None, answers=None)
    taken = Arrivals(cast(KeyExchange, exchange))
    taken.heard = []
    return taken


ROWS = Header(Kind.ROWS, length=NBYTES)
VALUE = Header(Kind.VERSION, length=NBYTES, wants=wants(1))


@pytest.mark.parametrize(
    ("sync", "most"), [(Sync(), STEPS), (Async(), STEPS * CONTRIBUTORS)], ids=["rounds", "streaming"]
)
def test_a_version_that_a_key_never_gets_to_is_refused(sync: ServerPolicy, most: int) -> None:
    """Else a worker would take its own pushes for counted."""
    taken = arrivals(sync)
    taken.rows(ROWS._replace(step=most), bytearray(NBYTES))
    assert len(taken.heard) == 1
    for flags in (0, SKIP):
        for step in (most + 1, LATEST):
            with pytest.raises(ProtocolError, match=f"has {most} at most"):
                taken.rows(ROWS._replace(step=step, flags=flags, length=0 if flags else NBYTES), bytearray(NBYTES))
    with pytest.raises(ProtocolError, match=f"has {most} at most"):
        taken.arriving(VALUE._replace(step=most + 1), "s")
    assert len(taken.heard) == 1


def test_a_clock_that_a_contributor_never_gets_to_is_refused() -> None:
    taken = arrivals(Async())
    assert taken.arriving(VALUE._replace(base=STEPS), "s") is not None
    taken.landed(0)
    assert len(taken.heard) == 1
    with pytest.raises(ProtocolError, match=f"step {STEPS + 1} of {STEPS}"):
        taken.arriving(VALUE._replace(base=STEPS + 1), "s")


def test_contributors_shards_and_lengths_that_a_store_does_not_have_are_refused() -> None:
    taken = arrivals(Async())
    for header in (VALUE._replace(wants=wants(CONTRIBUTORS)), VALUE._replace(shard=1), VALUE._replace(length=12)):
        with pytest.raises(ProtocolError):
            taken.arriving(header, "s")
    with pytest.raises(ProtocolError, match="there are 2"):
        taken.to_wait(CONTRIBUTORS, 0)
    with pytest.raises(ProtocolError):
        taken.rows(ROWS, bytearray(12))
    assert taken.heard == []


# ---- what a script gives ----


@pytest.fixture
def layout() -> Layout:
    keys = {"w": torch.zeros(2, 3), "one": torch.zeros(()), "t": torch.empty(40, 2, device="meta")}
    return declared(keys, {"steps": STEPS}, {})[1]


def dense(layout: Layout, name: str) -> DenseKey:
    return DenseKey(next(entry for entry in layout.entries if entry.spec.name == name), layout)


def read(key: DenseKey | TableKey, parts: dict[int, memoryview], rows: Any = None) -> torch.Tensor:
    reading = key.reading(rows)
    reading.check(None)
    return reading.filled({shard: bytearray(data) for shard, data in parts.items()}, None)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def _other_default(request: pytest.FixtureRequest) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_other_default")
def test_values_are_fp32_whatever_the_scripts_default_is(layout: Layout) -> None:
    key, table = dense(layout, "w"), TableKey(0, layout)
    values = torch.arange(6.0, dtype=torch.float32).view(2, 3) / 3
    back = read(key, key.pushed(values, None))
    assert back.dtype == torch.float32
    assert torch.equal(back, values)
    pushed = table.pushed(torch.full((3, 2), 1 / 3), torch.tensor([5, 1, 5]))
    assert sum(map(len, pushed.values())) == 4 * len(pushed) + 2 * (4 + 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_other_dtypes_are_converted(layout: Layout, dtype: torch.dtype) -> None:
    key = dense(layout, "w")
    assert torch.equal(read(key, key.pushed(torch.ones(2, 3, dtype=dtype), None)), torch.ones(2, 3))


def test_a_key_of_no_dimension_is_one_number(layout: Layout) -> None:
    key = dense(layout, "one")
    assert read(key, key.pushed(torch.tensor(2.5), None)).item() == 2.5


def test_rows_may_have_any_shape(layout: Layout) -> None:
    table = TableKey(0, layout)
    given: list[tuple[Any, tuple[int, ...]]] = [
        (torch.tensor(7), ()), ([], (0,)), (torch.empty(0, 3), (0, 3)), (range(3), (3,)), ([[1, 2]], (1, 2)),
    ]  # fmt: skip
    for rows, shape in given:
        assert table.pushed(torch.ones(*shape, 2), rows)
        wanted = table.reading(rows).wanted
        assert sum(nbytes for _, nbytes in wanted.values()) == 8 * torch.empty(shape).numel()


@pytest.mark.parametrize("rows", [[[1], [2, 3]], [1 << 70], "ab", [0.5], [True]], ids=str)
def test_rows_that_are_no_whole_numbers_are_told(layout: Layout, rows: Any) -> None:
    with pytest.raises(UsageError, match="rows of key t are whole numbers"):
        TableKey(0, layout).reading(rows)


def test_an_optimizer_by_the_first_part_of_names_is_each_keys_own() -> None:
    keys = {"g.a": (4,), "g.b": (4,), "d": (4,)}
    both = {"g": rp.Adam(lr=0.1), "d": rp.SGD(lr=0.2)}
    config, layout = declared(keys, {"steps": STEPS, "optimizer": both}, {})
    own = {entry.spec.name: of_group(config, entry.spec.group).optimizer for entry in layout.entries}
    assert own == {"g.a": both["g"], "g.b": both["g"], "d": both["d"]}


@pytest.mark.parametrize(("optimizer", "overrides", "sentence"), [
    ({"g": rp.Adam()}, {}, "'d' has no optimizer: give each key one"),
    ({"g": rp.Adam(), "d": rp.SGD(), "e": rp.SGD()}, {}, "'e' is the first part of no key's name"),
    ({"g": rp.Adam(), "d": rp.SGD()}, {"optimizer": {"lr": 0.5}}, "optimizer is set, and the script gives each key"),
])  # fmt: skip
def test_optimizers_of_other_keys_are_refused(
    optimizer: dict[str, Any], overrides: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        declared({"g.a": (4,), "d": (4,)}, {"optimizer": optimizer}, overrides)
