"""`ropeway bench latency`: the time of one batch from its start to its last token, without a server, again and again.

Owns: the command's flags, the run, its result. Must not know: how the engine is made. Called by: cli.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from ropeway.bench.offline import Parts, Prompt, check_fits, generate_all, percentiles_of, progress, run_async, started
from ropeway.bench.report import print_table, save_result
from ropeway.config import Config

HELP = (
    "Run one batch of random prompts through the engine, without a server, and measure how long it takes. Prefix caching "
    "is off unless --enable-prefix-caching is given: the same batch comes again and again."
)
DEFAULTS: dict[str, Any] = {"enable_prefix_caching": False}
MAX_TOKEN_ID = 10000  # random ids below it are tokens of every model; so it is in `vllm bench`


def flags() -> list[click.Parameter]:
    """Besides the engine's own; --seed is one of those."""

    def count(name: str, default: int, help: str, least: int = 1) -> click.Option:
        return click.Option([name], type=click.IntRange(least), default=default, show_default=True, help=help)

    return [
        count("--input-len", 32, "Prompt tokens."),
        count("--output-len", 128, "Output tokens."),
        count("--batch-size", 8, "Prompts."),
        count("--n", 1, "Answers to each prompt."),
        count("--num-iters-warmup", 10, "Runs that are not counted.", least=0),
        count("--num-iters", 30, "Runs that are."),
        click.Option(["--disable-detokenize"], is_flag=True, help="Leave the answers as token ids."),
        click.Option(["--output-json"], metavar="FILE", help="Write the result here."),
    ]


def run(config: Config, flags: dict[str, Any], parts: Parts) -> int:
    """Exit code. Raises ConfigError, EngineDeadError."""
    return run_async(_run(config.model.seed, parts, **flags))


async def _run(
    seed: int,
    parts: Parts,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    n: int,
    num_iters_warmup: int,
    num_iters: int,
    disable_detokenize: bool,
    output_json: str | None,
) -> None:
    tokenizer = None if disable_detokenize else parts.tokenizer()
    latencies: list[float] = []
    first_tokens: list[float] = []  # of each run, until the batch's last first token
    async with started(client := parts.client()) as ready:
        ids = np.random.default_rng(seed).integers(min(MAX_TOKEN_ID, ready.vocab_size), size=(batch_size, input_len))
        prompts = [Prompt(row, output_len) for row in ids.tolist()]
        check_fits(prompts, ready)
        with progress("runs", num_iters_warmup + num_iters) as advance:
            for number in range(-num_iters_warmup, num_iters):
                answers, seconds = await generate_all(client, prompts, n=n, seed=seed)
                if tokenizer is not None:
                    began = time.perf_counter()
                    for answer in answers:
                        tokenizer.decode(answer.token_ids)
                    seconds += time.perf_counter() - began
                if number >= 0:
                    latencies.append(seconds)
                    first_tokens.append(max(a.first_token for a in answers) - min(a.start for a in answers))
                advance()
    result = {
        "model_id": parts.model_id,
        "avg_latency": statistics.fmean(latencies),
        "latencies": latencies,
        "percentiles": percentiles_of(latencies),
        "avg_first_token_latency": statistics.fmean(first_tokens),
        "first_token_latencies": first_tokens,
    }
    report(result, output_len, batch_size * n)
    if output_json is not None:
        save_result(Path(output_json), result)


def report(result: dict[str, Any], output_len: int, num_sequences: int) -> None:
    average, first = result["avg_latency"], result["avg_first_token_latency"]
    rows: list[tuple[str, Any]] = [("mean", average * 1000)]
    rows += [(f"P{wanted}", value * 1000) for wanted, value in result["percentiles"].items()]
    parts: list[tuple[str, Any]] = [("until all have their first token (ms)", first * 1000)]
    if output_len > 1:
        parts += [
            ("each further step (ms)", (average - first) / (output_len - 1) * 1000),
            ("output tokens after the first (tok/s)", num_sequences * (output_len - 1) / (average - first)),
        ]
    print_table("Latency benchmark", [("Latency of a batch, ms", rows), ("Its parts", parts)])
