"""With `replication=2` the loss of one server never rolls back: at any moment each shard has two copies that count.

After each event at the coordinator the watcher asks which shards have a backup that has caught up. One that has none
any more must have lost a server, or be in one of the `WINDOWS` that are declared here. When the job goes back to a
snapshot because shards are lost, each of them must have lost both servers, or one while it was in a window.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rallypoint.core.cluster.machine import ClusterMachine
from rallypoint.core.cluster.succession import nothing_on_its_way
from rallypoint.core.view import View

LOSS = "a server was lost, and its shards' new backups are being filled"
WINDOWS = {
    "begin": "a generation has just begun: no shard has been copied yet",
    "coordinator": "a coordinator takes over: what the journal had no room for, servers say again",
    "few": "only one server is to stay: there is nowhere to copy to",
    "apart": "a server that holds the job up is set apart: nothing waits for what it holds",
    "hurry": "shards moved in the middle of a step (a worker did not say in time that it holds the version; in the "
    "streaming modes there is no moment between two steps): the new primary may be at another version than the others",
}


@dataclass(slots=True)
class CopiesWatch:
    """What is known of the shards of one job.

    Attributes:
        windows: how often shards were left with one copy, by reason.
    """

    windows: Counter[str] = field(default_factory=Counter)
    _view: View | None = None
    _whole: set[int] = field(default_factory=set)
    _why: dict[int, str] = field(default_factory=dict)  # shard with one copy -> since which loss, or in which window
    _settled: bool = False

    def look(self, machine: ClusterMachine) -> None:
        """An event was handled. Raises AssertionError with a sentence if a shard has one copy without a reason."""
        course, view, before = machine.course, machine.view, self._view
        if view is None or course.views.replication < 2 or course.recovery.workers_store:
            self._view = None
            return
        begins = before is None or before.generation != view.generation
        if before is not None:
            lost = self._lost(before, machine)
            unexplained = [shard for shard in lost if shard not in self._whole and not self._why.get(shard)]
            assert not unexplained, f"shards {unexplained} of view {before.number} are lost with one server"
        if begins:
            self._why = dict.fromkeys(view.primary, "begin")
        whole = {shard for shard in course.views.caught_up if shard in view.backup}
        for shard in view.primary:
            if shard in whole:
                self._why.pop(shard, None)
            elif shard not in self._why and before is not None:
                self._why[shard] = why = self._reason(shard, before, view, machine)
                self.windows[why] += 1
        self._view, self._whole, self._settled = view, whole, nothing_on_its_way(course)

    def _lost(self, view: View, machine: ClusterMachine) -> list[int]:
        """The shards of `view` that no server holds any more."""
        here = self._here(view, machine)
        return [
            shard for shard, home in view.primary.items()
            if home not in here and not (shard in self._whole and view.backup[shard] in here)
        ]  # fmt: skip

    def _here(self, view: View, machine: ClusterMachine) -> set[str]:
        servers = machine.course.members.servers
        return {member.id for member in view.servers if servers.get(member.id) == member}

    def _reason(self, shard: int, before: View, view: View, machine: ClusterMachine) -> str:
        """Why this shard, which had two copies, has one now."""
        course, copies = machine.course, {before.primary[shard], before.backup[shard]}
        if not copies <= self._here(before, machine):
            return LOSS
        if before.number.epoch < course.views.epoch or view.number < before.number:  # it takes over just now
            return "coordinator"
        if copies & course.members.apart:
            return "apart"
        staying = course.members.staying
        if len(staying) < 2 or len(self._here(before, machine) & staying.keys()) < 2:  # (another has come since)
            return "few"
        moved = view.primary[shard] != before.primary[shard]
        computing = [w for w, own in before.assigned(course.known + 1).items() if own and w in course.members.workers]
        ends = (course.views.orders.paused, course.last)
        in_time = course.strategies.hands_over and course.handover.all_there(before, computing, ends)
        if moved and not (self._settled or in_time):
            return "hurry"
        raise AssertionError(
            f"shard {shard} on {before.primary[shard]} and {before.backup[shard]} in view {before.number} has one copy "
            f"in view {view.number}, on {view.primary[shard]}, although both servers are here"
        )
