"""The job record: what all members of a job must agree on, and the words for where they do not."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import msgspec

from rallypoint.core.cadence import TOGETHER, Cadence
from rallypoint.core.layout import Layout, first_difference
from rallypoint.core.modes import Feature, ModeTraits, Pace, refusal, why_not


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
        cadence: the shards that each round updates.
        mode: the description of the mode.
        features: what the configuration and the model use beside it.
        data: what the data set is known by.
        tied: further names of tensors that the layout has under one: name -> name in the layout.
    """

    config: dict[str, Any]
    layout: Layout
    rounds: int
    frozen: dict[str, str] = {}
    steps_per_round: int = 1
    cadence: Cadence = TOGETHER
    mode: ModeTraits = ModeTraits()
    features: tuple[Feature, ...] = ()
    data: DataIdentity = DataIdentity()
    tied: dict[str, str] = {}

    def version_at(self, shard: int, round: int) -> int | None:
        """The shard's version in a snapshot of `round`; None where each replica has a clock of its own, so that a
        snapshot has every shard as it was."""
        return self.cadence.updates_before(shard, round) if self.mode.pace is Pace.ROUNDS else None

    def supports(self, feature: Feature) -> bool:
        """Does the feature work in this job, beside those that the job uses?"""
        return not why_not(self.mode.name, feature, frozenset(self.features))

    def refusal_of(self, terms: Set[Feature]) -> str:
        """Why this job cannot run on a cluster whose terms ask for these features; "" if it can."""
        return refusal(self.mode.name, {*self.features, *terms})


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
