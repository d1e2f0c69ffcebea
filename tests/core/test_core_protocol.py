"""Control messages survive the wire; garbage is a ProtocolError and nothing else."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.core import protocol as m
from rallypoint.core.decisions import StopWhen
from rallypoint.core.job import JobRecord
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.protocol import Drain, Evaluated, Evaluates, Ordered, Pause, Reached, Sampled, ScriptAt, Updated
from rallypoint.core.typed import LONGEST_NAME, LONGEST_TEXT
from rallypoint.core.view import Assignment, EarlyEnd, Member, StandingOrders, View, ViewNumber, canonical, difference
from rallypoint.errors import ProtocolError

LAYOUT = build_layout([TensorSpec("w", (30, 3), "float32", 0), TensorSpec("b", (3,), "float32", 1)], shard_bytes=128)
RECORD = JobRecord({"replicas": 2, "optimizer": {"type": "sgd", "lr": 0.1}}, LAYOUT, 9, {"frozen": "00ff"})
MEMBERS = (Member("w0", "here"),), (Member("s0", "there", "127.0.0.1:1"),)
VIEW = View(
    ViewNumber(3, 4), ViewNumber(2, 1), *MEMBERS, assignments=(Assignment(0, {"w0": (0, 1)}), Assignment(7,
        {"w0": (1,), "w1": (0,)})),
    primary={0: "s0", 1: "s0"}, backup={1: "s1"}, paired={1: ViewNumber(2, 3)},
    origin="step-00000004-1", uploader="w0", orders=StandingOrders(EarlyEnd(7, "enough", "w0"), ending=True),
)  # fmt: skip
EXAMPLES: list[m.Message] = [
    m.Challenge(b"\0" * 32, "server", "s0"),
    m.Hello("worker", "w0", "here", "", 7, ViewNumber(1, 2), ("server", "s0", 3), b"\1" * 32),
    m.Welcome({"steps": 3}, "runs/x", (5, 7), "s3://snapshots", "none", 1.5), m.Refused("because"),
    m.Propose(RECORD, bytes(16)),
    m.Beat(), m.Report(1, 2, 0.5, 1.0, 32, 0.25, ViewNumber(2, 1)), m.Applied(3, 2, 1e9, {"w0": 0.5}, ViewNumber(2, 1)),
    m.Accounted(7, 2, 1, 3, {0: 4, 5: 6}, ViewNumber(2, 1)), m.CaughtUp({0: ViewNumber(2, 1), 4: ViewNumber(3, 4)}),
    m.Disproved(3, 7, ViewNumber(2, 1)),
    m.Leaving(), m.Stored("step-00000004-1", {"s0.shards": 9}, {0: ("s0.shards", 0, 9, "00ff")}),
    m.NotStored("step-00000004-1", "no room", 5), m.SnapshotWanted(), m.Resize(4), m.Metrics(3, {"val_loss": 0.25}),
    m.Say("words"), m.Skipped(4, (0, 1), ViewNumber(2)),
    m.Stop(7, "enough", 6, ViewNumber(2, 1)),
    m.Done(ViewNumber(2, 1)), m.GiveUp("tired"), m.Admitted(7, b"\1" * 32), m.Prepare(RECORD),
    m.NewView(VIEW, {"s0": b"\2" * 32}, b"\3" * 32),
    m.ViewChange(difference(VIEW, canonical(msgspec.structs.replace(VIEW, workers=(), uploader=""))), {}, b"\3" * 32),
    m.Assist(3, 1),
    m.Capture("step-00000004-1", 4), m.Finished("w0"), m.Aborted("why"),
    ScriptAt(1, 20, 4000, ended=True, worker="w1"),
    m.Planned(9, 2, "tokens", 93, 3, ("w0",), ("s0",)), m.StepDone(8, 0.1, 64, 2), m.Waiting("for you"),
    m.Knows(VIEW, b"\4" * 32), m.Held("here"), m.Release(),
    Evaluates((3, 70), (StopWhen(metric="loss", patience=3),)),
    Evaluated(7, ViewNumber(2, 1), {"val_loss": 0.25}), Evaluated(7, ViewNumber(2, 1), None),
    m.Contributed(7, 1, 0.5, bytes(32), ViewNumber(2, 1)), Updated(8, 3, bytes(16), ViewNumber(2, 1)),
    m.AuditFound(7, 1, 3, ("w0", "w2"), ("w1",), ViewNumber(2, 1)),
    m.Members("1.2", ("w0",), ("w1",), ("s0",), 3), m.Snapshotted("step-00000004-1", 4, 1000, 0.5),
    Pause(False), m.StopWanted("enough"), Drain("w0"), m.SnapshotEvery(60.0), Ordered("Pause", "paused", refused=True),
    Reached(7, ViewNumber(2, 1)), m.Unrestored("file 0 is damaged", ViewNumber(2, 1)),
    Sampled(5.0, 0.5, 6, 8, gpus=(m.GpuSample(0.5, 1, 2),), links={"h:1": m.LinkSample(0.1, 1.0, 2.0)}),
]  # fmt: skip
JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: m.Message) -> None:
    assert m.decode(m.encode(message)) == message
    assert m.expect(m.encode(message), type(message)) == message


def test_every_message_has_an_example_here() -> None:
    assert {type(example) for example in EXAMPLES} == set(m.Message.__args__)  # type: ignore[attr-defined]


@given(
    st.text(), st.text(), st.text(), st.binary(), st.text(), st.integers(0, 2**63 - 1),
    st.builds(ViewNumber, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
)  # fmt: skip
def test_any_greeting_survives_the_wire(
    role: str, id: str, host: str, nonce: bytes, address: str, incarnation: int, view: ViewNumber
) -> None:
    hello = m.Hello(role, id, host, address, incarnation, view, (role, id, incarnation), nonce)
    assert m.expect(m.encode(hello), m.Hello) == hello


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="a control message that cannot be read"):
        m.decode(data)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_damaged_message_is_a_message_or_refused(message: m.Message, draw: st.DataObject) -> None:
    data = bytearray(m.encode(message))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    data = data[: draw.draw(st.integers(0, len(data)))]
    with contextlib.suppress(ProtocolError):
        m.decode(data)


@given(st.sampled_from([kind.__name__ for kind in m.Message.__args__]), st.dictionaries(st.text(max_size=8), JSONISH))  # type: ignore[attr-defined]
def test_any_fields_make_a_message_or_are_refused(tag: str, fields: dict[str, object]) -> None:
    with contextlib.suppress(ProtocolError):
        m.decode(msgspec.msgpack.encode({**fields, "type": tag}))


@pytest.mark.parametrize("size", [1_000, 1_000_000])
def test_deep_nesting_is_refused(size: int) -> None:
    data = b"\x82\xa4type\xa7Welcome\xa9overrides\x81\xa1a" + b"\x91" * size
    with pytest.raises(ProtocolError):
        m.decode(data)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown field"):
        m.decode(msgspec.msgpack.encode({"type": "Done", "extra": 1}))


def test_another_message_than_expected_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="a Done message where Hello was expected"):
        m.expect(m.encode(m.Done(ViewNumber(2, 1))), m.Hello)


EVIL = "\x1b[2J\x1b]0;owned\x07\u202eall is well\x9b"


@pytest.mark.parametrize(
    "kind", [m.Say, m.GiveUp, m.Refused, m.Aborted, m.Waiting, lambda text: m.NotStored("s", text)]
)
def test_text_that_is_shown_has_no_control_characters(kind: type[m.Say]) -> None:
    """Whoever made it: a peer need not use our encoder."""
    raw = msgspec.to_builtins(kind("a"))
    field = "reason" if "reason" in raw else "text"
    got = m.decode(msgspec.msgpack.encode({**raw, field: f"one\ntwo {EVIL}" + "x" * 100_000}))
    text = getattr(got, field)
    assert text.isprintable()
    assert text.startswith("one two \\x1b[2J")
    assert len(text) < LONGEST_TEXT + 200


NAMED = {
    "a metric": lambda name: m.Metrics(1, {name: 0.5}),
    "a late worker": lambda name: m.Applied(1, 1, 0.0, {name: 0.5}),
    "a snapshot": lambda name: m.NotStored(name, "because"),
    "a file": lambda name: m.Stored("s", {name: 1}, {0: ("f", 0, 1, "0")}),
    "settings": lambda name: m.Report(0, 0, 0.0, 1.0, 1, settings=name),
    "a shard's file": lambda name: m.Stored("s", {"f": 1}, {0: (name, 0, 1, "0")}),
}


@pytest.mark.parametrize("what", NAMED)
@pytest.mark.parametrize("name", [EVIL, "x" * (LONGEST_NAME + 1)], ids=["controls", "long"])
def test_a_name_with_control_characters_or_a_long_one_is_refused(what: str, name: str) -> None:
    assert m.decode(m.encode(NAMED[what]("a name")))
    with pytest.raises(ProtocolError):
        m.decode(m.encode(NAMED[what](name)))


def test_the_number_of_names_is_bounded() -> None:
    figures = {str(number): 0.0 for number in range(m.MOST_MEMBERS + 1)}
    for message in (m.Metrics(1, figures), m.Applied(1, 1, 0.0, figures)):
        with pytest.raises(ProtocolError):
            m.decode(m.encode(message))
