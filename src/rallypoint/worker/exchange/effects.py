"""Runs the shell's effects on real links."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.core.worker import slots as machine
from rallypoint.core.worker.shell import WorkerShell
from rallypoint.worker.exchange.codec_states import CodecStates
from rallypoint.worker.exchange.links import Links
from rallypoint.worker.exchange.pushes import Pushes


class LinkEffects:
    """Runs the machine's effects. Drops an effect whose link is gone: the lost link is an event of its own."""

    def __init__(self, shell: WorkerShell, links: Links, pushes: Pushes, codec_states: CodecStates | None) -> None:
        self._shell, self._links, self._pushes, self._codec_states = shell, links, pushes, codec_states

    def run_locked(self, effect: machine.CodecEffect) -> None:
        """Run one effect on codec states. Needs the exchange's lock."""
        assert self._codec_states is not None, f"{effect}, though this job's codecs have no state"
        self._codec_states.run(effect)

    def run(self, effects: Sequence[machine.Effect]) -> None:
        """Run all other effects, in order, without the lock."""
        for effect in effects:
            match effect:
                case machine.Send():
                    if self._codec_states is not None and self._shell.snapshots.copies(effect):
                        self._codec_states.copy(effect)
                    self._pushes.push(effect)
                case machine.Fetch(shard=shard, version=version, server=server):
                    if (link := self._links.get(server)) is not None:
                        link.fetch(shard, version, self._shell.number)
                case machine.Want(shard=shard, replica=replica, server=server):
                    if (link := self._links.get(server)) is not None:
                        link.want(shard, replica, self._shell.number)
                case machine.Follow(server=server, on=on, step=step):
                    if (link := self._links.get(server)) is not None:
                        link.follow(self._shell.number, on=on, step=step)
                case _:
                    raise AssertionError(f"an effect that cannot follow here: {effect}")
