"""A server's part in a change of the learning rate: which updates wait, and until when.

An operator orders a factor on the learning rate, while updates are made all the time. All servers, primaries and
backups, must apply it from the same version on, whoever dies meanwhile:

```
    view with `rescale`       each server: from `at` on no shard that is primary here is updated; RateAwaited(view, at)
    view without `rescale`    it says in `scales` from which version on the factor counts: the highest `at`; all go on
```

Why nobody has made that update before it knows its rate:

- A primary that has said `at` makes no update from `at` on before the second view, and `at` is at most the version
  settled. What it had made, or finished the sum of, before the first view was earlier than `at`.
- A server that becomes primary in between does so by a view; it says a new `at` for that one, with the versions that
  it has then. Only what was said in the view in force counts.
- A server that was replaced may still make updates. Nobody sees them: its backup, which has the newer view, does not
  acknowledge them (I4, I10).
- A backup makes the updates that its primary sends. A frame of a newer view waits for that view (`Fence`): so what the
  primary sends after the second view is made with the second view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rallypoint.core.shard.events import NEVER
from rallypoint.core.shard.machine import ShardMachine
from rallypoint.core.view import View, ViewNumber


@dataclass(frozen=True, slots=True)
class RateAwaited:
    """Tell the coordinator: under view `number`, no shard that is primary here is updated from version `at` on."""

    number: ViewNumber
    at: int


@dataclass(slots=True)
class RateHold:
    """What one server holds back; `said` is what it has told the coordinator, None while it holds nothing back."""

    said: RateAwaited | None = None

    def adopt(self, view: View, machines: Mapping[int, ShardMachine]) -> list[int]:
        """Hold updates back, or let them go on, as this view says. Returns the shards that are to get `GoOn`."""
        primaries = sorted(index for index, machine in machines.items() if machine.primary)
        held, self.said = self.said is not None, None
        if view.rescale is not None and primaries:
            self.said = RateAwaited(view.number, max(0, *(_begun(machines[index]) for index in primaries)))
        for machine in machines.values():
            machine.waits_at = self._at(machine)
        return primaries if held else []

    def again(self) -> list[RateAwaited]:
        """What the coordinator has to know, once more: it may have been restarted."""
        return [] if self.said is None else [self.said]

    def validate(self, machines: Mapping[int, ShardMachine]) -> None:
        """Raise AssertionError, with a sentence, if a shard waits that must not, or does not wait."""
        for index, machine in machines.items():
            at = self._at(machine)
            assert machine.waits_at == at, f"shard {index} waits at {machine.waits_at} instead of {at}"

    def _at(self, machine: ShardMachine) -> int:
        return self.said.at if self.said is not None and machine.primary else NEVER


def _begun(machine: ShardMachine) -> int:
    """The first version whose update is not begun: no sum for it is finished."""
    return machine.version + (machine.awaiting or machine._choice.pending)
