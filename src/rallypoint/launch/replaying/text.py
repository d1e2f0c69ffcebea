"""A replay's result in words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rallypoint.launch.replaying.command import Replayed, Replica
from rallypoint.launch.replaying.task import Layer
from rallypoint.observe.lines import printable

_SAMPLES, _LAYERS = 64, 12  # that are shown


def differs(result: Replayed) -> bool:
    """True if the replay has not the recorded bytes."""
    return bool(result.departs or result.version.differ or any(one.compared.differ for one in result.replicas))


def lines_of(result: Replayed, *, layers: bool) -> Iterator[str]:
    """Yield the lines that say what was seen, each `printable`; with `layers` each sample and
    each layer's gradient too."""
    for line in _lines(result, layers=layers):
        yield printable(line, len(line))  # a run's folder may be somebody else's


def _lines(result: Replayed, *, layers: bool) -> Iterator[str]:
    if result.spike:
        usual = f", usually {_short(result.usual)}" if result.usual else ""
        yield f"step {result.step} stands out: its recorded loss is {_short(result.spike)}{usual}"
    if (probed := result.probed) is not None:
        losses = ", ".join(map(_short, probed.losses))
        yield f"  losses of its replicas 0 to {len(probed.losses) - 1}: {losses}"
        alone = f": loss {_short(probed.alone)} alone" if probed.alone != "nan" or len(probed.samples) == 1 else ""
        what = "sample" if len(probed.samples) == 1 else "one of the samples"
        yield f"  it is replica {probed.replica}, {what} {', '.join(map(str, probed.samples))} of the data set{alone}"
    recorded = f"recorded {_short(result.recorded_loss)}" if result.recorded_loss else "none is recorded"
    same = " (equal)" if result.loss and result.loss == result.recorded_loss else ""
    yield f"step {result.step}: loss {_short(result.loss) or 'not finite'}, {recorded}{same}; on {result.device}"
    for replica in result.replicas:
        yield from _replica(replica, layers=layers)
    yield _version(result)
    if result.departs:
        yield f"differs from what is recorded: {result.departs}"


def _replica(replica: Replica, *, layers: bool) -> Iterator[str]:
    seen, compared = replica.seen, replica.compared
    samples = ", ".join(map(str, seen.samples[:_SAMPLES])) + (", ..." if len(seen.samples) > _SAMPLES else "")
    yield f"replica {seen.replica}: loss {_short(seen.loss_text)}, gradient norm {_short(seen.norm_text)}"
    yield f"  samples {samples}"
    if layers:
        for place, text in zip(seen.samples, seen.described, strict=False):
            yield f"    {place}: {text}"
    if (bad := seen.not_finite) is not None:
        inputs = "its inputs are finite" if bad.inputs else "so are some of its inputs"
        own = "" if bad.parameters else ", and its own parameters are not"
        yield f"  first output that is not finite: {bad.module} ({bad.kind}); {inputs}{own}"
    if (spoilt := [layer for layer in seen.layers if layer.not_finite]) and seen.not_finite is None:
        yield f"  gradients that are not finite, though all outputs are: {_named(spoilt)}"
    if layers:
        width = max((len(layer.name) for layer in seen.layers), default=0)
        for layer in seen.layers:
            spoilt_here = f", {layer.not_finite} not finite" if layer.not_finite else ""
            extremes = f"norm {layer.norm:.6g}, from {layer.least:.6g} to {layer.most:.6g}"
            yield f"  {layer.name:<{width}}  {extremes}{spoilt_here}"
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
        return f"version {version.version}, after the step: {', '.join(version.differ[:_LAYERS])} differ"
    if version.equal:
        return f"version {version.version}, after the step: equal"
    return f"version {version.version}, after the step: the run has recorded nothing of it"


def _named(layers: list[Layer]) -> str:
    names = [layer.name for layer in layers[:_LAYERS]]
    return ", ".join(names) + (f" and {len(layers) - _LAYERS} more" if len(layers) > _LAYERS else "")


def _short(text: str) -> str:
    """Return a number in a few digits."""
    try:
        value = float(text)
    except ValueError:
        return text
    return f"{value:.6g}" if math.isfinite(value) else text
