"""/metrics: exact names and buckets, values that follow from the traffic, a page that does not grow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from http_harness import HI, TEXT, House, ids, in_loop, says, until
from prometheus_client.parser import text_string_to_metric_families

from fakes import Script
from ropeway.config import build_config
from ropeway.metrics import Metrics, length_buckets
from ropeway.protocol import EngineStats, StepOutputs

CHAT = "/v1/chat/completions"
LABELS = {"model_name": "tiny", "engine": "0"}
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"]
COUNTERS = [
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
]
TTFT = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
TOKEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
REQUEST = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
HISTOGRAMS = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": TOKEN,
    "request_time_per_output_token_seconds": TOKEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "request_prompt_tokens": "1 2 5 10 20 50 100 200",
    "request_generation_tokens": "1 2 5 10 20 50 100 200",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(page: str) -> Samples:
    """All samples, after checking the form of the page."""
    helps = [line.split()[2] for line in page.splitlines() if line.startswith("# HELP")]
    types = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert helps == types
    assert len(set(helps)) == len(helps)
    samples: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    labels = {**(LABELS if name.startswith("vllm:") else {}), **labels}
    return samples[name, frozenset(labels.items())]


async def scrape(http: Any) -> Samples:
    await asyncio.sleep(0.11)  # the page is cached for 0.1 s
    return parse((await http.get("/metrics")).text)


@in_loop
async def test_every_name_is_there_before_the_first_request() -> None:
    async with House().http() as http:
        samples = await scrape(http)
    for name in [*GAUGES, *COUNTERS]:
        assert value(samples, f"vllm:{name}") == 0
    for reason in ("stop", "length", "abort", "error"):
        assert value(samples, "vllm:request_success_total", finished_reason=reason) == 0
    for name, bounds in HISTOGRAMS.items():
        assert value(samples, f"vllm:{name}_count") == value(samples, f"vllm:{name}_sum") == 0
        found = [dict(labels)["le"] for sample, labels in samples if sample == f"vllm:{name}_bucket"]
        assert found == [*(str(float(bound)) for bound in bounds.split()), "+Inf"]
    [info] = [dict(labels) for name, labels in samples if name == "vllm:cache_config_info"]
    assert (info["block_size"], info["num_gpu_blocks"], info["engine"]) == ("16", "100", "0")
    [lora] = [dict(labels) for name, labels in samples if name == "vllm:lora_requests_info"]
    assert lora["running_lora_adapters"] == ""
    assert value(samples, "ropeway_startup_seconds", phase="load") == 0.25
    assert value(samples, "ropeway_requests_refused_total", status="429", cause="queue_full") == 0
    assert value(samples, "ropeway_draining") == 0
    assert not any(name.endswith("_created") for name, _ in samples)


@in_loop
async def test_values_follow_from_the_traffic() -> None:
    house = House()
    async with house.http() as http:
        await http.post(CHAT, json={"messages": HI, "n": 2})
        await http.post(CHAT, json={"messages": HI, "max_tokens": 1, "stream": True})
        await http.post(CHAT, json={"messages": HI, "temperature": -1})
        samples = await scrape(http)
        again = await scrape(http)
    prompt = len(house.client.added[0].prompt_token_ids)
    length = len(ids(TEXT)) + 1
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 1
    assert value(samples, "vllm:prompt_tokens_total") == 3 * prompt
    assert value(samples, "vllm:generation_tokens_total") == 2 * length + 1
    assert value(samples, "vllm:time_to_first_token_seconds_count") == 3
    assert value(samples, "vllm:inter_token_latency_seconds_count") == 2 * (length - 1)
    assert value(samples, "vllm:request_time_per_output_token_seconds_count") == 2
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_inference_time"):
        assert value(samples, f"vllm:{name}_seconds_count") == 3
    assert value(samples, "vllm:request_queue_time_seconds_sum") == pytest.approx(0.003)  # what the script says
    assert value(samples, "vllm:request_generation_tokens_sum") == 2 * length + 1
    assert value(samples, "vllm:request_prompt_tokens_sum") == 3 * prompt
    assert value(samples, "vllm:iteration_tokens_total_count") == 2 * length + 1
    assert value(samples, "ropeway_steps_total") == 2 * length + 1
    assert value(samples, "ropeway_step_seconds_total", part="execute") == 0.5 * (2 * length + 1)
    assert value(samples, "ropeway_requests_refused_total", status="400", cause="invalid_value") == 1
    # histograms are cumulative and end at their count
    for name in HISTOGRAMS:
        counts = [samples[key] for key in samples if key[0] == f"vllm:{name}_bucket"]
        assert counts == sorted(counts)
        assert counts[-1] == value(samples, f"vllm:{name}_count")
    assert {key: v for key, v in again.items() if not key[0].startswith("process_")} == {
        key: v for key, v in samples.items() if not key[0].startswith("process_")
    }


@in_loop
async def test_gauges_rise_and_return_to_zero_after_aborts() -> None:
    """O-44, as far as the front end is concerned."""
    gate = asyncio.Event()
    house = House(lambda request: Script(ids(TEXT), waits={2: gate}))
    async with house.serving() as url, house.http() as http:
        import httpx

        async with httpx.AsyncClient(base_url=url) as far:
            running = [asyncio.create_task(far.post(CHAT, json={"messages": HI, "stream": True})) for _ in range(5)]
            await until(lambda: len(house.client.live) == 5)
            samples = await scrape(http)
            assert value(samples, "vllm:num_requests_running") == 5
            assert value(samples, "vllm:kv_cache_usage_perc") == value(samples, "vllm:gpu_cache_usage_perc") == 0.5
            assert value(samples, "ropeway_requests_in_flight") == 5
            assert value(samples, "ropeway_kv_tokens_live") == 80
            assert value(samples, "ropeway_kv_blocks", state="used") == 5
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await until(lambda: house.lifecycle.in_flight == 0)
        samples = await scrape(http)
    for name in GAUGES:
        assert value(samples, f"vllm:{name}") == 0
    assert value(samples, "ropeway_requests_in_flight") == 0
    assert value(samples, "ropeway_kv_tokens_live") == 0
    assert value(samples, "vllm:request_success_total", finished_reason="abort") == 5


@in_loop
async def test_series_do_not_grow_with_what_clients_send() -> None:
    """O-45."""
    house = House()
    async with house.http() as http:
        await http.post(CHAT, json={"messages": HI, "user": "u", "model": "nope"})
        await http.post("/v1/nothing")
        await http.post(CHAT, json={"messages": HI, "user": "u"})
        before = await scrape(http)
        for number in range(30):
            await http.post(CHAT, json={"messages": HI, "user": f"u{number}", "cache_salt": f"s{number}"})
            await http.post(CHAT, json={"messages": HI, "model": f"nope{number}"})
            await http.post(f"/v1/nothing/{number}", headers={"x-request-id": f"r{number}"})
        after = await scrape(http)
    assert before.keys() == after.keys()
    assert all(dict(labels).get("model_name", "tiny") == "tiny" for _, labels in after)


@in_loop
async def test_without_the_vllm_names() -> None:
    async with House(vllm_metrics=False).http() as http:
        await http.post(CHAT, json={"messages": HI})
        samples = await scrape(http)
    assert not any(name.startswith("vllm:") for name, _ in samples)
    assert value(samples, "ropeway_steps_total") > 0


@in_loop
async def test_the_page_is_cached_for_a_moment() -> None:
    house = House(says())
    async with house.http() as http:
        first = await http.get("/metrics")
        assert first.headers["content-type"].startswith("text/plain; version=")
        house.metrics.first_token(0.1, 7)
        assert (await http.get("/metrics")).text == first.text
        assert value(await scrape(http), "vllm:prompt_tokens_total") == 7


def test_steps_add_up_and_gauges_follow() -> None:
    metrics = Metrics("tiny", build_config({}), clock=lambda: 0.0)
    step = EngineStats(
        num_running=3,
        num_waiting=4,
        num_blocks=50,
        num_used_blocks=10,
        num_cached_blocks=20,
        num_new_prefill_tokens=60,
        num_new_decode_tokens=2,
        num_new_preemptions=1,
        num_new_recomputed_tokens=33,
        num_new_prefix_queries=100,
        num_new_prefix_hits=48,
        schedule_seconds=0.25,
        update_seconds=0.5,
    )
    metrics.on_step(StepOutputs(token_ids=[1, 2], stats=step))
    metrics.on_step(StepOutputs(token_ids=[1, 2], stats=step))
    samples = parse(metrics.page().decode())
    assert value(samples, "vllm:num_requests_waiting") == 4
    assert value(samples, "vllm:kv_cache_usage_perc") == 0.2
    assert value(samples, "vllm:num_preemptions_total") == 2
    assert value(samples, "vllm:prefix_cache_queries_total") == 200
    assert value(samples, "vllm:prefix_cache_hits_total") == 96
    assert value(samples, "vllm:iteration_tokens_total_sum") == 124
    assert value(samples, "ropeway_recomputed_tokens_total") == 66
    assert value(samples, "ropeway_kv_blocks_cached") == 20
    assert value(samples, "ropeway_kv_blocks", state="free") == 40
    assert value(samples, "ropeway_step_seconds_total", part="schedule") == 0.5
    assert value(samples, "ropeway_step_seconds_total", part="update") == 1.0


def test_tokens_that_come_together_share_their_time() -> None:
    metrics = Metrics("tiny", build_config({}))
    metrics.inter_token(0.4, 4)  # 0.1 each: exactly on a bound, which belongs below
    metrics.inter_token(100.0, 1)
    samples = parse(metrics.page().decode())
    name = "vllm:inter_token_latency_seconds"
    assert value(samples, f"{name}_bucket", le="0.075") == 0
    assert value(samples, f"{name}_bucket", le="0.1") == 4
    assert value(samples, f"{name}_bucket", le="80.0") == 4
    assert value(samples, f"{name}_count") == 5
    assert value(samples, f"{name}_sum") == pytest.approx(100.4)


def test_restarts_never_go_down() -> None:
    metrics = Metrics("tiny", build_config({}), clock=lambda: 0.0)
    for total in (0, 2, 1, 3):
        metrics.set_restarts(total)
    assert value(parse(metrics.page().decode()), "ropeway_engine_restarts_total") == 3


def test_length_buckets_end_at_the_longest_request() -> None:
    assert length_buckets(2048) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert length_buckets(1) == [1]
