"""The loss scale in a shard of buffers: two words that follow from what servers decide, not from contributions."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rallypoint.config import JobConfig
from rallypoint.core.layout import Entry, Shard
from rallypoint.core.optimizer import ENTRY


class ScaleWords:
    """Reads and updates the loss scale in a shard's `master` (1-D fp32), where it has one."""

    def __init__(self, config: JobConfig, shard: Shard, entries: Iterable[Entry]) -> None:
        self._rule = config.loss_scale
        places = [e.start - shard.start for e in entries if e.spec.name == ENTRY and e.spec.group < 0]
        self._at = next((at for at in places if 0 <= at < shard.words), None)

    def scale(self, master: torch.Tensor) -> float:
        """The loss scale; 0 if it is in another shard, or there is none."""
        return 0.0 if self._at is None else float(master[self._at])

    def keep(self, master: torch.Tensor) -> tuple[float, ...]:
        """The words as they are before an update."""
        return () if self._at is None else tuple(master[self._at : self._at + 2].tolist())

    def advance(self, master: torch.Tensor, before: tuple[float, ...], *, skipped: bool) -> None:
        """Set the words after an update (`skipped`: that changes nothing else), from what they were before it."""
        if self._at is not None:
            scale, applied = before
            after = self._rule.after(scale, int(applied), skipped=skipped)
            master[self._at : self._at + 2] = torch.tensor(after, dtype=torch.float32, device="cpu")
