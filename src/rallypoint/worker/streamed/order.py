"""The order in which passes of a model use its parameters: learnt in one pass, used to ask ahead in the next."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

MOST_USES = 1 << 16  # that are learnt of one pass
MOST_AHEAD = 1 << 10  # parameters: a server keeps so many requests of a worker, and more


class Order:
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
        """A pass begins."""
        self._seen, self._at = [], 0

    def use(self, index: int) -> None:
        """The pass uses a parameter."""
        if len(self._seen) < MOST_USES:
            self._seen.append(index)
        with suppress(ValueError):  # not in the pass before, or earlier there: the place stays
            self._at = self._known.index(index, self._at) + 1

    def end(self) -> None:
        """The pass is over."""
        if self._seen:
            self._known = self._seen
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
