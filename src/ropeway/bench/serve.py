"""`ropeway bench serve`: load on a running OpenAI-compatible server, and what its clients saw.

Owns: the command's flags, request bodies, the run from first look at the server to the saved result. Must not know: how
bytes are read, how statistics are made. Called by: cli.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import orjson

from ropeway.bench.client import HttpClient, describe
from ropeway.bench.datasets import FILE_DATASETS, TEXT_DATASETS, DatasetOptions, PromptForm, SampleRequest, load_dataset
from ropeway.bench.flags import BenchCommand, dataset_flags, numbers, pairs, take_dataset_options
from ropeway.bench.load import arrival_times, run_load
from ropeway.bench.report import (
    GOODPUT_METRICS,
    METRIC_TITLES,
    Metrics,
    RequestOutcome,
    measure,
    print_table,
    result_of,
    save_result,
    statistics_rows,
)
from ropeway.errors import ConfigError

if TYPE_CHECKING:
    from ropeway.server.tokenizer import Tokenizer

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
SAFE_VOCABULARY = 1000  # ids below it are tokens of every model
READY_POLL_SECONDS = 0.5
MAX_ERROR_KINDS = 8
MAX_DESCRIPTORS = 65536


class BenchError(Exception):
    """The run failed: the server is not there or refused everything. Exit code 1."""


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


# The run


def run(options: ServeOptions) -> int:
    """Exit code: 1 if no request succeeded. Raises ConfigError, BenchError."""
    import uvloop

    _allow_many_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(options))


async def _run(options: ServeOptions) -> int:
    client = HttpClient(options.base_url, options.headers, insecure=options.insecure)
    try:
        model, root = await _find_model(client, options)
        tokenizer, tokenizer_name = _find_tokenizer(options, root)
        samples = load_samples(options, tokenizer, options.seed)
        arrivals = _arrivals(options, samples)
        bodies = [request_body(options, model, sample) for sample in samples]
        await _warm_up(client, options, model, tokenizer)
        with _progress(len(bodies), options.disable_tqdm) as on_done:
            outcomes, duration = await run_load(
                lambda index: client.stream(options.endpoint, bodies[index]),
                arrivals,
                max_concurrency=options.max_concurrency,
                on_done=on_done,
            )
    finally:
        client.close()
    fill_counts(outcomes, samples, tokenizer)
    metrics = measure(outcomes, duration, percentiles=options.metric_percentiles, goodput=options.goodput)
    print_report(metrics, options)
    _report_errors(outcomes)
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    result = {**head_of(options, model, tokenizer_name, len(samples), now), **result_of_run(metrics, outcomes, options)}
    path = result_path(options, model, now)
    if options.save_result or options.append_result:
        save_result(path, result, append=options.append_result)
        click.echo(f"result: {path}")
    if options.plot:
        from ropeway.bench.plot import plot_run

        picture = path.with_suffix(".png")
        plot_run(picture, outcomes, title=f"{model}: {len(samples)} requests, {options.dataset.dataset_name}")
        click.echo(f"plot: {picture}")
    return 0 if metrics.completed else 1


async def _find_model(client: HttpClient, options: ServeOptions) -> tuple[str, str]:
    """The model's name in requests, and where its files may be found. Waits until the server is ready, if it may."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + options.ready_check_timeout_sec
    while True:
        try:
            status, body = await client.get(_models_path(options.endpoint))
            trouble = f"answers {status}" if status >= 500 else ""
        except OSError as error:
            trouble = f"cannot be reached: {describe(error)}"
        if not trouble:
            break
        if loop.time() >= deadline:
            advice = "" if options.ready_check_timeout_sec else "; --ready-check-timeout-sec waits for it"
            raise BenchError(f"the server at {client.base_url} {trouble}{advice}")
        await asyncio.sleep(READY_POLL_SECONDS)
    named = options.served_model_name or options.model
    try:
        card = orjson.loads(body)["data"][0]
        name, root = str(card["id"]), str(card.get("root") or card["id"])
    except (ValueError, LookupError, TypeError, AttributeError):
        if named is None:
            raise BenchError(f"{client.base_url} does not list its models (status {status}); give --model") from None
        return named, options.model or named
    return named or name, options.model or (root if named in (None, name) else named or root)


def _models_path(endpoint: str) -> str:
    return endpoint.removesuffix("/chat/completions").removesuffix("/completions") + "/models"


def _find_tokenizer(options: ServeOptions, root: str) -> tuple[Tokenizer | None, str]:
    name = options.tokenizer or root
    if options.skip_tokenizer_init:
        return None, name
    from ropeway.bench.tokenizer import find_tokenizer

    return find_tokenizer(name), name


def load_samples(options: ServeOptions, tokenizer: Tokenizer | None, *seed: int) -> list[SampleRequest]:
    vocab_size = tokenizer.vocab_size if tokenizer is not None else SAFE_VOCABULARY
    return load_dataset(
        options.dataset, vocab_size=vocab_size, tokenizer=tokenizer, rng=np.random.default_rng(list(seed))
    )


def _arrivals(options: ServeOptions, samples: Sequence[SampleRequest]) -> list[float]:
    if options.self_timed:
        return [sample.arrival or 0.0 for sample in samples]
    rng = np.random.default_rng([options.seed, 1])  # its own, so that a rate does not change the prompts
    return arrival_times(len(samples), options.request_rate, options.burstiness, rng)


def request_body(options: ServeOptions, model: str, sample: SampleRequest) -> bytes:
    """The body of the request; flags given by the user come last and win."""
    body: dict[str, Any] = {"model": model}
    if sample.messages is not None:
        body |= {"messages": sample.messages, "max_completion_tokens": sample.output_len}
    else:
        prompt = sample.prompt if sample.prompt_token_ids is None else sample.prompt_token_ids
        body |= {"prompt": prompt, "max_tokens": sample.output_len}
    return orjson.dumps(body | options.body)


async def _warm_up(client: HttpClient, options: ServeOptions, model: str, tokenizer: Tokenizer | None) -> None:
    """Requests of the same kind but, where they are generated, other prompts: those to come must not be cached."""
    if not options.num_warmups:
        return
    dataset = options.dataset
    if dataset.dataset_name not in FILE_DATASETS:
        count = options.num_warmups
        if dataset.dataset_name == "prefix_repetition":
            count = max(count, dataset.prefix_repetition_num_prefixes)
        dataset = dataclasses.replace(dataset, num_prompts=count)
    samples = load_samples(dataclasses.replace(options, dataset=dataset), tokenizer, options.seed, 2)
    bodies = [request_body(options, model, sample) for sample in samples[: options.num_warmups]]
    outcomes, _ = await run_load(
        lambda index: client.stream(options.endpoint, bodies[index]),
        [0.0] * len(bodies),
        max_concurrency=options.max_concurrency,
    )
    for outcome in outcomes:
        if outcome.error:
            raise BenchError(f"a warm-up request failed: {outcome.error}")


@contextlib.contextmanager
def _progress(total: int, is_off: bool) -> Iterator[Callable[[RequestOutcome], None]]:
    """A bar on stderr, and what to call when a request is done; silent where nobody watches.

    It is drawn between requests, at most five times a second, and has no thread that would take time from the client.
    """
    if is_off or not sys.stderr.isatty():
        yield lambda outcome: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("requests", total=total)
        loop = asyncio.get_running_loop()
        last_drawn = loop.time()
        failed = 0

        def on_done(outcome: RequestOutcome) -> None:
            nonlocal last_drawn, failed
            failed += bool(outcome.error)
            progress.update(task, advance=1, description=f"requests ({failed} failed)" if failed else "requests")
            if loop.time() - last_drawn > 0.2:
                last_drawn = loop.time()
                progress.refresh()

        yield on_done
        progress.refresh()


def fill_counts(
    outcomes: Sequence[RequestOutcome], samples: Sequence[SampleRequest], tokenizer: Tokenizer | None
) -> None:
    """Token counts where the server sent no usage: what was sent; what the text encodes to, or else the events."""
    for outcome, sample in zip(outcomes, samples, strict=True):
        outcome.prompt_len = outcome.prompt_len or sample.prompt_len
        if not outcome.error and not outcome.output_len:
            count = len(tokenizer.encode(outcome.text, add_special_tokens=False)) if tokenizer is not None else 0
            outcome.output_len = count or len(outcome.token_times)


# What is said and saved


def print_report(metrics: Metrics, options: ServeOptions) -> None:
    rate = "unlimited" if math.isinf(options.request_rate) else f"{options.request_rate:g}"
    rate = "of the trace" if options.self_timed else rate
    counts = [
        ("Successful requests", metrics.completed),
        ("Failed requests", metrics.failed),
        ("Request rate asked for (req/s)", rate),
        ("Maximum concurrency asked for", options.max_concurrency or "unlimited"),
        ("Peak concurrent requests", metrics.max_concurrent_requests),
        ("Duration (s)", metrics.duration),
        ("Input tokens", metrics.total_input_tokens),
        ("Output tokens", metrics.total_output_tokens),
    ]
    rates = [
        ("Requests (req/s)", metrics.request_throughput),
        *([("Requests within --goodput (req/s)", metrics.request_goodput)] if options.goodput else []),
        ("Output tokens (tok/s)", metrics.output_throughput),
        ("Output tokens, best second (tok/s)", metrics.max_output_tokens_per_s),
        ("All tokens (tok/s)", metrics.total_token_throughput),
    ]
    selected = [statistics_rows(name, getattr(metrics, name)) for name in options.percentile_metrics]
    print_table("Serving benchmark", [("", counts), ("Throughput", rates), *selected])


def _report_errors(outcomes: Sequence[RequestOutcome]) -> None:
    kinds = Counter(outcome.error for outcome in outcomes if outcome.error).most_common()
    for kind, count in kinds[:MAX_ERROR_KINDS]:
        click.echo(f"{count} failed: {kind}", err=True)
    if rest := kinds[MAX_ERROR_KINDS:]:
        click.echo(f"{sum(count for _, count in rest)} failed in {len(rest)} other ways", err=True)


def head_of(options: ServeOptions, model: str, tokenizer: str, num_prompts: int, date: str) -> dict[str, Any]:
    """The JSON fields that say what was run."""
    return {
        "date": date,
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": num_prompts,
        **options.metadata,
        "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }


def result_of_run(metrics: Metrics, outcomes: Sequence[RequestOutcome], options: ServeOptions) -> dict[str, Any]:
    result = result_of(metrics, options.percentile_metrics)
    if options.save_detailed:
        first = min(outcome.start for outcome in outcomes)
        result |= {
            "input_lens": [outcome.prompt_len for outcome in outcomes],
            "output_lens": [outcome.output_len for outcome in outcomes],
            "start_times": [outcome.start - first for outcome in outcomes],
            "ttfts": [outcome.ttft for outcome in outcomes],
            "itls": [outcome.itls for outcome in outcomes],
            "latencies": [outcome.latency for outcome in outcomes],
            "generated_texts": [outcome.text for outcome in outcomes],
            "errors": [outcome.error for outcome in outcomes],
        }
    return result


def result_path(options: ServeOptions, model: str, date: str) -> Path:
    name = options.result_filename
    if not name:
        concurrency = f"-concurrency{options.max_concurrency}" if options.max_concurrency else ""
        name = f"{options.label}-{options.request_rate}qps{concurrency}-{model.rpartition('/')[2]}-{date}.json"
    return Path(options.result_dir) / name


def _allow_many_connections() -> None:
    """Each running request is a descriptor, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


# The command


def _command(**flags: Any) -> int:
    try:
        return run(make_options(flags))
    except BenchError as error:
        click.echo(f"ropeway: error: {error}", err=True)
        return 1


def _flags() -> Sequence[click.Parameter]:
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


command = BenchCommand(
    "serve",
    callback=_command,
    params=list(_flags()),
    short_help="Load on a running OpenAI-compatible server.",
    help="Send requests to a running OpenAI-compatible server and measure what its clients see.",
)
