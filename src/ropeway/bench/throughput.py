"""`ropeway bench throughput`: how fast the engine works off a dataset that is there as a whole, without a server.

Owns: the command's flags, the run, its result. Must not know: how the engine is made. Called by: cli.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from ropeway.bench.datasets import DatasetOptions, load_dataset
from ropeway.bench.flags import dataset_flags, take_dataset_options
from ropeway.bench.offline import (
    Answer,
    Parts,
    Prompt,
    check_fits,
    generate_all,
    progress,
    run_async,
    started,
)
from ropeway.bench.report import print_table, save_result
from ropeway.config import Config

HELP = "Run all requests of a dataset through the engine at once, without a server, and count requests and tokens."
DEFAULTS: dict[str, Any] = {}  # of engine flags, where they differ from those of `ropeway serve`


def flags() -> list[click.Parameter]:
    """Besides the engine's own; --seed is one of those."""
    option = click.Option
    return [
        option(["--backend"], type=click.Choice(["ropeway", "vllm"]), default="ropeway", help="Both mean this engine."),
        *(flag for flag in dataset_flags() if flag.name != "seed"),
        option(["--n"], type=click.IntRange(1), default=1, show_default=True, help="Answers to each prompt."),
        option(
            ["--num-warmups"], type=click.IntRange(0), default=0, show_default=True, help="Requests before the run."
        ),
        option(["--disable-detokenize"], is_flag=True, help="Leave the answers as token ids."),
        option(["--output-json"], metavar="FILE", help="Write the result here."),
    ]


def run(config: Config, flags: dict[str, Any], parts: Parts) -> int:
    """Exit code. Raises ConfigError, EngineDeadError."""
    dataset = take_dataset_options(flags, "ids")
    return run_async(_run(dataset, config.model.seed, parts, **flags))


async def _run(
    dataset: DatasetOptions,
    seed: int,
    parts: Parts,
    *,
    backend: str,
    n: int,
    num_warmups: int,
    disable_detokenize: bool,
    output_json: str | None,
) -> None:
    tokenizer = parts.tokenizer()
    async with started(client := parts.client()) as ready:
        rng = np.random.default_rng([seed])
        vocab_size = min(ready.vocab_size, tokenizer.vocab_size)
        samples = load_dataset(dataset, vocab_size=vocab_size, tokenizer=tokenizer, rng=rng)
        prompts = [Prompt(sample.prompt_token_ids or [], sample.output_len) for sample in samples]
        check_fits(prompts, ready)
        if num_warmups:  # other prompts of the same lengths: those to come must not be cached
            lengths = [prompts[index % len(prompts)] for index in range(num_warmups)]
            warm = [Prompt(rng.integers(vocab_size, size=len(p.token_ids)).tolist(), p.output_len) for p in lengths]
            await generate_all(client, warm, seed=seed)
        with progress("requests", len(prompts) * n) as advance:

            def on_done(answer: Answer) -> None:
                if not disable_detokenize:
                    tokenizer.decode(answer.token_ids)
                advance()

            answers, seconds = await generate_all(client, prompts, n=n, seed=seed, on_done=on_done)
    result = result_of(parts.model_id, answers[::n], answers, seconds)
    report(result)
    if output_json is not None:
        save_result(Path(output_json), result)


def result_of(model_id: str, firsts: Sequence[Answer], answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """firsts: one answer to each prompt, because a prompt counts once however many answers it has."""
    prompt_tokens = sum(answer.prompt_len for answer in firsts)
    output_tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "model_id": model_id,
        "elapsed_time": seconds,
        "num_requests": len(firsts),
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": len(firsts) / seconds,
        "tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "total_prompt_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / seconds,
    }


def report(result: dict[str, Any]) -> None:
    counts = [
        ("Requests", result["num_requests"]),
        ("Duration (s)", result["elapsed_time"]),
        ("Input tokens", result["total_prompt_tokens"]),
        ("Output tokens", result["total_output_tokens"]),
    ]
    rates = [
        ("Requests (req/s)", result["requests_per_second"]),
        ("Output tokens (tok/s)", result["output_tokens_per_second"]),
        ("All tokens (tok/s)", result["tokens_per_second"]),
    ]
    print_table("Throughput benchmark", [("", counts), ("Throughput", rates)])
