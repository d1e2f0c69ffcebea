"""The messages that bring a view: whole, or as the difference to the one that came before on the same connection."""

from __future__ import annotations

import msgspec

from rallypoint.core.typed import Index, Name
from rallypoint.core.view import View, ViewNumber
from rallypoint.core.views.difference import ViewDifference
from rallypoint.net.greetings import AnyMessage, Hidden, Secret, Shown


class NewView(AnyMessage, frozen=True):
    """The new view. `tickets` are the receiver's own, by server: it proves itself with them to the view's servers. They
    are encrypted on their way. With `proof` the receiver shows the next coordinator that an earlier one has published
    this view."""

    view: View
    tickets: dict[Name, Hidden] = msgspec.field(default_factory=dict)
    proof: Secret = b""


class ViewChange(AnyMessage, frozen=True):
    """The new view, as the difference to the last one that came on this connection.

    `tickets` are those for servers that are new since then (or new to the receiver); the others count on.
    """

    change: ViewDifference
    tickets: dict[Name, Hidden] = msgspec.field(default_factory=dict)
    proof: Secret = b""


class Reached(AnyMessage, frozen=True):
    """From a worker: it holds `version` of this generation. A view has asked for that: `core.worker.ending`."""

    version: Index
    generation: ViewNumber


class Unrestored(Shown, frozen=True):
    """From a server: the snapshot with which this generation begins is damaged, and it cannot load its shards."""

    reason: str
    generation: ViewNumber


OfViews = NewView | ViewChange
