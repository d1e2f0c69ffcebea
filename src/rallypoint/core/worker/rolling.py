"""The worker's machine where a version of a shard is a sum, and each shard goes on by itself.

A script that has a loop of its own (DDP, FSDP2) asks for sums of any length, in the same order on all workers. Each sum
takes the next shards in turn, so that many are under way at once. Of one shard:

    at version 7 -- fill, send --> contributed to round 7 -- version 8 lands, is taken --> at version 8

A shard's version 8 is the sum of all contributions to its round 7. No other shard has to be at version 8: that is the
difference from the aligned machine. The reason why servers keep two versions of a shard is the same (I5): nobody
contributes to round 8 before taking version 8, so nobody is further behind than one version.

Recovery is to send again (I2): when a link breaks or a server is replaced, what was contributed to the round in
progress may be lost, and the shard is to be filled again. The caller keeps a sum's input until its result is there.

The world is fixed, because the script's is: when a worker of the first view is gone, or the servers have lost sums,
`broken` says so, and nothing goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rallypoint.core.view import View
from rallypoint.core.worker import slots
from rallypoint.core.worker.slots import Action, Effect, Event, Slot, SlotMachine


@dataclass(slots=True)
class RollingMachine(SlotMachine):
    """What one worker sends and takes. Worker number r sends contributions as replica r, whatever a view assigns.

    Attributes:
        number: this worker's number; set once, before the first `fill`.
        at: the version of each shard that was taken here; -1 before the first.
        broken: why no sum can be made any more; "" while all is well.
    """

    number: int = 0
    at: list[int] = field(init=False)
    broken: str = ""
    _newest: list[int] = field(init=False)  # known to exist
    _held: list[int] = field(init=False)  # in a slot that is LANDING or LANDED
    _asked: list[int] = field(init=False)  # fetched, and not here; -1: none
    _contributed: list[bool] = field(init=False)  # to the round in progress, to the primary in force
    _world: dict[str, int] = field(default_factory=dict)  # worker of the first view -> incarnation

    def __post_init__(self) -> None:
        SlotMachine.__post_init__(self)
        self.at, self._newest, self._held, self._asked = ([-1] * self.shards for _ in range(4))
        self._contributed = [False] * self.shards

    # ---- questions ----

    def next_action(self) -> Action | None:
        """Initialise, if this worker uploads the first versions; None otherwise. Changes nothing."""
        return slots.UploadFirst() if self._initialise and self._may_initialise else None

    @property
    def assigned(self) -> Sequence[int]:
        return ()  # there is nothing to compute

    @property
    def takes_part(self) -> bool:
        return not self.broken

    @property
    def upcoming(self) -> tuple[int, int] | None:
        """None: there is nothing to compute."""
        return None

    @property
    def target(self) -> int:
        """There is no version that all shards have. A change of this number wakes the main thread: something broke."""
        return int(bool(self.broken))

    @property
    def complete(self) -> bool:
        """True if a version has landed and is to be taken."""
        return Slot.LANDED in self._slots

    @property
    def landed_shards(self) -> list[int]:
        """The shards whose version is here and is to be taken."""
        return [shard for shard, slot in enumerate(self._slots) if slot is Slot.LANDED]

    def may_fill(self, shard: int) -> bool:
        """True if a contribution to the shard's round in progress is missing, and can be written and sent now."""
        return (
            self._slots[shard] is Slot.FREE and not self._contributed[shard] and not self.broken
            and self.at[shard] >= self._newest[shard] >= 0 and self._home(shard) in self._links
        )  # fmt: skip

    @property
    def waits_for(self) -> list[int]:
        """The shards that have this worker's contribution, and whose version is not here."""
        return [shard for shard in range(self.shards) if self._contributed[shard] or self.at[shard] < 0]

    # ---- events ----

    def handle(self, event: Event) -> list[Effect]:
        match event:
            case slots.Filled(shard=shard):
                return self._filled(shard)
            case slots.SlotSent(shard=shard, serial=serial):
                self._slots.sent(shard, serial)
                return self._seek(shard)
            case slots.Arriving():
                return self._arriving(event)
            case slots.Landed(shard=shard):
                if self._slots[shard] is Slot.LANDING:
                    self._slots[shard] = Slot.LANDED
                return []
            case slots.LinkUp(server=server):
                self._links.add(server)
                return [slots.Follow(server)]
            case slots.LinkLost(server=server):
                self._links.discard(server)
                if self._uploads_first_weights() and any(self._newest[shard] < 0 for shard in self._at([server])):
                    self._initialise = True  # the upload may be lost: do it again
                self._forget(self._at([server]))
                return []
            case slots.Viewed(view=view):
                return self._viewed(view)
            case _:
                return []  # nothing is computed, so nothing else can come

    def taken(self, shard: int) -> list[Effect]:
        """The version that has landed was copied out of the slot. Return the effects."""
        if self._slots[shard] is not Slot.LANDED:
            return []
        self._slots[shard] = Slot.FREE
        self.at[shard] = self._held[shard]
        self._contributed[shard] = False
        if self.step < 0 and min(self.at) >= 0:
            self.step = 0
        return self._seek(shard)

    def _filled(self, shard: int) -> list[Effect]:
        home = self._home(shard)
        if home not in self._links:
            self._slots[shard] = Slot.FREE  # it is filled again when there is a link
            return []
        self._contributed[shard] = True
        serial = self._slots.queue(shard)
        return [slots.Send(shard, self.at[shard], self.number, home, serial, self._number)]

    def _arriving(self, event: slots.Arriving) -> list[Effect]:
        shard, version = event.shard, event.version
        if self.view is None or event.view < self.view.generation:
            return [slots.DropArriving(shard)]
        self._newest[shard] = max(self._newest[shard], version)
        if version > self.at[shard] + 1:
            self.broken = self.broken or "sums were made without this worker: it has come too late"
        if self._asked[shard] == version:
            self._asked[shard] = -1
        if version == self.at[shard] + 1 and self._slots[shard] is Slot.FREE:
            self._slots[shard], self._held[shard] = Slot.LANDING, version
            return [slots.Land(shard)]
        return [slots.DropArriving(shard), *self._seek(shard)]

    def _seek(self, shard: int) -> list[Effect]:
        """Fetch the version to take next if it exists, is not here, and was not fetched."""
        right, home = self.at[shard] + 1, self._home(shard)
        if self._newest[shard] < right or self._asked[shard] == right or self._slots[shard] is not Slot.FREE:
            return []
        if home not in self._links:
            return []
        self._asked[shard] = right
        return [slots.Fetch(shard, right, home)]

    def _viewed(self, view: View) -> list[Effect]:
        rerouted = self.view is not None and view.number == self.view.number and view.primary != self.view.primary
        if self.view is not None and view.number <= self.view.number and not rerouted:
            return []
        before, stayed = self._take_view(view)
        here = {member.id: member.incarnation for member in view.workers}
        if before is None:
            self._world = here
            self._start_generation(view)
            self.following = True
        elif before.generation != view.generation:
            self.broken = self.broken or "the servers have lost sums that only they had"
            self._start_generation(view)
        else:
            self._forget(self._moved(before, view, stayed))
        gone = sorted(id for id, incarnation in self._world.items() if here.get(id) != incarnation)
        if gone and not view.orders.ending:
            self.broken = self.broken or f"{' and '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        return []

    def _forget(self, shards: Iterable[int]) -> None:
        """What these shards' primary had of this worker may be lost, and so may what it was asked for."""
        for shard in shards:
            self._contributed[shard], self._asked[shard] = False, -1
            if self._slots[shard] in (Slot.QUEUED, Slot.LANDING):
                self._slots[shard] = Slot.FREE

    def validate(self) -> None:
        self._slots.validate()
        for shard, slot in enumerate(self._slots):
            at, newest = self.at[shard], self._newest[shard]
            assert at <= newest, f"shard {shard}: version {at} was taken, and {newest} is the newest known"
            assert newest <= at + 1 or at < 0, f"shard {shard}: version {newest} without this worker's contribution"
            if slot in (Slot.LANDING, Slot.LANDED):
                assert self._held[shard] == at + 1, f"shard {shard}: version {self._held[shard]} lands after {at}"
            assert slot is not Slot.QUEUED or self._home(shard) in self._links, f"slot {shard} is queued without a link"
