"""Prometheus metrics of a server. Each server has its own registry."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
# No extra series with the creation time of each counter.
disable_created_metrics()

_OF_A_MODEL = ("model", "version")


class ValueCounts:
    """The values of one series of a `TokenHistogram`."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0
        self._buckets = buckets

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._buckets, value)] += 1
        self.sum += value


class TokenHistogram(Collector):
    """A histogram with a value for each token. That of `prometheus_client` takes a lock twice for a value, and four
    times as long; values come from one thread here.
    """

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._buckets = name, text, buckets
        self._series: dict[tuple[str, ...], ValueCounts] = {}

    def labels(self, *labels: str) -> ValueCounts:
        return self._series.setdefault(labels, ValueCounts(self._buckets))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=_OF_A_MODEL)
        bounds = [*map(str, self._buckets), "+Inf"]
        for labels, series in self._series.items():
            family.add_metric(labels, list(zip(bounds, accumulate(series.counts), strict=True)), series.sum)
        yield family


class ServeMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"posttrain_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"posttrain_{name}", text, _OF_A_MODEL, buckets=buckets, registry=self.registry)

        self.requests = counter("requests", "Admitted requests by outcome.", (*_OF_A_MODEL, "outcome"))
        self.refused = counter("refused_requests", "Refused requests by HTTP status.", ("status",))
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests.", _OF_A_MODEL)
        self.completion_tokens = counter("completion_tokens", "Sampled tokens.", _OF_A_MODEL)
        self.feedback = counter("feedback", "Scores received.", ("version",))
        self.request_seconds = histogram("request_seconds", "From admission to the end of the answer.", _SECONDS)
        self.first_token_seconds = histogram(
            "time_to_first_token_seconds", "From admission to the first token.", _SECONDS
        )
        self.inter_token_seconds = TokenHistogram(
            "posttrain_inter_token_seconds", "Between two tokens of one choice.", _SHORT_SECONDS
        )
        self.registry.register(self.inter_token_seconds)

    def watch(self, name: str, text: str, values: Mapping[str, Callable[[], float]], label: str = "version") -> None:
        """A gauge that is read on each scrape: one value per label."""
        gauge = Gauge(f"posttrain_{name}", text, (label,), registry=self.registry)
        for key, read in values.items():
            gauge.labels(key).set_function(read)

    def render(self) -> bytes:
        return generate_latest(self.registry)
