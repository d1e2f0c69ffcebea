"""The codec of each shard of a job: its group's codec from workers to servers, `down` from servers to workers."""

from __future__ import annotations

from rallypoint.codec.base import Codec, Scratch
from rallypoint.codec.build import build_stateless
from rallypoint.codec.spec import DGC
from rallypoint.config import JobConfig, codec_of
from rallypoint.core.layout import Shard


class ShardCodecs:
    """The codecs that decode contributions to a job's shards. One instance belongs to one thread.

    A shard that its codec would not make smaller goes raw. One exception: DGC holds the momentum on the worker, so all
    of its shards use it. Raises ConfigError on impossible settings.
    """

    def __init__(self, config: JobConfig, scratch: Scratch | None = None) -> None:
        self._config, self._scratch = config, scratch or Scratch()
        self._made: dict[tuple[int, tuple[int, ...]], Codec] = {}

    def of(self, shard: Shard) -> Codec | None:
        """Return the shard's codec, without state; None when it goes raw, like tables, which are sparse already."""
        if shard.role == "rows":
            return None
        spec = codec_of(self._config, shard.group)
        key = (shard.group, shard.shape if shard.columns else ())
        codec = self._made.get(key)
        if codec is None:
            codec = self._made[key] = build_stateless(spec, key[1], self._scratch)
        return codec if isinstance(spec, DGC) or _pays(codec, shard) else None


def down_codec(config: JobConfig, shard: Shard, scratch: Scratch) -> Codec | None:
    """Return the codec for the versions of a shard; None when they go raw."""
    codec = build_stateless(config.down, (), scratch)
    return codec if shard.role == "parameters" and _pays(codec, shard) else None


def _pays(codec: Codec, shard: Shard) -> bool:
    return codec.bytes_for(shard.words) < shard.nbytes
