"""The job record: what all members of a job must agree on, and the sentences that say where they differ."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import msgspec

from rallypoint.core.cadence import Cadence
from rallypoint.core.decisions import KeepBest, ReduceOnPlateau, Rules
from rallypoint.core.layout import Layout, first_difference
from rallypoint.core.modes import Feature, ModeName, ModeTraits, Pace
from rallypoint.core.modes.table import refusal, why_not
from rallypoint.core.typed import MOST_PUSHES


class DataIdentity(msgspec.Struct, frozen=True):
    """Identifies a data set: its number of samples, and (position, digest) of a few of them.

    `samples` is 0 where it is not known (an older record); `digests` is empty where samples cannot be digested.
    `shards` is a digest of its shards' lengths, and of what else it tells of them; "" where it does not tell them.
    `stream` is a digest of a stream's parts and of its first items: it has no number of samples; "" for other data.
    """

    samples: int = 0
    digests: tuple[tuple[int, str], ...] = ()
    shards: str = ""
    stream: str = ""


class JobRecord(msgspec.Struct, frozen=True):
    """What all members of a job agree on: one model, one configuration. `config.record_of` builds it.

    Attributes:
        config: the resolved settings.
        layout: the layout of the model.
        rounds: the number of contributions of each replica; under an aligned policy also the job's last version.
        frozen: name of each frozen parameter -> hash of its bytes.
        steps_per_round: steps that a replica computes for one contribution.
        cadence: the shards that each round updates.
        mode: the description of the mode.
        features: the features that the configuration and the model use.
        data: identifies the data set.
        tied: other names of tensors that are in the layout once: other name -> name in the layout.
        threads: the intra-op threads of its workers: torch cuts sums by them, so another number is another rounding.
            0: not known (an older record). Workers that have others may join: see `coordinator.announcer.Comparable`.
    """

    config: dict[str, Any]
    layout: Layout
    rounds: int
    frozen: dict[str, str] = {}
    steps_per_round: int = 1
    cadence: Cadence = Cadence()
    mode: ModeTraits = ModeTraits()
    features: tuple[Feature, ...] = ()
    data: DataIdentity = DataIdentity()
    tied: dict[str, str] = {}
    threads: int = 0

    def version_at(self, shard: int, round: int) -> int | None:
        """The shard's own version in a snapshot of `round`; None in streaming modes, where a snapshot stores each shard
        at whatever version it has."""
        return self.cadence.updates_before(shard, round) if self.mode.pace is Pace.ROUNDS else None

    def steps_at(self, version: int) -> int:
        """Steps of training in this version."""
        return min(version * self.steps_per_round, int(self.config.get("steps", self.rounds * self.steps_per_round)))

    @property
    def steps(self) -> int:
        """The job's steps; 0 where scripts decide when it ends: a store without `steps=`, and sums."""
        steps = int(self.config["steps"])
        return 0 if steps == MOST_PUSHES or Feature.SUMS in self.features else steps

    def supports(self, feature: Feature) -> bool:
        """True if the feature works in this job, together with those that the job uses."""
        return not why_not(self.mode.name, feature, frozenset(self.features))

    @property
    def rules(self) -> Rules:
        """The rules by which evaluations decide, as the settings have them."""
        evaluation = self.config.get("evaluation", {})
        plateau, best = evaluation.get("plateau"), evaluation.get("keep_best")
        return Rules(
            plateau=None if plateau is None else msgspec.convert(plateau, ReduceOnPlateau),
            best=KeepBest(best, evaluation.get("best_is", "min")) if best else None,
        )

    @property
    def leases(self) -> bool:
        """True if evaluations are leased, as any worker can make any of them: servers send versions whole and exactly.

        Not in other modes, with a lossy `down`, with parameters held in bf16 or streamed, with tables.
        """
        part = {Feature.DOWN, Feature.HOLD, Feature.TABLES, Feature.STREAMED, Feature.KEYED}
        return self.mode.name is ModeName.SYNC and not part.intersection(self.features)

    @property
    def adds_up(self) -> bool:
        """True if a worker adds up its neighbouring replicas before it sends them (I3), where it has the memory."""
        alone = {Feature.CODEC, Feature.STREAMED}.intersection(self.features) or self.mode.pace is not Pace.ROUNDS
        quorum = self.config.get("sync", {}).get("quorum")
        return not alone and quorum is None and bool(self.config.get("network", {}).get("presum_bytes", 1))

    @property
    def in_place(self) -> bool:
        """True if a server of the worker's own process may step the model, or make the mean of its gradients, where
        they lie.

        Not where servers keep parameters in another form, or need a shard's words in one piece, or contributions that
        are not the sum of all replicas.
        """
        part = {
            Feature.AVERAGE, Feature.MUON, Feature.DOWN, Feature.HOLD, Feature.FINGERPRINTS, Feature.AUDIT,
            Feature.SUMS, Feature.TABLES, Feature.KEYED,
        }  # fmt: skip
        modes = (ModeName.SYNC, ModeName.ALL_REDUCE)
        return self.mode.name in modes and self.adds_up and not part.intersection(self.features)

    @property
    def anybody_steps(self) -> bool:
        """True if the job works under Sync and under AllReduce alike: which is quicker is a question of machines."""
        modes, features = (ModeName.SYNC, ModeName.ALL_REDUCE), frozenset(self.features)
        refused = any(why_not(mode, feature, features) for mode in modes for feature in features)
        return self.mode.name in modes and not refused

    @property
    def audits(self) -> bool:
        """True if some contributions are computed by two workers: each tells what its kernels give for a probe."""
        return bool(self.config.get("audit", {}).get("share"))

    @property
    def audit_action(self) -> str:
        """What an audit's finding leads to: "drain", "stop" or "tell"."""
        return str(self.config.get("audit", {}).get("action", "drain"))

    def refusal_of(self, terms: Set[Feature]) -> str:
        """The sentence why this job cannot run on a cluster whose terms ask for these features; "" if it can."""
        return refusal(self.mode.name, {*self.features, *terms})


def disagreement(first: JobRecord, other: JobRecord) -> str | None:
    """A phrase why a worker with record `other` cannot join the job of `first`; None when they agree."""
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
    if first.stream and other.stream and first.stream != other.stream:
        return (
            "a different stream: its number of parts or its first items differ: open the same data in the same order "
            "on every worker, and let no worker take a part of them (each replica's items are chosen from all)"
        )
    if not first.samples or not other.samples:
        return None
    if first.samples != other.samples:
        return (
            f"a different data set: {other.samples} samples here, {first.samples} there: load the same files on every "
            "worker, and let no worker take a part of them (each replica's samples are chosen from all)"
        )
    if first.shards and other.shards and first.shards != other.shards:
        return (
            "a different data set: its shards (files, row groups) have other lengths or sizes, or its files other "
            "names, content or columns: load the same files in the same order, and the same columns, on every worker"
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
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        place = next((n for n, (our, their) in enumerate(zip(ours, theirs, strict=True)) if our != their), 0)
        return _first_setting(ours[place], theirs[place], f"{path}[{place}]") if ours else path
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and max(len(ours), len(theirs)) > 8:
        return f"{path} has {len(ours)} values here, {len(theirs)} there"
    return f"{path} is {ours!r} here, {theirs!r} there"
