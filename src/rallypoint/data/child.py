"""What runs in a loader process: it leaves what it has inherited of the worker, and loads micro-batches."""

from __future__ import annotations

import os
import signal
import socket
import stat
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from rallypoint.data.loader import MicroBatches
from rallypoint.data.order import Place
from rallypoint.errors import RallypointError

Loaded = tuple[Place, Any, list[str], tuple[str, str]]  # the batch, what was skipped; or an error and its traceback

_OPEN = Path("/proc/self/fd")


class Requests(Dataset[Loaded]):
    """Micro-batches by their place, as a data set for torch's DataLoader. An error is data too: see `Loaded`."""

    def __init__(self, batches: MicroBatches) -> None:
        self._batches = batches

    def __getitem__(self, place: Place) -> Loaded:
        try:
            batch, skipped = self._batches.loaded(*place)
        except Exception as error:
            sentence = str(error) if isinstance(error, RallypointError) else f"{type(error).__name__}: {error}"
            return place, None, [], (sentence, traceback.format_exc())
        return place, batch, skipped, ("", "")


@dataclass(frozen=True, slots=True)
class Begin:
    """Called first in each loader process, with its number."""

    init: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the worker's own handlers were inherited
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which ends its loader processes
        leave_connections()
        if self.init is not None:
            self.init(number)


def leave_connections() -> None:
    """Give up the TCP connections that were inherited by fork.

    While a loader process has a copy of them, nobody would see that the worker is dead: they would not close.
    """
    if not _OPEN.exists():
        return  # no Linux: processes are not forked by default
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(name) for name in os.listdir(_OPEN)]:
        if _is_tcp(number):
            os.dup2(nothing, number, inheritable=False)  # not closed: an object here still has the number
    os.close(nothing)


def _is_tcp(number: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        found = socket.socket(fileno=number)
    except OSError:
        return False
    family = found.family
    found.detach()
    return family in (socket.AF_INET, socket.AF_INET6)


def same(batch: Loaded) -> Loaded:
    """The batch is collated already."""
    return batch
