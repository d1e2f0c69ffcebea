"""All workers of a job propose the same record: it is checked once, and a changed one is checked again."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from rallypoint.coordinator import connections as checks
from rallypoint.coordinator.connections import Checks
from rallypoint.core.protocol import Beat, Hello, Message, Propose, decode, encode
from rallypoint.errors import ProtocolError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # its modules import one another by name

from scale_cluster import Size, record_for


def proposal(workers: int = 2) -> Message:
    """A proposal as it comes from the network."""
    return decode(encode(Propose(record_for(Size(workers=workers, servers=1)))))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """The messages that were checked in full."""
    seen: list[Message] = []
    whole = checks.checked

    def checked(message: Message, sender: Hello) -> Message:
        seen.append(message)
        return whole(message, sender)

    monkeypatch.setattr(checks, "checked", checked)
    return seen


def test_the_same_record_from_many_workers_is_checked_once(counted: list[Message]) -> None:
    check = Checks()
    for number in range(5):
        check.checked(proposal(), Hello("worker", f"w{number}", "host", ""))
    assert len(counted) == 1


def test_another_record_is_checked_again(counted: list[Message]) -> None:
    check, sender = Checks(), Hello("worker", "w0", "host", "")
    check.checked(proposal(2), sender)
    check.checked(proposal(3), sender)
    assert len(counted) == 2


def test_a_record_that_is_not_sound_is_refused_each_time_also_after_a_sound_one() -> None:
    check, sender = Checks(), Hello("worker", "w0", "host", "")
    sound = proposal()
    assert isinstance(sound, Propose)
    wrong = Propose(msgspec.structs.replace(sound.record, rounds=sound.record.rounds + 1))
    check.checked(sound, sender)
    for _ in range(2):
        with pytest.raises(ProtocolError, match="something else than its settings"):
            check.checked(wrong, sender)


def test_who_may_not_propose_is_refused_with_a_record_that_is_known_to_be_sound() -> None:
    check = Checks()
    check.checked(proposal(), Hello("worker", "w0", "host", ""))
    with pytest.raises(ProtocolError, match="a Propose message from server s0"):
        check.checked(proposal(), Hello("server", "s0", "host", ""))
    check.checked(Beat(), Hello("server", "s0", "host", ""))
