"""The job record: what all members of a job must agree on, and the words for where they do not."""

from __future__ import annotations

from typing import Any

import msgspec

from rallypoint.core.cadence import TOGETHER, Cadence
from rallypoint.core.layout import Layout, first_difference


class DataIdentity(msgspec.Struct, frozen=True):
    """What a worker knows its data set by: its length, and (position, digest) of a few samples.

    `samples` is 0 where nobody has looked (an older record); `digests` is empty where samples have none.
    """

    samples: int = 0
    digests: tuple[tuple[int, str], ...] = ()


class JobRecord(msgspec.Struct, frozen=True):
    """One model, one configuration; `config.record_of` makes it.

    Attributes:
        config: the resolved settings.
        layout: of the model.
        rounds: contributions that each replica makes; under an aligned policy the job's last version.
        frozen: every frozen parameter's name, and a hash of its bytes.
        steps_per_round: steps of a replica between two of its contributions.
        sticky: replicas leave something of use on the worker that computes them: none is moved for speed's sake.
        streaming: each replica has a clock of its own; no version is common to all shards.
        cadence: which shards each round is for; where they take turns, a version of the job is a tick.
        stateful_workers: model and optimizer state are the workers', each has all of it, and servers only average.
        data: what the data set is known by.
        tied: further names of tensors that the layout has under one: name -> name in the layout.
    """

    config: dict[str, Any]
    layout: Layout
    rounds: int
    frozen: dict[str, str] = {}
    steps_per_round: int = 1
    sticky: bool = False
    streaming: bool = False
    cadence: Cadence = TOGETHER
    stateful_workers: bool = False
    data: DataIdentity = DataIdentity()
    tied: dict[str, str] = {}


def disagreement(first: JobRecord, other: JobRecord) -> str | None:
    """Why `other` cannot take part in the job of `first`, as a phrase; None when they agree."""
    if first.layout.fingerprint != other.layout.fingerprint:
        return f"a different model: {first_difference(other.layout, first.layout)}"
    if first.config != other.config:
        return f"different settings: {_first_setting(other.config, first.config)}"
    for name in sorted(first.frozen.keys() | other.frozen.keys()):
        if first.frozen.get(name) != other.frozen.get(name):
            return (
                f"other values in the frozen parameter {name}: frozen parameters are not sent by the servers, so load "
                "them from the same file, or seed before building the model"
            )
    return _other_data(first.data, other.data)


def _other_data(first: DataIdentity, other: DataIdentity) -> str | None:
    if not first.samples or not other.samples:
        return None
    if first.samples != other.samples:
        return (
            f"a different data set: {other.samples} samples here, {first.samples} there: load the same files on every "
            "worker, and let no worker take a part of them (each replica's samples are chosen from all)"
        )
    for (position, digest), (_, its) in zip(first.digests, other.digests, strict=False):
        if digest != its:
            return (
                f"a different data set: sample {position} has other content: load the same files in the same order on "
                "every worker, seed a random split, and draw augmentation from the global generators (random, "
                "numpy.random, torch), which are seeded for each micro-batch"
            )
    return None


def _first_setting(ours: Any, theirs: Any, path: str = "") -> str:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                return _first_setting(ours.get(key), theirs.get(key), f"{path}.{key}" if path else str(key))
    return f"{path} is {ours!r} here, {theirs!r} there"
