"""Metrics for Prometheus, under vLLM's names, so that dashboards and clients find them."""

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from anybit.engine.engine import Engine, Observer
from anybit.engine.ready import after_ready
from anybit.engine.sequence import Sequence
from anybit.serve.times import HISTOGRAMS, Times


class Metrics(Observer):
    """Times as histograms, filled while the engine runs; the rest is read when someone asks."""

    def __init__(self, engine: Engine, model: str, kv_cache: str):
        self.engine, self.model, self.kv_cache = engine, model, kv_cache
        self.times = {name: Times(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.first = self.times["vllm:time_to_first_token_seconds"]
        self.between = self.times["vllm:inter_token_latency_seconds"]
        self.whole = self.times["vllm:e2e_request_latency_seconds"]
        self.queued = self.times["vllm:request_queue_time_seconds"]
        self.read = self.times["vllm:request_prefill_time_seconds"]
        self.registry = CollectorRegistry()
        self.registry.register(self)
        engine.observer = self

    def text(self) -> bytes:
        """All metrics in the exposition format."""
        return generate_latest(self.registry)

    def merge(self, seen: Mapping[str, tuple[list[int], float]]) -> None:
        """Add what a front end has seen."""
        for name, (counts, total) in seen.items():
            self.times[name].merge(counts, total)

    # While the engine runs.

    def token(self, seq: Sequence, since: float | None) -> None:
        assert seq.last_token is not None
        if since is None:
            started = seq.started or seq.arrival
            self.first.add(seq.last_token - seq.arrival)
            self.queued.add(started - seq.arrival)
            self.read.add(seq.last_token - started)
        else:
            self.between.add(seq.last_token - since)

    def finished(self, seq: Sequence) -> None:
        self.whole.add(time.monotonic() - seq.arrival)

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
            GaugeMetricFamily,
            "vllm:cache_config_info",
            "The KV cache",
            1,
            model_name=self.model,
            cache_dtype=self.kv_cache,
            block_size=str(blocks.block_size),
            num_gpu_blocks=str(blocks.count),
        )
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
        for name, (what, _) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, what, labels=["model_name"])
            buckets, total = self.times[name].cumulative()
            histogram.add_metric([self.model], buckets, total)
            yield histogram


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
