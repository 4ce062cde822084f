"""The three kinds of error a user or supervisor can meet; everything else is a bug.

Owns: the exception types. Must not know: HTTP frameworks, torch. Called by: every room.
"""

from __future__ import annotations


class ConfigError(Exception):
    """The server cannot start as asked. The message is one line that says what to change."""


class RequestError(Exception):
    """A client's request is refused. Becomes the OpenAI error body ``{"error": {message, type, param, code}}``.

    status: HTTP status; type: OpenAI error type; param: the offending field; code: machine-readable reason.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}


class EngineDeadError(Exception):
    """The engine process ended while requests were in flight. The supervisor restarts it."""
