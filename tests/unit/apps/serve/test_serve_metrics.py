"""Metrics of a server, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from posttrain.apps.serve.metrics import TokenHistogram


def test_histogram_of_tokens_reads_like_that_of_the_library() -> None:
    buckets = (0.001, 0.0025, 0.5, 1.0, 5.0)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = TokenHistogram("seconds", "Text.", buckets)
    ours.register(fast)
    slow = Histogram("seconds", "Text.", ("model", "version"), buckets=buckets, registry=theirs)
    for labels in (("a", "production"), ("b", "canary")):
        for value in (0.0, 0.001, 0.0011, 0.4, 1.0, 4.0, 5.0, 9.0):
            fast.labels(*labels).observe(value)
            slow.labels(*labels).observe(value)
    assert generate_latest(ours) == generate_latest(theirs)
