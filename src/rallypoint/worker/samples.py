"""What versions have of a stream that comes only once: replicas carry its ledger from step to step."""

from __future__ import annotations

import torch

from rallypoint.core.streams.ledger import ROW, ReadBy, ledger_of, noted
from rallypoint.data.streams.once import OnceItems
from rallypoint.worker.carried import Carried


def carried_ledger(replicas: int) -> Carried:
    """The rows of the ledger, one for each replica, as a state that it carries. They are on the CPU, wherever the model
    is: each micro-batch reads and writes one."""
    return Carried(torch.zeros(ROW, dtype=torch.int64, device="cpu"), replicas, torch.device("cpu"), name="samples")


class SampleLedger:
    """Counts the samples that this worker uses, in what its replicas carry. Main thread only."""

    def __init__(self, rows: Carried, items: OnceItems, *, worker: str, replicas: int) -> None:
        self._rows, self._items = rows, items
        self._worker, self._replicas = worker, replicas

    def used(self, replica: int) -> None:
        """The replica has used the micro-batch that was given to `OnceItems.computes` last."""
        items = self._items
        row = noted(self._row(replica), items.key, self._worker, used=items.in_batch, read=items.read)
        self._rows.give(replica, torch.tensor(row, dtype=torch.int64, device="cpu"))
        self._rows.keep()

    @property
    def readers(self) -> list[ReadBy]:
        """The ledger of the version that the model holds."""
        return ledger_of(self._row(replica) for replica in range(self._replicas))

    def _row(self, replica: int) -> list[int]:
        row = self._rows.of(replica)
        assert isinstance(row, torch.Tensor)
        numbers: list[int] = row.tolist()
        return numbers
