"""What a replay asks of the process that computes, and what it answers: two small files in a folder of its own."""

from __future__ import annotations

from typing import Any

import msgspec


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What to compute again.

    Attributes:
        snapshots, snapshot: where to begin.
        step: the step to look at.
        replica: which of its replicas; -1: all.
        settings: settings over those of the run, nested: none changes a byte.
        reductions: the versions from which on the run has reduced its rates once more (`plateau`), ascending.
        folder: where the replay keeps its log and its digests.
        answer: the file for the `Answer`.
        debug: open the debugger in the forward pass.
        probe: look for the replica, and the sample, with the highest loss.
    """

    snapshots: str
    snapshot: str
    step: int
    replica: int = -1
    settings: dict[str, Any] = {}
    reductions: tuple[int, ...] = ()
    folder: str
    answer: str
    debug: bool = False
    probe: bool = False


class Layer(msgspec.Struct, frozen=True):
    """A parameter's gradient in one replica: its norm, its extremes, how many values are not finite."""

    name: str
    norm: float
    least: float
    most: float
    not_finite: int


class NotFinite(msgspec.Struct, frozen=True):
    """The first module of a forward pass whose output is not finite.

    `inputs`, `parameters`: whether its inputs and its own parameters are finite.
    """

    module: str
    kind: str
    inputs: bool
    parameters: bool


class Looked(msgspec.Struct, frozen=True):
    """One replica at the step. `loss_text` is the loss, also where JSON has no number for it.

    `samples` are positions in the data set, in the order of the batch; `described` are texts for the first of them.
    """

    replica: int
    samples: tuple[int, ...]
    loss_text: str
    norm_text: str
    layers: tuple[Layer, ...]
    not_finite: NotFinite | None
    described: tuple[str, ...] = ()


class Probed(msgspec.Struct, frozen=True):
    """Where the highest loss of a step comes from: the replica, and the samples that could not be told apart further.

    `losses` are those of all replicas, as texts; `alone` is the loss of these samples alone.
    """

    replica: int
    samples: tuple[int, ...]
    losses: tuple[str, ...]
    alone: str


class Answer(msgspec.Struct, frozen=True):
    """What was seen."""

    replicas: tuple[Looked, ...]
    probed: Probed | None = None
    device: str = "cpu"
