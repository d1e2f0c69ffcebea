"""What must be true of the machines of a shard and of a server after every event."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.core.shard.machine import ShardMachine
    from rallypoint.core.shard.server import ServerMachine


def check_shard(shard: ShardMachine) -> None:
    """Raise AssertionError, with a sentence, if the shard is in a state that it can never reach."""
    assert shard.published <= shard.version, f"publishes version {shard.published} at version {shard.version}"
    summing = shard.added > 0
    assert not shard.awaiting or (shard.decides and summing), "a decision is awaited for a sum that there is not"
    assert shard.primary or not (summing or shard._held or shard.wants), "a backup sums, holds or answers"
    assert not shard._choice.pending or (summing and not shard.awaiting), "a choice is told for a finished sum"
    assert shard.primary or not shard.chosen, "a backup takes contributions"
    assert not (shard.primary and shard.differs), "a primary waits for another one's state"
    assert shard.version >= 0 or not (summing or shard._held), "there are contributions before any version"
    shard._sum.validate()
    assert not any(map(shard._sum.knows, shard._held)), f"replicas {sorted(shard._held)} are held, and in the sum"
    assert all(0 <= replica < shard.expected for replica in shard._held), f"{shard._held}: of {shard.expected}"
    if shard.clocks:
        shard.clocks.validate(shard.expected, shard.version)
    else:
        steps = {contribution.step for contribution in shard._sum.contributions}
        assert steps <= {shard.version}, f"contributions to steps {sorted(steps)} at version {shard.version}"
        assert not (shard._held and shard.policy.tree), "a tree holds nothing back"
        counted = shard.tally.applied + shard.tally.dropped
        assert counted % shard.expected == 0, f"{shard.tally}: {shard.expected} are counted with each update"
    shard.copies.validate(shard.version, shard.published, primary=shard.primary)
    shard.tally.validate()


def check_server(server: ServerMachine, fills_at_once: int) -> None:
    """Raise AssertionError, with a sentence, if the server or a shard is in a state that it can never reach."""
    view, me = server.view, server.me
    if view is None:
        assert not server._machines, f"{me} holds shards {server.held} before any view"
        return
    named = {shard for shard in view.primary if me in view.holders_of(shard)}
    assert server._machines.keys() == named, f"{me} holds shards {server.held}, and view {view.number} says {named}"
    for index, machine in server._machines.items():
        assert machine.primary == (view.primary[index] == me), f"{me}, shard {index}: primary in no view"
        for incoming, server_id in enumerate(view.holders_of(index)[1:]):
            known = server.pairs.known.get((index, bool(incoming)), ("",))[0]
            assert not machine.primary or known == server_id, f"{me}, shard {index}: not the view's backup"
        try:
            machine.validate()
        except AssertionError as error:
            raise AssertionError(f"{me}, shard {index}: {error}") from None
    filling = server.pairs.filling
    assert len(filling) <= fills_at_once, f"{me} fills {sorted(filling)} at once"
    for index, incoming in filling:
        copy = server._machines[index].copies.of(incoming)
        assert copy.replicating, f"{me} fills shard {index}, which does not replicate"
    if server._clip is not None:
        own = frozenset(view.shards_of(me)) & server.plan.decides
        assert server._clip.own == own, f"{me} measures shards {sorted(server._clip.own)} instead of {sorted(own)}"
        assert server._clip.generation == view.generation, f"{me} decides for a generation that is over"
        server._clip.validate()
