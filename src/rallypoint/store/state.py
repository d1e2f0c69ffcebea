"""A shard's whole state that one worker sends to others (AllReduce): reads and checks it."""

from __future__ import annotations

import numpy as np

from rallypoint.config import JobConfig
from rallypoint.core.layout import Shard
from rallypoint.errors import DamagedSnapshot, ProtocolError
from rallypoint.optim import state_names
from rallypoint.store.manifest import most_bytes
from rallypoint.store.record import ShardRecord, decode_record

MASTER = "master"
OWN = "own"  # the prefix of array names that belong to a user's own optimizer


def read_state(data: bytes | bytearray | memoryview, shard: Shard, version: int, config: JobConfig) -> ShardRecord:
    """Return the record in `data`: the state of that shard at that version.

    It holds parameters and moments as fp32, one value for each word; for a user's own optimizer its state as bytes.
    Raises ProtocolError when the data is anything else (I9).
    """
    try:
        record = decode_record(bytes(data), most_bytes(shard.words, 0))
    except DamagedSnapshot as error:
        raise ProtocolError(f"a shard's state that cannot be read: {error}") from None
    if (record.shard, record.version) != (shard.index, version):
        raise ProtocolError(
            f"a state of shard {record.shard} at version {record.version} under the name of {shard.index} at {version}"
        )
    kept = {name: array for name, array in record.arrays.items() if name != MASTER}
    if config.own_optimizer:
        right = all(name.startswith(OWN) and array.dtype == np.uint8 for name, array in kept.items())
        known = not record.scalars
    else:
        right = all(len(array) == shard.words and array.dtype == np.float32 for array in kept.values())
        known = (set(kept), set(record.scalars)) in state_names(config.applied)
    master = record.arrays.get(MASTER)
    whole = master is not None and len(master) == shard.words and master.dtype == np.float32
    if not whole or not known or not right or record.clocks or record.codec_states:
        raise ProtocolError(f"a state of shard {shard.index} that does not fit this job's layout and optimizer")
    return record
