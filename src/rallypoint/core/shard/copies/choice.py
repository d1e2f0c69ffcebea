"""Which contributions a round's update takes, where the first to come are taken and servers decide by the sum's norm.

```
   primary: the sum has all that it takes --Choose--> backup: learns the choice
   primary: finishes the sum, tells the norm <--Acknowledge-- backup
```

Example: a quorum of 2 of 3. Server a takes replicas 2 and 0 of step 7 and tells some servers the norm of their mean.
Then it dies. Its backup takes 2 and 0 too, although 1 may come first now. So all servers get the same norm, whoever
tells it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rallypoint.core.shard.effects import Acknowledge, Choose
from rallypoint.core.shard.events import Chosen, Contribute


@dataclass(slots=True)
class Choice:
    """One shard's choice for the round in progress.

    `pending`: this primary's sum has all of its contributions, and waits until the backup knows which. A backup may
    hear of the choice before it has the version that the choice is for: with a state the choice goes first, and on a
    link urgent frames overtake updates.
    """

    pending: bool = False
    _learnt: Chosen | None = None  # on a backup: the newest choice that the primary has told

    def tell(self, step: int, taken: Iterable[Contribute]) -> Choose:
        """Tell the backup which contributions to `step` are taken, in the order of adding."""
        return Choose(step, tuple(contribution.replica for contribution in taken))

    def learn(self, chosen: Chosen) -> None:
        """The primary has told this backup its choice."""
        self._learnt = chosen

    def acknowledge(self, version: int) -> Acknowledge:
        """This backup has `version`, and perhaps the choice for the next one too."""
        return Acknowledge(version, chosen=bool(self.known(version)))

    def known(self, step: int) -> tuple[int, ...]:
        """The replicas that the primary has chosen for `step`, in its order; empty if it has told none."""
        return self._learnt.replicas if self._learnt is not None and self._learnt.step == step else ()
