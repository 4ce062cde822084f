"""The HTTP application: its assembly, and the layer around every route (request ids, keys, errors, the access log).

Owns: create_app. Must not know: which routes there are, how requests are parsed or run. Called by: cli, which builds what is handed in, calls
``app.state.service.mark_ready(ready)`` once the engine has started, and drives ``app.state.lifecycle`` on signals.
"""

from __future__ import annotations

import logging
import re
import socket
import uuid
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ropeway.config import Config
from ropeway.engine.client import EngineClient
from ropeway.errors import RequestError
from ropeway.metrics import Metrics
from ropeway.protocol import EngineReady
from ropeway.server.auth import Keys
from ropeway.server.call import RequestInfo
from ropeway.server.health import Lifecycle
from ropeway.server.openai.errors import error_response, internal_error
from ropeway.server.openai.models import served_names
from ropeway.server.openai.params import load_sampling_defaults
from ropeway.server.openapi import document
from ropeway.server.routes import add_probes, add_routes
from ropeway.server.service import Service
from ropeway.server.sse import ClientGone
from ropeway.server.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("ropeway.access")

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def create_app(
    config: Config,
    client: EngineClient,
    tokenizer: Tokenizer,
    metrics: Metrics,
    *,
    ready: EngineReady | None = None,
    lifecycle: Lifecycle | None = None,
    model_folder: Path | None = None,
) -> FastAPI:
    """The app of one replica. It starts and stops nothing.

    ready: the engine's facts, if it has started; else call ``app.state.service.mark_ready`` later: until then
    requests get 503. model_folder: where generation_config.json gives the default sampling parameters, unless
    ``--generation-config none``. Raises ConfigError for an unreadable one.
    """
    use_defaults = model_folder is not None and config.model.generation_config == "auto"
    service = Service(
        config,
        client,
        tokenizer,
        metrics,
        lifecycle or Lifecycle(config.server.drain_notice),
        names=served_names(config),
        sampling_defaults=load_sampling_defaults(model_folder) if use_defaults and model_folder else {},
    )
    app = FastAPI(
        title="Ropeway",
        version=version("ropeway"),
        redirect_slashes=False,  # a redirected POST loses its body with many clients
    )
    app.state.service = service
    app.state.lifecycle = service.lifecycle
    if ready is not None:
        service.mark_ready(ready)
    metrics.before_page(lambda: _refresh(service))
    add_routes(app, service)
    add_probes(app, service)
    _add_error_handlers(app, service)
    app.add_middleware(Gate, service=service, keys=Keys(config.server.api_key))
    if config.server.allowed_origins:  # outside the gate: a preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.server.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    return app


def _refresh(service: Service) -> None:
    service.metrics.in_flight.set(service.lifecycle.in_flight)
    service.metrics.draining.set(service.lifecycle.is_draining)
    service.metrics.set_restarts(service.client.health.num_restarts)


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    async def request_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return _refuse(service, error)

    async def http_error(request: Request, error: Exception) -> Response:
        """No such route, or not with this method."""
        assert isinstance(error, HTTPException)
        unknown = error.status_code == 404
        message = f"Unknown URL: {request.method} {request.url.path[:200]}" if unknown else str(error.detail)
        code = "unknown_url" if unknown else "method_not_allowed"
        headers = dict(error.headers or {})
        return _refuse(service, RequestError(message, status=error.status_code, code=code, headers=headers))

    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the access log does

    app.add_exception_handler(RequestError, request_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, client_gone)
    app.add_exception_handler(ClientDisconnect, client_gone)


def _refuse(service: Service, error: RequestError) -> Response:
    service.metrics.refused(error.status, error.code or error.type)
    return error_response(error)


class Gate:
    """Around every request: its id, its key, the last resort for bugs, one line in the access log."""

    def __init__(self, app: ASGIApp, service: Service, keys: Keys) -> None:
        self._app = app
        self._service = service
        self._keys = keys
        self._host_name = re.sub(r"[^\x21-\x7e]", "?", socket.gethostname())
        self._logs = service.config.server.enable_log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        is_given = REQUEST_ID.fullmatch(given) is not None
        info = RequestInfo(given if is_given else uuid.uuid4().hex, is_given, self._service.clock(), send)
        scope["ropeway"] = info
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = info.request_id
                headers["X-Served-By"] = self._host_name
                for name, value in info.headers.items():
                    headers[name] = value
            await send(message)

        try:
            info.key_name = self._keys.check(scope["path"].removeprefix(scope.get("root_path", "")), scope["headers"])
            await self._app(scope, receive, send_with_headers)
        except RequestError as error:
            await _refuse(self._service, error)(scope, receive, send_with_headers)
        except Exception:
            logger.exception("request %s failed", info.request_id)
            if status:
                raise  # too late for an answer: the connection is cut
            await _refuse(self._service, internal_error())(scope, receive, send_with_headers)
        finally:
            if self._logs and scope["method"] == "POST":
                _log(info, status, self._service.clock())
            # Scope and info hold each other until the collector comes by. The call may be large: it goes now.
            info.call = None


def _log(info: RequestInfo, status: int, now: float) -> None:
    """Ids and counts; never a word of the client's."""
    line = f"request={info.request_id} key={info.key_name or '-'} status={status} seconds={now - info.arrival_time:.3f}"
    if (call := info.call) is not None:
        usage = call.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        line += (
            f" id={call.id} sequences={len(call.sequences)} prompt_tokens={usage['prompt_tokens']}"
            f" cached_tokens={cached} completion_tokens={usage['completion_tokens']}"
        )
        first = call.sequences[0].stream.first_token_time
        if first is not None:
            line += f" ttft={first - info.arrival_time:.3f}"
    access_logger.info(line)
