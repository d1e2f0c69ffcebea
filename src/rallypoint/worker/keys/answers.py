"""What a store's worker has asked for, and what has come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Value = tuple[int, bytearray]  # a version of a shard, and its bytes


@dataclass(slots=True)
class Answers:
    """Values that have come. The exchange's lock guards it.

    Attributes:
        asked: by number of a request, its answer; None until it is here.
        with_push: by shard, the value that came with the last acknowledgement of a push.
    """

    asked: dict[int, Value | None] = field(default_factory=dict)
    with_push: dict[int, Value] = field(default_factory=dict)

    def came(self, numbers: Iterable[int], version: int, data: bytearray) -> None:
        """A value answers these requests."""
        self.asked.update({number: (version, data) for number in numbers if number in self.asked})

    def here(self, numbers: Iterable[int]) -> bool:
        """True if all of these requests have their answers."""
        return all(self.asked.get(number) is not None for number in numbers)

    def take(self, number: int) -> bytearray:
        """Take the answer of a request out."""
        answer = self.asked.pop(number)
        assert answer is not None, f"request {number} has no answer yet"
        return answer[1]

    def clear(self) -> None:
        """A new generation: what was asked for has no answer any more."""
        self.asked.clear()
        self.with_push.clear()
