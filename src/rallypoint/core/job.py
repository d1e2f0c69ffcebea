"""The job record: what all members of a job must agree on, and the words for where they do not."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import msgspec

from rallypoint.core.cadence import TOGETHER, Cadence
from rallypoint.core.layout import Layout, first_difference
from rallypoint.core.modes import Feature, ModeTraits, refusal


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
    """

    config: dict[str, Any]
    layout: Layout
    rounds: int
    frozen: dict[str, str] = {}
    steps_per_round: int = 1
    cadence: Cadence = TOGETHER
    mode: ModeTraits = ModeTraits()
    features: tuple[Feature, ...] = ()

    @property
    def sticky(self) -> bool:
        """Does a replica leave state on the worker that computes it?"""
        return self.mode.leaves_state

    @property
    def streaming(self) -> bool:
        """Does each replica have a clock of its own?"""
        return self.mode.streaming

    @property
    def stateful_workers(self) -> bool:
        """Do workers hold the model and step the optimizer?"""
        return self.mode.workers_hold_state

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
    return None


def _first_setting(ours: Any, theirs: Any, path: str = "") -> str:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                return _first_setting(ours.get(key), theirs.get(key), f"{path}.{key}" if path else str(key))
    return f"{path} is {ours!r} here, {theirs!r} there"
