"""The receiving side of views: makes a whole view of each difference that comes."""

from __future__ import annotations

from rallypoint.core.view import Member, View
from rallypoint.core.views.difference import WrongBase, apply, canonical
from rallypoint.errors import CorruptFrame
from rallypoint.net.views.messages import NewView, OfViews


class ViewReceiver:
    """The views that come on one connection to the coordinator, and this member's tickets. One thread only.

    A new connection needs a new one: its first view comes whole.
    """

    def __init__(self) -> None:
        self._last: NewView | None = None

    def take(self, message: OfViews) -> NewView:
        """The whole view, with all tickets that count.

        CorruptFrame if it is a difference that does not lead from the view before to another one: then make the
        connection anew, and the whole view comes.
        """
        if isinstance(message, NewView):
            self._last = NewView(canonical(message.view), message.tickets, message.proof)
            return self._last
        if self._last is None:
            raise CorruptFrame("a difference to a view came, and no view before it")
        before = self._last
        try:
            view = apply(message.change, before.view)
        except WrongBase as error:
            raise CorruptFrame(str(error)) from None
        tickets = {**_kept(before, view), **message.tickets}
        self._last = NewView(view, tickets, message.proof)
        return self._last


def _kept(before: NewView, view: View) -> dict[str, bytes]:
    """The tickets for servers and aggregators that were in the view before and still are."""
    was = {one.id: one.incarnation for one in listeners(before.view)}
    here = {one.id: one.incarnation for one in listeners(view)}
    return {id: ticket for id, ticket in before.tickets.items() if here.get(id, -1) == was.get(id, -2)}


def listeners(view: View) -> tuple[Member, ...]:
    """The members for which others have tickets."""
    return (*view.servers, *view.aggregators)
