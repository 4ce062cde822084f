"""The flags of `ropeway bench serve`, and what they mean together.

Owns: their names, defaults, checks. Must not know: servers, runs, results. Called by: bench.serve.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from ropeway.bench.datasets import TEXT_DATASETS, DatasetOptions, PromptForm
from ropeway.bench.flags import dataset_flags, numbers, pairs, take_dataset_options
from ropeway.bench.report import GOODPUT_METRICS, METRIC_TITLES
from ropeway.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDPOINTS = {"openai": COMPLETIONS, "vllm": COMPLETIONS, "openai-chat": CHAT}
SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The flags of `ropeway bench serve`, checked."""

    dataset: DatasetOptions
    seed: int
    backend: str
    base_url: str
    endpoint: str
    headers: dict[str, str]
    insecure: bool
    model: str | None
    served_model_name: str | None
    tokenizer: str | None
    skip_tokenizer_init: bool
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    self_timed: bool
    num_warmups: int
    ready_check_timeout_sec: float
    body: dict[str, Any]  # what every request has besides model, prompt and length
    percentile_metrics: list[str]
    metric_percentiles: list[float]
    goodput: dict[str, float]
    disable_tqdm: bool
    label: str
    save_result: bool
    save_detailed: bool
    append_result: bool
    result_dir: str
    result_filename: str
    metadata: dict[str, str]
    plot: bool


def make_options(flags: dict[str, Any]) -> ServeOptions:
    """flags: the command's parameters. Raises ConfigError."""
    backend = flags["backend"]
    endpoint = flags.pop("endpoint") or ENDPOINTS[backend]
    if endpoint.endswith("chat/completions") != (backend == "openai-chat"):
        raise ConfigError(f"--endpoint {endpoint} does not go with --backend {backend}")
    host, port = flags.pop("host"), flags.pop("port")
    host = f"[{host}]" if ":" in host else host
    base_url = flags.pop("base_url") or f"http://{host}:{port}"
    form: PromptForm = "chat" if backend == "openai-chat" else "ids"
    if flags.pop("text_prompts") or flags["dataset_name"] in TEXT_DATASETS:
        form = "chat" if backend == "openai-chat" else "text"
    dataset = take_dataset_options(flags, form)
    headers = dict(pairs("--header", flags.pop("header")))
    if (key := os.environ.get("OPENAI_API_KEY")) and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {key}"
    body = _body(flags)
    self_timed = flags.pop("self_timed")
    goodput = {name: value for item in flags.pop("goodput") for name, value in pairs("--goodput", (item,), ":").items()}
    options = ServeOptions(
        dataset=dataset,
        endpoint=endpoint,
        base_url=base_url,
        headers=headers,
        body=body,
        self_timed=dataset.dataset_name == "timed_trace" if self_timed is None else self_timed,
        percentile_metrics=[name.strip() for name in flags.pop("percentile_metrics").split(",") if name.strip()],
        metric_percentiles=numbers("--metric-percentiles", flags.pop("metric_percentiles")),
        goodput={name: _milliseconds(name, value) for name, value in goodput.items()},
        label=flags.pop("label") or backend,
        metadata=pairs("--metadata", flags.pop("metadata")),
        **flags,
    )
    _check(options)
    return options


def _body(flags: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    body |= {name: value for name in SAMPLING if (value := flags.pop(name)) is not None}
    if flags.pop("ignore_eos"):
        body["ignore_eos"] = True
    if (extra := flags.pop("extra_body")) is not None:
        try:
            value = json.loads(extra)
        except ValueError as error:
            raise ConfigError(f"--extra-body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError("--extra-body must be a JSON object")
        body |= value
    return body


def _milliseconds(name: str, value: str) -> float:
    if name not in GOODPUT_METRICS:
        raise ConfigError(f"--goodput {name}: it must be one of {', '.join(GOODPUT_METRICS)}")
    with contextlib.suppress(ValueError):
        if (limit := float(value)) >= 0:
            return limit
    raise ConfigError(f"--goodput {name}:{value}: it must be milliseconds, at least 0")


def _check(options: ServeOptions) -> None:
    for name in options.percentile_metrics:
        if name not in METRIC_TITLES:
            raise ConfigError(f"--percentile-metrics {name} is unknown; known are {', '.join(METRIC_TITLES)}")
    if not all(0 <= wanted <= 100 for wanted in options.metric_percentiles):
        raise ConfigError("--metric-percentiles must be between 0 and 100")
    if not options.request_rate > 0:
        raise ConfigError("--request-rate must be positive")
    if not 0 < options.burstiness < math.inf:
        raise ConfigError("--burstiness must be positive")
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise ConfigError("--max-concurrency must be at least 1")
    if options.seed < 0:
        raise ConfigError("--seed must not be negative")
    if options.self_timed and options.dataset.dataset_name != "timed_trace":
        raise ConfigError("--self-timed goes with --dataset-name timed_trace, which has times")
    if options.self_timed and math.isfinite(options.request_rate):
        raise ConfigError("--request-rate has no effect on a trace that keeps its own times; add --no-self-timed")
    if options.plot:
        from ropeway.bench.plot import check_installed

        check_installed()


def serve_flags() -> Sequence[click.Parameter]:
    option = click.Option
    sampling = [
        option([f"--{name.replace('_', '-')}"], type=kind, help="Sampling parameter; without it, the server's default.")
        for name, kind in SAMPLING.items()
    ]
    return [
        option(["--backend"], type=click.Choice(list(ENDPOINTS)), default="openai", show_default=True, help="The API."),
        option(["--base-url"], help="URL of the server, without /v1; instead of --host and --port."),
        option(["--host"], default="127.0.0.1", show_default=True),
        option(["--port"], type=int, default=8000, show_default=True),
        option(["--endpoint"], help="Path of the API.  [default: the backend's, /v1/completions or the chat's]"),
        option(["--header"], multiple=True, metavar="KEY=VALUE...", help="Sent with every request."),
        option(["--insecure"], is_flag=True, help="Do not check the server's certificate."),
        option(["--model"], help="Model, and where its tokenizer is.  [default: the server's first]"),
        option(["--served-model-name"], help="Its name in requests, if that is another."),
        option(["--tokenizer"], help="Folder, .gguf file or hub id.  [default: the model]"),
        option(["--skip-tokenizer-init"], is_flag=True, help="No tokenizer: prompts of random ids only."),
        option(["--text-prompts"], is_flag=True, help="Send generated prompts as text, not as token ids."),
        *dataset_flags(),
        option(["--request-rate"], type=float, default=math.inf, show_default=True, help="Requests per second."),
        option(
            ["--burstiness"], type=float, default=1.0, show_default=True, help="1: Poisson; less: bursts; more: even."
        ),
        option(["--max-concurrency"], type=int, help="Most requests in flight."),
        option(
            ["--self-timed/--no-self-timed"], default=None, help="Keep a trace's times.  [default: for timed_trace]"
        ),
        option(["--ignore-eos"], is_flag=True, help="Ask for answers of full length."),
        *sampling,
        option(["--extra-body"], metavar="JSON", help="Further fields of every request."),
        option(
            ["--num-warmups"], type=click.IntRange(0), default=0, show_default=True, help="Requests before the run."
        ),
        option(["--ready-check-timeout-sec"], type=float, default=0, show_default=True, help="Wait for the server."),
        option(["--percentile-metrics"], default="ttft,tpot,itl", show_default=True, help="Of ttft, tpot, itl, e2el."),
        option(["--metric-percentiles"], default="99", show_default=True, help="Comma-separated."),
        option(["--goodput"], multiple=True, metavar="METRIC:MS...", help="Objectives for ttft, tpot, e2el."),
        option(["--disable-tqdm"], is_flag=True, help="No progress bar."),
        option(["--label"], help="Names the run in the result.  [default: the backend]"),
        option(["--save-result"], is_flag=True, help="Write the result as JSON."),
        option(["--save-detailed"], is_flag=True, help="With every request's times, text and error."),
        option(["--append-result"], is_flag=True, help="As one more line of the file."),
        option(["--result-dir"], default="", help="Folder of the result.  [default: the current one]"),
        option(["--result-filename"], default="", help="Its name.  [default: made from label, rate, model and date]"),
        option(["--metadata"], multiple=True, metavar="KEY=VALUE...", help="Further fields of the result."),
        option(["--plot"], is_flag=True, help="Latency and throughput over time, as a PNG beside the result."),
    ]
