"""One replica from its first to its last second: start-up order, signals, drain, exit code.

Owns: the listening socket, the engine client, the HTTP server. Must not know: what any of them does inside.
Called by: cli. Module level stays light: the spawned engine imports this file to find its executor.

Everything slow runs side by side. The engine process is spawned as soon as its model is found; while torch loads there,
this process opens the port (503 until the model is there), imports the HTTP stack and loads the tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ropeway import __version__
from ropeway.config import Config, ModelConfig, ServerConfig
from ropeway.engine.process import LOG_FORMAT
from ropeway.engine.process_client import ProcessEngineClient
from ropeway.errors import ConfigError
from ropeway.hub import home, resolve_model
from ropeway.protocol import EngineReady, StepOutputs

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from ropeway.engine.step import Executor
    from ropeway.server.health import Lifecycle
    from ropeway.server.service import Service
    from ropeway.server.tokenizer import Tokenizer

logger = logging.getLogger("ropeway")
T = TypeVar("T")

PACKED_FOLDER = "packed"
BACKLOG = 2048
MAX_DESCRIPTORS = 65536
KEEP_ALIVE_SECONDS = 75  # longer than balancers keep idle connections: they close first and never meet a reset
LAST_WORDS_SECONDS = 5  # for aborted streams to send their end


def serve(config: Config) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit code. Raises ConfigError or EngineDeadError if it cannot
    start."""
    began = time.monotonic()
    gc.disable()  # until ready: nearly all that is imported stays, and searching it for cycles takes a tenth of the time
    logging.basicConfig(level=config.server.log_level.upper(), format=LOG_FORMAT)
    _allow_many_connections()
    with listening(config.server) as listener:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Replica(config, listener, began).run())


def make_executor(config: Config, model_folder: Path) -> Executor:
    """Runs in the engine process; the only way to torch from here."""
    from ropeway.worker.executor import LocalExecutor

    executor: Executor = LocalExecutor(
        config,
        model_folder,
        home() / PACKED_FOLDER,
        tokenizer_folder=lambda: _tokenizer_folder(config.model, model_folder),
    )
    return executor


class _Replica:
    """Built and run inside the event loop, once."""

    def __init__(self, config: Config, listener: socket.socket, began: float) -> None:
        self._config = config
        self._listener = listener
        self._began = began
        self._url = url_of(config.server, listener)
        self._gate = Gate()
        self._stop = asyncio.Event()
        self._client: ProcessEngineClient | None = None
        self._http: uvicorn.Server | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._lifecycle: Lifecycle | None = None
        self._service: Service | None = None
        self._on_step: Callable[[StepOutputs], None] = lambda outputs: None  # the metrics', once they are there

    async def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        loading = asyncio.create_task(self._load())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                await loading
                assert self._http_task is not None
                await asyncio.wait((self._http_task, stopping), return_when=asyncio.FIRST_COMPLETED)
                if self._http_task.done():  # it never ends by itself, except by a fault
                    await self._http_task
                    return 1
                await self._drain()
            return 0  # also when it was told to leave while it was loading: there was nothing to drain
        finally:
            for task in (loading, stopping):
                task.cancel()
            await asyncio.gather(loading, stopping, return_exceptions=True)
            await self._close()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            os._exit(1)  # the second one; the engine sees its pipe close and goes, too
        self._stop.set()

    async def _load(self) -> None:
        model = self._config.model
        try:
            async with asyncio.TaskGroup() as tasks:
                opening = tasks.create_task(self._open())
                folder = await _in_thread(
                    lambda: resolve_model(model.model, revision=model.revision, download_dir=model.download_dir)
                )
                self._client = ProcessEngineClient(
                    self._config,
                    functools.partial(make_executor, self._config, folder),
                    lambda outputs: self._on_step(outputs),
                )
                starting = tasks.create_task(self._client.start())
                await opening
                tokenizer = await _in_thread(lambda: _load_tokenizer(model, folder))
                app = self._build_app(self._client, tokenizer, folder)
                ready = await starting
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        gc.freeze()
        gc.enable()
        app.state.service.mark_ready(ready)
        report(app.state.service.names[0], ready, time.monotonic() - self._began, self._url)

    async def _open(self) -> None:
        """Listen, with the gate in front of the app that does not exist yet; then import what the app needs."""
        self._http = await _in_thread(lambda: make_http_server(self._config.server, self._gate))
        self._http_task = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        await _in_thread(lambda: importlib.import_module("ropeway.server.app"))

    def _build_app(self, client: ProcessEngineClient, tokenizer: Tokenizer, folder: Path) -> FastAPI:
        from ropeway.metrics import Metrics
        from ropeway.server.app import create_app
        from ropeway.server.health import Lifecycle
        from ropeway.server.openai.models import served_names

        metrics = Metrics(served_names(self._config)[0], self._config)
        self._on_step = metrics.on_step
        self._lifecycle = Lifecycle(self._config.server.drain_notice)
        app = create_app(self._config, client, tokenizer, metrics, lifecycle=self._lifecycle, model_folder=folder)
        self._service = app.state.service
        self._gate.app = app
        return app

    async def _drain(self) -> None:
        """Not ready at once; still serving for the notice; then nothing new, and running requests may finish."""
        assert self._client is not None
        assert self._lifecycle is not None
        self._lifecycle.begin_drain()
        logger.info("draining: requests in flight: %d", self._lifecycle.in_flight)
        await asyncio.sleep(self._config.server.drain_notice)
        if not await self._lifecycle.wait_idle(self._config.server.shutdown_timeout):
            logger.warning("requests aborted by the shutdown: %d", self._lifecycle.in_flight)
            await self._client.abort_all()
            await self._lifecycle.wait_idle(LAST_WORDS_SECONDS)
        self._lifecycle.stop()

    async def _close(self) -> None:
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            await asyncio.gather(self._http_task, return_exceptions=True)
        if self._service is not None:
            await _in_thread(self._service.close)
        if self._client is not None:
            await self._client.close()


# HTTP

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
LOADING_BODY = (
    b'{"error":{"message":"The server is starting.","type":"service_unavailable_error","param":null,"code":"starting"}}'
)


class Gate:
    """ASGI. Answers for the app until there is one: alive, but not ready."""

    app: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
            return
        alive = scope["path"].removeprefix(scope.get("root_path", "")) == "/live"
        body = b'{"status":"starting"}' if alive else LOADING_BODY
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *(() if alive else ((b"retry-after", b"5"), (b"connection", b"close"))),
        ]
        await send({"type": "http.response.start", "status": 200 if alive else 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def make_http_server(config: ServerConfig, app: Gate) -> uvicorn.Server:
    """Raises ConfigError for TLS files that cannot be used."""
    import uvicorn

    class Server(uvicorn.Server):
        """Ours are the signals."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    settings = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        root_path=config.root_path,
        ssl_keyfile=config.ssl_keyfile or None,
        ssl_certfile=config.ssl_certfile or None,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
    )
    try:
        settings.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile}: {error}"
        ) from None
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return Server(settings)


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """The socket, bound and listening before anything is loaded, so that a taken port is told at once. Raises
    ConfigError."""
    place = config.uds or f"{config.host}:{config.port}"
    try:
        if config.uds:
            _remove_stale_socket(Path(config.uds))
            listener = socket.socket(socket.AF_UNIX)
            address: Any = config.uds
        else:
            found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        raise ConfigError(f"cannot listen on {place}: {error.strerror or error}") from None
    with listener:
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {place}: {error.strerror}") from None
        try:
            yield listener
        finally:
            if config.uds:
                Path(config.uds).unlink(missing_ok=True)


def _remove_stale_socket(path: Path) -> None:
    """A socket that nobody listens on is left from a server that was killed. Anything else stays."""
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def _allow_many_connections() -> None:
    """Each stream is a descriptor, and the usual soft limit is 1,024. The hard limit is the administrator's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    if config.uds:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'https' if config.ssl_certfile else 'http'}://{host}:{listener.getsockname()[1]}"


# Start-up


def _load_tokenizer(config: ModelConfig, folder: Path) -> Tokenizer:
    from ropeway.server.tokenizer import Tokenizer

    return Tokenizer.load(_tokenizer_folder(config, folder), config.chat_template, model_folder=folder)


def _tokenizer_folder(config: ModelConfig, folder: Path) -> Path:
    """folder: the model's."""
    if not config.tokenizer:
        return folder
    place = Path(config.tokenizer)
    if place.is_dir():
        return place
    return resolve_model(config.tokenizer, revision=config.revision, download_dir=config.download_dir)


async def _in_thread(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, in a thread that nobody waits for at exit: a download cannot be interrupted."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="start-up", daemon=True).start()
    return await future


def report(name: str, ready: EngineReady, seconds: float, url: str) -> None:
    """What is served, where, and how long that took; once, on standard output."""
    phases = ", ".join(f"{name} {value:.1f}" for name, value in ready.startup_seconds.items())
    rows = [
        ("model", name),
        ("runs as", f"{ready.architecture}, {ready.dtype} on {ready.device}"),
        ("context", f"{ready.max_model_len:,} tokens"),
        ("KV cache", f"{ready.kv_capacity_tokens:,} tokens in {ready.num_blocks:,} blocks of {ready.block_size}"),
        ("start-up", f"{seconds:.1f} s" + (f" (engine: {phases})" if phases else "")),
        ("URL", url),
    ]
    title = f"Ropeway {__version__} is ready"
    if not sys.stdout.isatty():
        print(title, *(f"  {name:<9} {value}" for name, value in rows), sep="\n", flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left", title_style="bold green")
    for name, value in rows:
        table.add_row(f"[dim]{name}[/dim]", value)
    Console().print(table)
