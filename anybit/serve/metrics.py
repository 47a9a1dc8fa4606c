"""Metrics for Prometheus, under vLLM's names, so that dashboards and clients find them."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from anybit.engine.engine import Engine, Observer
from anybit.engine.ready import after_ready
from anybit.engine.sequence import Sequence

REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2, 5)


class Metrics(Observer):
    """Times as histograms, filled while the engine runs; the rest is read when someone asks."""

    def __init__(self, engine: Engine, model: str, kv_cache: str):
        self.engine, self.model, self.kv_cache = engine, model, kv_cache
        self.registry = CollectorRegistry()
        self.first = self._histogram("time_to_first_token_seconds", "Until the first token", FIRST)
        self.between = self._histogram("inter_token_latency_seconds", "Between tokens", BETWEEN)
        self.whole = self._histogram("e2e_request_latency_seconds", "Until the last token", REQUEST)
        self.queued = self._histogram("request_queue_time_seconds", "In the queue", REQUEST)
        self.registry.register(self)
        engine.observer = self

    def text(self) -> bytes:
        """All metrics in the exposition format."""
        return generate_latest(self.registry)

    # From the engine's thread.

    def token(self, seq: Sequence, since: float | None) -> None:
        assert seq.last_token is not None
        if since is None:
            self.first.observe(seq.last_token - seq.arrival)
            self.queued.observe((seq.started or seq.arrival) - seq.arrival)
        else:
            self.between.observe(seq.last_token - since)

    def finished(self, seq: Sequence) -> None:
        self.whole.observe(time.monotonic() - seq.arrival)

    # When someone asks.

    def collect(self) -> Iterator[Metric]:
        scheduler, stats = self.engine.scheduler, self.engine.stats
        for name, what, value in (
            ("num_requests_running", "Sequences that are running", len(scheduler.running)),
            ("num_requests_waiting", "Sequences in the queue", len(scheduler.waiting)),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", scheduler.blocks.usage),
        ):
            yield family(GaugeMetricFamily, f"vllm:{name}", what, value, model_name=self.model)
        blocks = scheduler.blocks
        yield family(
            GaugeMetricFamily, "vllm:cache_config_info", "The KV cache", 1, model_name=self.model,
            cache_dtype=self.kv_cache, block_size=str(blocks.block_size),
            num_gpu_blocks=str(blocks.count),
        )  # fmt: skip
        for name, what, value in (
            ("prompt_tokens", "Prompt tokens of sequences that have started", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.generation_tokens),
            ("num_preemptions", "Preempted sequences, which start over", scheduler.preemptions),
            ("spec_decode_num_drafts", "Drafts", stats.drafts),
            ("spec_decode_num_draft_tokens", "Tokens in drafts", stats.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted", stats.accepted_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up", scheduler.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the cache", scheduler.prefix_hits),
        ):
            yield family(CounterMetricFamily, f"vllm:{name}", what, value, model_name=self.model)
        compiled, captured = after_ready(self.engine)
        for name, what, value in (
            ("compilations", "Kernels compiled or loaded", compiled),
            ("captures", "Graphs captured", captured),
        ):
            what = f"{what} since the server was ready"
            yield family(CounterMetricFamily, f"anybit:{name}_after_ready", what, value)
        ended = CounterMetricFamily(
            "vllm:request_success",
            "Ended sequences, by reason",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in list(stats.finished.items()):
            ended.add_metric([self.model, reason], count)
        yield ended

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", what, ["model_name"], registry=self.registry, buckets=buckets
        )
        return histogram.labels(self.model)


def family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    what: str,
    value: float,
    **labels: str,
) -> Metric:
    """A metric of one number."""
    out = kind(name, what, labels=list(labels))
    out.add_metric(list(labels.values()), value)
    return out
