"""When a process of one rank that has died is started again. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_PAUSES_S = (0.0, 0.2, 1.0, 3.0)  # seconds before the next start, after the first, second, ... quick death


@dataclass(slots=True)
class Upkeep:
    """Counts quick deaths in a row, by role. A process that dies within `quick_s` seconds has died quickly."""

    quick_s: float = 10.0
    quick_deaths: int = 12
    _quick: Counter[str] = field(default_factory=Counter)

    def died(self, role: str, ran_s: float) -> float | None:
        """Return in how many seconds another is started; None: never, too many have died soon after their start."""
        self._quick[role] = self._quick[role] + 1 if ran_s <= self.quick_s else 1
        if self._quick[role] > self.quick_deaths:
            return None
        return _PAUSES_S[min(self._quick[role] - 1, len(_PAUSES_S) - 1)]
