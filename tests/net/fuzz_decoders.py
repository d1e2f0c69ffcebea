"""Mutated bytes for every decoder, without sockets: it decodes them, or raises an error of ours."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import torch
from fuzz_campaign import Campaign
from fuzz_frames import Frame, Mutator

from rallypoint.codec.base import Scratch, check_gradient, decode_ids
from rallypoint.codec.build import ShardCodecs, ShardCodecStates, build, build_stateless, load
from rallypoint.config import codec_of, parse
from rallypoint.core.layout import Shard
from rallypoint.core.protocol import decode
from rallypoint.errors import RallypointError
from rallypoint.net.frames import HEADER_BYTES, Header, Kind, pack, unpack
from rallypoint.observe.recording import pack as packed
from rallypoint.server.intake import FrameChecks
from rallypoint.server.job import ServerJob
from rallypoint.store.record import read_state


class Decoders:
    """The decoders of one recorded job. `thrown` counts frames by kind; `faults` are the errors that are not ours."""

    def __init__(self, campaign: Campaign, seed: int) -> None:
        record, _ = campaign.agreed()
        self.job = ServerJob(record, parse(record.config))
        self.corpus, self.rng = campaign.corpus, random.Random(seed)
        self.mutator = Mutator(self.rng, self.corpus)
        self.checks = FrameChecks(self.job)
        self.codecs, self.states = ShardCodecs(self.job.config), ShardCodecStates(self.job.config)
        self.down = build_stateless(self.job.config.down)
        self.thrown: Counter[str] = Counter()
        self.faults: list[str] = []

    def attack(self, frames: int) -> None:
        """Decode so many mutated frames."""
        for _ in range(frames):
            frame = self.mutator.mutate(self.corpus.choose(self.rng))
            self.thrown[getattr(frame.header.kind, "name", str(frame.header.kind))] += 1
            try:
                self._decode(frame)
            except RallypointError:
                pass
            except Exception as error:
                self.faults.append(f"{frame}: {error!r}")

    def _decode(self, frame: Frame) -> None:
        data, rng = bytearray(pack(frame.header)), self.rng
        if rng.random() < 0.3:
            data[rng.randrange(HEADER_BYTES)] = rng.randrange(256)
        header = unpack(data)._replace(length=len(frame.payload))
        match header.kind:
            case Kind.CONTROL | Kind.CHALLENGE | Kind.HELLO | Kind.WELCOME | Kind.REFUSE:
                msgspec.msgpack.encode(packed(decode(frame.payload)))
            case Kind.MEASURES:
                self.checks.measures(header, bytearray(frame.payload))
            case Kind.CHOICE:
                self.checks.choice(header, bytearray(frame.payload))
            case _:
                self._decode_tensors(header, frame.payload)

    def _decode_tensors(self, header: Header, payload: bytes) -> None:
        place, data = self.checks.place(header), memoryview(bytearray(payload))
        match header.kind:
            case Kind.STATE:
                self.checks.record(header, bytearray(payload))
                read_state(payload, place, header.step, self.job.config)
            case Kind.PULL_ROWS:
                decode_ids(bytearray(payload), self.checks.pull(header))
            case Kind.CODEC_STATE:
                self.checks.codec_state(header)
                self._load(header, place, data)
            case _ if place.part is not None:
                check_gradient(data, place.part.rows, place.columns)
            case Kind.VERSION if header.codec:
                self.down.decode(data, torch.zeros(place.words))
            case _:
                self._decode_codec(header, place, data)

    def _load(self, header: Header, place: Shard, data: memoryview) -> None:
        config = self.job.config
        if data and self.states.has(place):
            load(build(codec_of(config, place.group), place.shape, Scratch()), header.codec, data)

    def _decode_codec(self, header: Header, place: Shard, data: memoryview) -> None:
        codec = self.codecs.of(place)
        if codec is None or header.codec != codec.code:
            self.checks.payload(header)
            return
        codec.decode(data, torch.zeros(place.words))
        codec.decode_add(data, torch.zeros(place.words))
