"""Which scripts have ended in a job of sums, and which sums can therefore never be made."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EndedScripts:
    """The ranks whose scripts have ended, each with how many sums it has asked for.

    All scripts ask for the same sums in the same order. So a sum that comes after an ended script's last one would be
    waited for without an end (I8).
    """

    _by_rank: dict[int, tuple[int, str]] = field(default_factory=dict)  # rank -> sums, the worker's name

    def told(self, rank: int, sums: int, worker: str) -> None:
        """The script of that rank has ended after so many sums."""
        self._by_rank[rank] = sums, worker

    def refusal_of(self, sums: int) -> str:
        """Why sum number `sums` (the first one is 1) can never be made, as a sentence; "" if it can."""
        ended = [(rank, made, worker) for rank, (made, worker) in self._by_rank.items() if made < sums]
        if not ended:
            return ""
        rank, made, worker = min(ended, key=lambda one: (one[1], one[0]))
        return (
            f"rank {rank} ({worker}) has ended its script after {made:,} sums, and sum {made + 1:,} needs all ranks: "
            "let all of them make the same number of steps (as many batches on each), or let a script that ends early "
            "raise an error"
        )
