"""`ropeway bench serve`: load on a running OpenAI-compatible server, and what its clients saw.

Owns: request bodies, the run from first look at the server to the saved result. Must not know: how bytes are read, how
statistics are made. Called by: cli.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import orjson

from ropeway.bench.client import HttpClient, describe
from ropeway.bench.datasets import FILE_DATASETS, SampleRequest, load_dataset
from ropeway.bench.flags import BenchCommand
from ropeway.bench.load import arrival_times, run_load
from ropeway.bench.report import (
    Metrics,
    RequestOutcome,
    measure,
    print_table,
    result_of,
    save_result,
    statistics_rows,
)
from ropeway.bench.serve_options import ServeOptions, make_options, serve_flags

if TYPE_CHECKING:
    from ropeway.server.tokenizer import Tokenizer

SAFE_VOCABULARY = 1000  # ids below it are tokens of every model
READY_POLL_SECONDS = 0.5
MAX_ERROR_KINDS = 8
MAX_DESCRIPTORS = 65536


class BenchError(Exception):
    """The run failed: the server is not there or refused everything. Exit code 1."""


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


command = BenchCommand(
    "serve",
    callback=_command,
    params=list(serve_flags()),
    short_help="Load on a running OpenAI-compatible server.",
    help="Send requests to a running OpenAI-compatible server and measure what its clients see.",
)
