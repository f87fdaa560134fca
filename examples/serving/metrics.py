"""What is counted, in Prometheus' text form; the names follow vLLM's."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from neuron_streams.decode import DecodeEngine, DecodeStats, RecentLatencies, RequestMetrics
from neuron_streams.decode.stats import COUNTERS, GAUGES

__all__ = ["Metrics"]

_PREFIX = "neuron_streams"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONGEST_RETRY = 30


class Metrics:
    """The metrics of one server.

    Args:
        engine: Whose stats are shown beside them.
    """

    def __init__(self, engine: DecodeEngine) -> None:
        self.registry = registry = CollectorRegistry()
        self.sequences = Gauge(
            "num_requests",
            "Sequences admitted and not ended.",
            namespace=_PREFIX,
            registry=registry,
        )
        self._refused = Counter(
            "refused_requests",
            "Requests refused, by HTTP status.",
            ["status"],
            namespace=_PREFIX,
            registry=registry,
        )
        self._finished = Counter(
            "request_success",
            "Sequences that ended, by finish reason; abort: the client left, or the server ended.",
            ["finished_reason"],
            namespace=_PREFIX,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "prompt_tokens", "Tokens of their prompts.", namespace=_PREFIX, registry=registry
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self._between_tokens = self._histogram(
            "inter_token_latency_seconds", "Between a token and the one before."
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end."
        )
        self._recent = RecentLatencies(128)
        registry.register(_StatsCollector(engine))

    def count_end(self, reason: str, times: RequestMetrics | None) -> None:
        """Count the end of a sequence; its times are None where its last output was not read."""
        self._finished.labels(reason).inc()
        if times is None:
            return
        self._prompt_tokens.inc(times.num_prompt_tokens)
        self._whole.observe(times.seconds)
        self._recent.extend([times.seconds])
        if times.time_to_first_token is not None:
            self._first_token.observe(times.time_to_first_token)
        for seconds in times.inter_token_latencies:
            self._between_tokens.observe(seconds)

    def count_refusal(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    @property
    def retry_after(self) -> int:
        """Seconds in which half of what is there will have ended, by what ended last."""
        usual = self._recent.p50
        return 1 if math.isnan(usual) else min(max(1, math.ceil(usual)), _LONGEST_RETRY)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _histogram(self, name: str, help_line: str) -> Histogram:
        return Histogram(
            name, help_line, namespace=_PREFIX, registry=self.registry, buckets=_SECONDS
        )


class _StatsCollector(Collector):
    """The stats of the decode loop, read when they are asked for."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []  # so that to register it reads nothing

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        for kind, figures in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, help_line in figures.items():
                family = kind(f"{_PREFIX}_{name}", help_line)
                family.add_metric([], getattr(stats, name))
                yield family
        yield _by_reason(stats)


def _by_reason(stats: DecodeStats) -> CounterMetricFamily:
    family = CounterMetricFamily(
        f"{_PREFIX}_sync_fallback_steps",
        "Steps launched once the tokens of the step before had been read, by reason.",
        labels=["reason"],
    )
    for reason, count in dict(stats.fallback_reasons).items():
        family.add_metric([reason], count)
    return family
