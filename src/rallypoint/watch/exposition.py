"""Readings as Prometheus' text format, by prometheus_client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rallypoint.watch.metrics import MEASURES, Figure, Several
from rallypoint.watch.state import HistogramCounts

_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "summary": SummaryMetricFamily,
             "histogram": HistogramMetricFamily}  # fmt: skip

Read = Callable[[], Iterable[Figure]]


class Exposition(Collector):
    """What one process answers to a scrape: `read()`'s readings, and its own CPU, memory and file descriptors.

    Nothing is computed before somebody asks.
    """

    def __init__(self, read: Read) -> None:
        self._read, self._registry = read, CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics, and their content type, in the format that the ``Accept`` header asks for."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Any] = {}
        for reading in self._read():
            measure = MEASURES[reading.name]
            family = families.get(reading.name)
            if family is None:
                made = _FAMILIES[measure.kind](reading.name, measure.help, labels=measure.labels)
                family = families[reading.name] = made
            labels = [reading.labels[label] for label in measure.labels]
            match reading.value:
                case HistogramCounts(bounds, cumulative, count, total):
                    buckets = [(f"{bound:g}", number) for bound, number in zip(bounds, cumulative, strict=True)]
                    family.add_metric(labels, [*buckets, ("+Inf", count)], total)
                case Several(count, total):
                    family.add_metric(labels, count, total)
                case value:
                    family.add_metric(labels, value)
        yield from families.values()
