"""A replay's result in words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rallypoint.launch.replaying.command import Replayed, Replica
from rallypoint.observe.lines import printable

_SAMPLES, _TENSORS = 64, 12  # that are shown


def differs(result: Replayed) -> bool:
    """True if the replay has not the recorded bytes."""
    return bool(result.departs or result.version.differ or any(one.compared.differ for one in result.replicas))


def lines_of(result: Replayed) -> Iterator[str]:
    """Yield the lines that say what was seen, each `printable`."""
    for line in _lines(result):
        yield printable(line, len(line))  # a run's folder may be somebody else's


def _lines(result: Replayed) -> Iterator[str]:
    if result.spike:
        usual = f", usually {_short(result.usual)}" if result.usual else ""
        yield f"step {result.step} stands out: its recorded loss is {_short(result.spike)}{usual}"
        losses = ", ".join(map(_short, result.losses))
        yield f"  losses of its replicas 0 to {len(result.losses) - 1}: {losses}"
    recorded = f"recorded {_short(result.recorded_loss)}" if result.recorded_loss else "none is recorded"
    same = " (equal)" if result.loss and result.loss == result.recorded_loss else ""
    yield f"step {result.step}: loss {_short(result.loss) or 'not finite'}, {recorded}{same}; on {result.device}"
    for replica in result.replicas:
        yield from _replica(replica)
    yield _version(result)
    if result.departs:
        yield f"differs from what is recorded: {result.departs}"


def _replica(replica: Replica) -> Iterator[str]:
    seen, compared = replica.seen, replica.compared
    samples = ", ".join(map(str, seen.samples[:_SAMPLES])) + (", ..." if len(seen.samples) > _SAMPLES else "")
    yield f"replica {seen.replica}: loss {_short(replica.loss)}, samples {samples} of the data set"
    if (bad := seen.not_finite) is not None:
        inputs = "its inputs are finite" if bad.inputs else "so are some of its inputs"
        own = "" if bad.parameters else ", and its own parameters are not"
        yield f"  first output that is not finite: {bad.module} ({bad.kind}); {inputs}{own}"
    total = compared.equal + compared.unknown + len(compared.differ)
    if not compared.worker:
        yield f"  contribution: {total} shards; the run has recorded none of this step (fingerprints=)"
    elif compared.differ:
        shard, names = next(iter(compared.differ.items()))
        yield (
            f"  contribution: {len(compared.differ)} of {total} shards differ from what {compared.worker} computed "
            f"then; the first is shard {shard} ({', '.join(names)})"
        )
    else:
        yield f"  contribution: {compared.equal} of {total} shards equal what {compared.worker} computed then"


def _version(result: Replayed) -> str:
    version = result.version
    if version.differ:
        return f"version {version.version}, after the step: {', '.join(version.differ[:_TENSORS])} differ"
    if version.equal:
        return f"version {version.version}, after the step: equal"
    return f"version {version.version}, after the step: the run has recorded nothing of it"


def _short(text: str) -> str:
    """Return a number in a few digits."""
    try:
        value = float(text)
    except ValueError:
        return text
    return f"{value:.6g}" if math.isfinite(value) else text
