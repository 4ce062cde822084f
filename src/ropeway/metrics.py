"""Every Prometheus metric, in one registry of our own; in the API process only.

Owns: names, labels, buckets, and turning step messages and request times into samples. Must not know: HTTP, the engine.
Called by: engine client (on_step, once per step), service (once per token and per sequence), app (refusals, the page).

The `vllm:` names are those that existing dashboards, autoscalers and routers read. Label values come from fixed sets, so
the number of series does not grow with users, request ids or wrong model names.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ropeway.config import Config
from ropeway.protocol import EngineReady, StepOutputs

# A `_created` series beside each counter doubles the page, and nobody reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
GRAMMAR_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
OVERLOAD = (("429", "queue_full"), ("429", "token_queue_full"), ("503", "draining"), ("503", "engine_dead"))
PAGE_SECONDS = 0.1  # some routers scrape 20 times a second
LABELS = ("model_name", "engine")


class SequenceTimes(Protocol):
    """What a finished sequence tells of itself; RequestStream has it. Times are time.monotonic()."""

    num_prompt_tokens: int
    num_output_tokens: int
    first_scheduled: float | None
    first_token_time: float | None
    last_token_time: float | None


def length_buckets(max_model_len: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 ... up to max_model_len."""
    buckets: list[int] = []
    decade = 1
    while decade <= max_model_len:
        buckets += [factor * decade for factor in (1, 2, 5) if factor * decade <= max_model_len]
        decade *= 10
    return buckets


def _bound_label(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(float(bound))


class TokenHistogram(Collector):
    """A histogram for the token path: prometheus-client's takes a lock and a walk over the buckets per observation."""

    def __init__(self, name: str, help: str, buckets: Sequence[float], labels: Sequence[str]) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=LABELS)
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((_bound_label(bound), total))
        family.add_metric(self._labels, buckets, self._sum)
        yield family


class Metrics:
    """Built before the engine starts, because the engine's client reports to it; ``mark_ready`` adds what only the
    started engine knows."""

    def __init__(self, model_name: str, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        # --no-vllm-metrics: the objects are there, but on no page.
        self._vllm_registry = self.registry if config.server.vllm_metrics else CollectorRegistry()
        self._config = config
        self._labels = (model_name, "0")
        self._clock = clock
        self._page = b""
        self._page_time = float("-inf")
        self._refresh: Callable[[], None] = lambda: None
        ProcessCollector(registry=self.registry)
        self._build_vllm()
        self._build_own()

    def _build_vllm(self) -> None:
        gauge, counter, histogram = self._vllm_gauge, self._vllm_counter, self._vllm_histogram
        self._running = gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = gauge("num_requests_waiting", "Requests waiting to be scheduled.")
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._gpu_usage = gauge("gpu_cache_usage_perc", "Old name of vllm:kv_cache_usage_perc.")
        Gauge(
            "vllm:lora_requests_info",
            "Running adapters; there are none.",
            (*LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            registry=self._vllm_registry,
        ).labels(*self._labels, "0", "", "")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._preemptions = counter("num_preemptions", "Preemptions of running requests.")
        self._prefix_queries = counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        counter("spec_decode_num_drafts", "Drafts made.")
        counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        success = Counter(
            "vllm:request_success",
            "Sequences ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self._vllm_registry,
        )
        self._finished = {
            reason: success.labels(*self._labels, reason) for reason in ("stop", "length", "abort", "error")
        }
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self._itl = TokenHistogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", TOKEN_BUCKETS, self._labels
        )
        self._vllm_registry.register(self._itl)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_BUCKETS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", REQUEST_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "Arrival to first scheduled.", REQUEST_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", "Scheduled to first token.", REQUEST_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", "First to last token.", REQUEST_BUCKETS)
        self._inference = histogram("request_inference_time_seconds", "Scheduled to last token.", REQUEST_BUCKETS)
        self._step_tokens = histogram("iteration_tokens_total", "Tokens computed in one step.", STEP_TOKEN_BUCKETS)
        self._prompt_lengths: Histogram | None = None  # their buckets end at max_model_len
        self._generation_lengths: Histogram | None = None

    def _build_own(self) -> None:
        registry = self.registry
        self._refusals = Counter(
            "ropeway_requests_refused", "Requests answered with an error.", ("status", "cause"), registry=registry
        )
        for status, cause in OVERLOAD:
            self._refusals.labels(status, cause)
        missed = Counter(
            "ropeway_deadline_misses", "Requests that ran out of their time, by limit.", ("limit",), registry=registry
        )
        self._missed = {limit: missed.labels(limit) for limit in ("queue_timeout", "deadline")}
        self.in_flight = Gauge("ropeway_requests_in_flight", "Client requests being served.", registry=registry)
        self.draining = Gauge("ropeway_draining", "1 while no new work is wanted.", registry=registry)
        self._restarts = Counter("ropeway_engine_restarts", "Restarts of the engine process.", registry=registry)
        self._known_restarts = 0
        self._kv_tokens = Gauge("ropeway_kv_tokens_live", "Tokens held in used KV blocks.", registry=registry)
        blocks = Gauge(
            "ropeway_kv_blocks", "KV blocks by state; free ones may be cached.", ("state",), registry=registry
        )
        self._blocks_used, self._blocks_free = blocks.labels("used"), blocks.labels("free")
        self._blocks_cached = Gauge(
            "ropeway_kv_blocks_cached", "Free KV blocks that hold a cached prefix.", registry=registry
        )
        self._grammar_seconds = Histogram(
            "ropeway_grammar_compile_seconds",
            "Time to try a grammar that was not known yet.",
            buckets=GRAMMAR_BUCKETS,
            registry=registry,
        )
        self._grammar_refusals = Counter(
            "ropeway_grammar_refusals", "Grammars that were refused.", ("cause",), registry=registry
        )
        for cause in ("invalid", "timeout", "crash", "queue_full"):
            self._grammar_refusals.labels(cause)
        self._recomputed = Counter(
            "ropeway_recomputed_tokens", "Computed tokens thrown away by preemptions.", registry=registry
        )
        self._steps = Counter("ropeway_steps", "Engine steps.", registry=registry)
        seconds = Counter("ropeway_step_seconds", "Time spent in engine steps, by part.", ("part",), registry=registry)
        self._schedule, self._execute, self._update = map(seconds.labels, ("schedule", "execute", "update"))
        self._startup = Gauge("ropeway_startup_seconds", "Time to start, by phase.", ("phase",), registry=registry)
        self._build = Gauge(
            "ropeway_build_info",
            "Always 1; what is running.",
            ("version", "model_name", "architecture", "dtype", "device"),
            registry=registry,
        )

    def _vllm_gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"vllm:{name}", help, LABELS, registry=self._vllm_registry).labels(*self._labels)

    def _vllm_counter(self, name: str, help: str) -> Counter:
        return Counter(f"vllm:{name}", help, LABELS, registry=self._vllm_registry).labels(*self._labels)

    def _vllm_histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(f"vllm:{name}", help, LABELS, registry=self._vllm_registry, buckets=buckets)
        return metric.labels(*self._labels)

    def mark_ready(self, ready: EngineReady) -> None:
        """Facts found at start: buckets of lengths, cache facts, phases. Call once."""
        buckets = length_buckets(ready.max_model_len)
        self._prompt_lengths = self._vllm_histogram("request_prompt_tokens", "Prompt tokens of a request.", buckets)
        self._generation_lengths = self._vllm_histogram(
            "request_generation_tokens", "Tokens generated for a sequence.", buckets
        )
        cache = self._config.cache
        facts = {
            "block_size": ready.block_size,
            "num_gpu_blocks": ready.num_blocks,
            "cache_dtype": ready.dtype,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
        }
        info = Gauge(
            "vllm:cache_config_info",
            "Always 1; facts of the KV cache.",
            (*LABELS, *facts),
            registry=self._vllm_registry,
        )
        info.labels(*self._labels, *map(str, facts.values())).set(1)
        self._blocks_free.set(ready.num_blocks)
        for phase, seconds in ready.startup_seconds.items():
            self._startup.labels(phase).set(seconds)
        self._build.labels(version("ropeway"), self._labels[0], ready.architecture, ready.dtype, ready.device).set(1)

    # From the engine, once per step

    def on_step(self, outputs: StepOutputs) -> None:
        stats = outputs.stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        self._kv_usage.set(usage)
        self._gpu_usage.set(usage)
        self._kv_tokens.set(stats.num_live_tokens)
        self._blocks_used.set(stats.num_used_blocks)
        self._blocks_free.set(stats.num_blocks - stats.num_used_blocks)
        self._blocks_cached.set(stats.num_cached_blocks)
        if outputs.token_ids:
            self._generation_tokens.inc(len(outputs.token_ids))
        if stats.num_new_preemptions:
            self._preemptions.inc(stats.num_new_preemptions)
            self._recomputed.inc(stats.num_new_recomputed_tokens)
        if stats.num_new_prefix_queries:
            self._prefix_queries.inc(stats.num_new_prefix_queries)
            self._prefix_hits.inc(stats.num_new_prefix_hits)
        if num_tokens := stats.num_new_prefill_tokens + stats.num_new_decode_tokens:
            self._step_tokens.observe(num_tokens)
            self._steps.inc()
            self._schedule.inc(stats.schedule_seconds)
            self._execute.inc(stats.execute_seconds)
            self._update.inc(stats.update_seconds)

    # From the streams

    def first_token(self, seconds: float, num_prompt_tokens: int) -> None:
        """A sequence got its first token, so many seconds after its request arrived."""
        self._ttft.observe(seconds)
        self._prompt_tokens.inc(num_prompt_tokens)

    def inter_token(self, seconds: float, num_tokens: int) -> None:
        """``num_tokens`` more tokens came together, so many seconds after the ones before."""
        self._itl.observe(seconds / num_tokens, num_tokens)

    def request_finished(self, times: SequenceTimes, arrival: float, reason: str) -> None:
        """A sequence ended, for one of the reasons of server.stream.FINISH_WORDS."""
        self._finished.get(reason, self._finished["abort"]).inc()
        self._e2e.observe(self._clock() - arrival)
        if self._prompt_lengths is not None and self._generation_lengths is not None:
            self._prompt_lengths.observe(times.num_prompt_tokens)
            self._generation_lengths.observe(times.num_output_tokens)
        scheduled, first, last = times.first_scheduled, times.first_token_time, times.last_token_time
        if scheduled is None:
            return
        self._queue.observe(scheduled - arrival)
        if first is None or last is None:
            return
        self._prefill.observe(first - scheduled)
        self._decode.observe(last - first)
        self._inference.observe(last - scheduled)
        if times.num_output_tokens > 1:
            self._tpot.observe((last - first) / (times.num_output_tokens - 1))

    # From the app

    def refused(self, status: int, cause: str) -> None:
        """cause: an error code of ours, never the client's words."""
        self._refusals.labels(str(status), cause).inc()

    def missed(self, limit: str) -> None:
        """A request ran out of its time: "queue_timeout" or "deadline"."""
        self._missed[limit].inc()

    def grammar_compiled(self, seconds: float) -> None:
        """A grammar was tried, whatever came of it."""
        self._grammar_seconds.observe(seconds)

    def grammar_refused(self, cause: str) -> None:
        self._grammar_refusals.labels(cause).inc()

    def set_restarts(self, total: int) -> None:
        self._restarts.inc(max(0, total - self._known_restarts))
        self._known_restarts = max(total, self._known_restarts)

    def before_page(self, refresh: Callable[[], None]) -> None:
        """``refresh`` sets what nobody reports: it is called before each new page."""
        self._refresh = refresh

    def page(self) -> bytes:
        """The text exposition, at most PAGE_SECONDS old."""
        now = self._clock()
        if now - self._page_time >= PAGE_SECONDS:
            self._refresh()
            self._page = generate_latest(self.registry)
            self._page_time = now
        return self._page
