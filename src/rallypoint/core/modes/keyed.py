"""The features that a key-value store (`job.store`) does not work with, and why."""

from __future__ import annotations

from rallypoint.core.modes.features import Feature

_F = Feature
_OF_LOOPS = "it is for the steps of a training loop, and a store has keys that go on by themselves; leave it out"
_OF_PAYLOADS = "a store's payloads are raw; leave it out"

WITH_KEYS = {
    **dict.fromkeys((_F.AVERAGE, _F.PLATEAU, _F.ACCUMULATE, _F.FP16, _F.HOLD, _F.STREAMED), _OF_LOOPS),
    **dict.fromkeys((_F.FINGERPRINTS, _F.AUDIT, _F.BUFFERS, _F.STOP, _F.STOP_WHEN), _OF_LOOPS),
    **dict.fromkeys((_F.CODEC, _F.CODEC_STATE, _F.DOWN), _OF_PAYLOADS),
    _F.CLIP: "a norm is of all gradients of a step, and keys are pushed one by one; clip before you push",
    _F.MUON: "it needs each matrix as one shard; use another optimizer",
    _F.FOLD: "each push is an update of its own; use fold=1",
    _F.COMPENSATION: "a push does not say which version it was computed from; set it to 0",
    _F.BACKUP_TASKS: "only the script knows how to compute a push; leave it out",
    _F.BY_SPEED: "a store has no step times to measure; contributors are assigned evenly",
    _F.AGGREGATORS: "pushes and pulls go straight to the servers; leave it out",
    _F.CARRY: _OF_LOOPS,
    _F.RANKS: "use workers of one process; leave it out",
}  # fmt: skip
