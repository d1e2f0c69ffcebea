"""Reads a job's record from a snapshot or a journal, perhaps of an earlier version of the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rallypoint.config.resolve import parse, record_of
from rallypoint.core.job import JobRecord
from rallypoint.errors import ConfigError


def kept_record(data: Mapping[str, Any], source: str) -> JobRecord:
    """Return the record in `data`, which is plain data.

    `source` says where it was stored; error messages begin with it.

    A record from before modes had descriptions has none, and would be read as one of `rp.Sync()`. So everything that
    follows from its configuration and its layout is computed again. Raises msgspec.ValidationError when `data` is no
    record, ConfigError when such an old job cannot continue in its mode.
    """
    record = msgspec.convert(data, JobRecord)
    return record if "mode" in data else _completed(record, source)


def _completed(record: JobRecord, source: str) -> JobRecord:
    try:
        new = record_of(
            parse(record.config), record.layout, record.frozen, data=record.data, tied=record.tied,
            threads=record.threads,
        )  # fmt: skip
    except ConfigError as error:
        raise ConfigError(f"{source} is of a job that cannot go on: {error}") from None
    if new.rounds != record.rounds:
        raise ConfigError(
            f"{source} is of a job of {record.rounds} rounds, and this version of Rallypoint makes {new.rounds} of its "
            "settings: use the version that wrote it"
        )
    # Encode and decode, as if it came from a worker: lists replace tuples, and members compare configurations.
    return msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=JobRecord)
