"""What a simulated server holds and must report, and what must be true of it, while it runs and at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from rallypoint.core.policy import BoundedStaleness, LocalSteps
from rallypoint.core.shard.effects import Apply, Finish, Reply
from rallypoint.core.view import View
from rallypoint.net.frames import Header
from rallypoint.testing.simulation.member import COORDINATOR
from rallypoint.testing.simulation.replicas.contents import GARBAGE, Coded, Content, Mean, State

if TYPE_CHECKING:
    from rallypoint.testing.simulation.server import SimulatedServer


def check_while_it_runs(server: SimulatedServer) -> None:
    """Look at what its reducer publishes and answers, and at what it measures."""
    parts = server.reducer._parts
    publish, reply, measured = parts.followers.publish, parts.followers.reply, parts.decisions.measured
    issue = parts.tickets.issue

    def issued(channel: Any, header: Header, buffer: Any, **settings: Any) -> int:
        note_taken(server, header.kind.name, header.shard, header.step)
        return issue(channel, header, buffer, **settings)

    def published(shard: int, version: int) -> None:
        check_published(server, shard, version)
        publish(shard, version)

    def replied(shard: int, effect: Reply) -> None:
        check_published(server, shard, effect.version)
        check_read(server, shard, effect, server.held[shard].wire[effect.version])
        reply(shard, effect)

    def looked(owned: Any, finish: Finish) -> Any:
        owned.step = finish.step
        return measured(owned, finish)

    if (prints := parts.fingerprints) is not None:
        applied = prints.applied
        cast(Any, prints).applied = lambda shard, version, held: applied(shard, version, held.real)
    for owner, name, checked in (
        (parts.followers, "publish", published), (parts.followers, "reply", replied),
        (parts.decisions, "measured", looked), (parts.tickets, "issue", issued),
    ):  # fmt: skip
        setattr(owner, name, checked)


def note_taken(server: SimulatedServer, kind: str, shard: int = -1, version: int = -1, what: str = "takes") -> None:
    """A contribution, an update or a state that has come counts here (or is heard)."""
    came, now = server.taken_from, server.shell.fence.number
    server.world.note(what, server.node.name, shard, version, now, came.name, (kind, came.view))


def note_held(server: SimulatedServer, shard: int, version: int) -> None:
    """A shard holds that version now."""
    server.world.note("holds", server.node.name, shard, version, server.shell.fence.number)


def note_sent(server: SimulatedServer, header: Header, to: str, content: Any) -> None:
    """A version becomes visible."""
    index, machines = header.shard, server.machine
    view, kept = machines.view, tuple(server.held[index].wire)
    assert view is not None
    copies = [view.backup[index]] if index in machines.caught_up else []
    copies += [view.incoming[index].server] if index in machines.arrived else []
    more = (header.kind.name, content, tuple(copies), kept)
    server.world.note("sends", server.node.name, index, header.step, header.view, to, more)


@contextmanager
def states_that_are_lost(server: SimulatedServer, view: View) -> Iterator[None]:
    """Codec states that were between two workers, and that a view of the same generation drops, are lost."""
    relay = None if server.reducer._codec_states is None else server.reducer._codec_states._relay
    before = server.machine.view
    between = frozenset[Any]() if relay is None else relay.between
    yield
    if relay is not None and before is not None and before.generation == view.generation:
        server.job.lost.extend(key for key in sorted(between) if view.primary.get(key[0]) != server.node.name)


def check_applied(server: SimulatedServer, index: int, update: Apply) -> None:
    """All servers apply it alike."""
    shard = server.machine.machine(index)
    if shard is not None and shard.primary and index in server.machine.plan.decides:
        check_alike(server, index, server.job.cadence.round_of(index, update.version - 1), update.scale)


def check_rows(server: SimulatedServer, shard: int, version: int, content: Content, step: int, replica: int) -> None:
    """AssertionError unless these rows are what the replica may compute this step with."""
    job, machine = server.job, server.machine.machine(shard)
    assert machine is not None
    if job.same_bytes:
        job.check_version(shard, version, content)
    elif machine.policy.streaming:
        bound = step - job.sync.staleness if isinstance(job.sync, BoundedStaleness) else 0
        for other in range(job.replicas):
            missing = sorted(job.written(shard, other, step if other == replica else bound) - content)
            assert not missing, f"rows of shard {shard} for step {step} of replica {replica} lack {missing}"
    elif not job.skip:
        came = f"rows of shard {shard} at version {version} are of {len(content)} contributions"
        assert len(content) == version * (job.config.quorum or job.replicas), came


def check_published(server: SimulatedServer, index: int, version: int) -> None:
    """What everybody may see has the right bytes.

    Not in a generation that is over, where nobody sees it any more (I10): a worker that goes on elsewhere may have let
    a version land over what it still sends to a server that has slept through the roll-back.
    """
    if _is_stale(server):
        return
    content = server.held[index].wire[version]
    server.job.check_whole(index, version, content)
    if not isinstance(content, Mean):
        server.job.check_version(index, version, content.content if isinstance(content, State) else content)


def _is_stale(server: SimulatedServer) -> bool:
    """Has there been a roll-back that this server has not heard of?"""
    view, deciding = server.machine.view, getattr(server.node.world.acceptors.get(COORDINATOR), "machine", None)
    current = None if deciding is None else deciding.view
    return view is not None and current is not None and view.generation < current.generation


def check_read(server: SimulatedServer, index: int, reply: Reply, content: Content) -> None:
    """Everybody reads what they have written; and under a bound whatever is older than that (Ho et al., 2013)."""
    machine = server.machine.machine(index)
    assert machine is not None
    if reply.last:
        assert machine.clocks.steps == [server.job.steps] * machine.expected, f"{reply} before {machine.clocks}"
        server.job.check_end(index, content)
    elif reply.replica < machine.expected:
        sync = server.job.sync
        bound = reply.clock - sync.staleness if isinstance(sync, BoundedStaleness) else 0
        for replica in server.job.contributing(index):
            written = server.job.written(index, replica, reply.clock if replica == reply.replica else bound)
            missing = sorted(written - content)
            assert not missing, f"{server.node.name}: shard {index}: {reply} runs ahead of {missing}"


def decoded(server: SimulatedServer, index: int, payload: Content | Coded) -> Content:
    """The contribution in a payload that is added to the shard's sum.

    AssertionError if its codec state is stale, or was used for another step's contribution already. (Where all replicas
    contribute to each step it must be the state after the step before.)
    """
    if not isinstance(payload, Coded):
        return payload
    step, replica, after, generation = payload.step, payload.replica, payload.after, payload.generation
    what = f"{server.node.name}: shard {index}: the contribution of replica {replica} to step {step}"
    now = server.shell.fence.generation
    used = server.used.setdefault((now, index, replica, after), step) if after >= 0 else step
    all_count = server.job.same_bytes or isinstance(server.job.sync, LocalSteps)
    fits = after in (-1, step - 1) if all_count else used == step and after < step
    assert fits, f"{what} is made from the codec state after step {after}, as was that to step {used}"
    assert generation in (None, now), f"{what} is made from a codec state of generation {generation}; it is {now}"
    assert payload.content != GARBAGE, f"{what} was encoded by a worker whose codec state is ahead of it"
    assert server.job.may_differ or after == step - 1 or step == 0, f"{what} is made from no codec state"
    return payload.content


def check_alike(server: SimulatedServer, index: int, step: int, scale: float | None) -> None:
    """All servers take the same decision for a step of a generation: one scale for all its shards.

    Where codec states are lost, only in a generation's first view: a shard that is promoted later may sum contributions
    of other bytes.
    """
    view = server.machine.view
    assert view is not None
    if server.job.may_differ and view.number != view.generation:
        return
    server.decided[view.generation, step] = (index, scale)
    for other in server.node.world.acceptors.values():
        if isinstance(other, type(server)) and (known := other.decided.get((view.generation, step))) is not None:
            assert known[1] == scale, (
                f"step {step} is scaled by {scale} in shard {index} on {server.node.name}, and by {known[1]} in shard "
                f"{known[0]} on {other.node.name}"
            )


def check_tally(server: SimulatedServer, index: int) -> None:
    """Every contribution of the job was applied, folded into another's update, or dropped: once, and no other."""
    machine = server.machine.machine(index)
    assert machine is not None
    tally, job = machine.tally, server.job
    wrong = f"{server.node.name}: shard {index}: {tally}"
    assert tally.applied + tally.folded + tally.dropped == job.last_version(index) * machine.expected, wrong
    assert tally.applied + tally.folded == len(server.held[index].master), wrong
    if machine.clocks:
        assert sum(tally.staleness.values()) == job.steps * machine.expected, wrong
        assert machine.version == tally.applied + (tally.dropped if job.skip else 0), wrong


def check_staleness(server: SimulatedServer) -> None:
    """Between what a contribution was computed from and its own update there are at most (2s + 1)(R - 1) others: of
    each other replica the s steps that were not seen, its own step's, and s that are ahead of it."""
    if not isinstance(sync := server.job.sync, BoundedStaleness):
        return
    for index in server.machine.held:
        machine = server.machine.machine(index)
        assert machine is not None
        most, bound = max(machine.tally.staleness, default=0), (2 * sync.staleness + 1) * (machine.expected - 1)
        assert most <= bound, f"{server.node.name}: shard {index}: {most} updates late, {bound} are allowed"
