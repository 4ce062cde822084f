"""The engine without a server, for the commands that measure it alone: how it is made, and whole batches through it.

Owns: EngineParts, one answer from request to last token, the progress bar. Must not know: datasets, what is measured.
Called by: cli (makes the parts), bench.throughput, bench.latency, bench.startup.

The engine runs in its own process behind the same client as under `ropeway serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from ropeway.bench.tokenizer import find_tokenizer
from ropeway.config import Config
from ropeway.engine.client import EngineClient
from ropeway.engine.process_client import ProcessEngineClient
from ropeway.errors import ConfigError
from ropeway.hub import DEMO_NAME, resolve_model
from ropeway.protocol import AddRequest, EngineReady, FinishReason, SamplingParams

if TYPE_CHECKING:
    from ropeway.server.tokenizer import Tokenizer

T = TypeVar("T")
PERCENTILES = (10, 25, 50, 75, 90, 99)
REDRAW_SECONDS = 0.2

_request_ids = itertools.count(1)


class GenerationError(Exception):
    """The engine ended a request for a reason of its own."""


class Parts(Protocol):
    """What a command needs besides its flags."""

    @property
    def model_id(self) -> str: ...

    def client(self) -> EngineClient:
        """A new engine, not started."""
        ...

    def tokenizer(self) -> Tokenizer: ...


class EngineParts:
    """The parts as configured. The model is found, and fetched if need be, when they are made. Raises ConfigError."""

    def __init__(self, config: Config) -> None:
        model = config.model
        self._config = config
        self._folder: Path = resolve_model(model.model, revision=model.revision, download_dir=model.download_dir)

    @property
    def model_id(self) -> str:
        return self._config.model.model or DEMO_NAME

    def client(self) -> EngineClient:
        from ropeway.serve import make_executor

        return ProcessEngineClient(self._config, functools.partial(make_executor, self._config, self._folder))

    def tokenizer(self) -> Tokenizer:
        from ropeway.server.tokenizer import Tokenizer

        model = self._config.model
        if model.tokenizer:
            return find_tokenizer(model.tokenizer)
        return Tokenizer.load(self._folder, model.chat_template, model_folder=self._folder)


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    output_len: int  # tokens


@dataclass(slots=True)
class Answer:
    prompt_len: int
    token_ids: list[int] = field(default_factory=list)
    start: float = 0.0  # time.perf_counter(), as are the next two
    first_token: float = 0.0
    end: float = 0.0


def check_fits(prompts: Sequence[Prompt], ready: EngineReady) -> None:
    """Raises ConfigError for a prompt that with its output could never run."""
    limit = min(ready.max_model_len, ready.kv_capacity_tokens)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids) + prompt.output_len)
    if len(longest.token_ids) + longest.output_len > limit:
        raise ConfigError(
            f"a prompt of {len(longest.token_ids)} tokens and {longest.output_len} output tokens is more than the "
            f"{limit} that the engine has room for; see --max-model-len and --kv-cache-memory-bytes"
        )


async def generate(client: EngineClient, prompt: Prompt, seed: int) -> Answer:
    """All of the prompt's output tokens, drawn at temperature 1; end tokens do not end it. Raises GenerationError,
    EngineDeadError."""
    sampling = SamplingParams(max_tokens=prompt.output_len, temperature=1.0, ignore_eos=True, seed=seed)
    answer = Answer(len(prompt.token_ids), start=time.perf_counter())
    request = AddRequest(next(_request_ids), prompt.token_ids, sampling, time.monotonic())
    async for delta in client.generate(request):
        answer.end = time.perf_counter()
        if not answer.token_ids:
            answer.first_token = answer.end
        answer.token_ids += delta.token_ids
        if delta.finish_reason not in (None, FinishReason.LENGTH):
            raise GenerationError(f"a request ended early: {delta.error or delta.finish_reason.name.lower()}")
    return answer


async def generate_all(
    client: EngineClient,
    prompts: Sequence[Prompt],
    *,
    n: int = 1,
    seed: int = 0,
    on_done: Callable[[Answer], None] = lambda answer: None,
) -> tuple[list[Answer], float]:
    """Everything at once, n answers to each prompt; returns them in order, and the seconds until the last was there.
    The first request that fails ends the others. Raises GenerationError, EngineDeadError."""

    async def one(prompt: Prompt, number: int) -> Answer:
        answer = await generate(client, prompt, (seed << 32) + number)
        on_done(answer)
        return answer

    start = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as tasks:
            many = [prompt for prompt in prompts for _ in range(n)]
            running = [tasks.create_task(one(prompt, number)) for number, prompt in enumerate(many)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running], time.perf_counter() - start


@contextlib.asynccontextmanager
async def started(client: EngineClient) -> Any:
    """Yields EngineReady. Raises ConfigError, EngineDeadError."""
    try:
        yield await client.start()
    finally:
        await client.close()


def run_async(main: Coroutine[Any, Any, None]) -> int:
    """The exit code of a command."""
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)
    except GenerationError as error:
        click.echo(f"ropeway: error: {error}", err=True)
        return 1
    return 0


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, and what to call when one of ``total`` is done; silent where nobody watches. It has no thread
    that would take time from what is measured."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task(title, total=total)
        last_drawn = 0.0

        def advance() -> None:
            nonlocal last_drawn
            bar.advance(task)
            if (now := time.monotonic()) - last_drawn > REDRAW_SECONDS:
                last_drawn = now
                bar.refresh()

        bar.refresh()
        yield advance
        bar.refresh()


def percentiles_of(values: Sequence[float]) -> dict[str, float]:
    """Keyed as `vllm bench` keys them: "10" to "99"."""
    import numpy as np

    return {str(wanted): float(np.percentile(values, wanted)) for wanted in PERCENTILES}
