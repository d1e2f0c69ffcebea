"""The task of the process that imports a checkpoint, and its answer. Importing this loads no torch."""

from __future__ import annotations

from typing import Any

import msgspec


class Task(msgspec.Struct, frozen=True):
    """What to import, and where to.

    Attributes:
        checkpoint: see `store.checkpoints.reading`.
        step: the steps of training in it; -1: as it says itself.
        snapshots: the store that gets the snapshot.
        answer: the file that gets an `Answer` when that is done.
        folder: the run's folder.
        overrides: the launcher's settings, nested.
        strict: refuse a checkpoint that has more than the script's model.
    """

    checkpoint: str
    step: int
    snapshots: str
    answer: str
    folder: str
    overrides: dict[str, Any] = {}
    strict: bool = False


class Answer(msgspec.Struct, frozen=True):
    """What was imported, as a sentence, and what the user is to know about it."""

    said: str
    warnings: tuple[str, ...] = ()
