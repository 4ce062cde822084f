"""Chat messages to prompt text, through the model's Jinja template, exactly as Hugging Face renders it.

Owns: the sandboxed Jinja environment, the choice among named templates, what is whose fault when a template fails.
Must not know: token ids, HTTP. Called by: server.tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ropeway.errors import ConfigError, RequestError

Json = dict[str, Any]

MAX_RENDERED_CHARS = 64 * 2**20
# Put after the final message's content to find, in the rendered text, where it ends. The space at its end tells whether
# the template trims contents.
END_MARK = "ROPEWAY_END_OF_FINAL_MESSAGE "
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateRefusal(jinja2.TemplateError):
    """The template called raise_exception: these messages are not for this model."""


class ChatTemplate:
    """The templates of one model by name, and the special tokens they may write."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        self.sources = sources
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, folder: Path, settings: Json, special_tokens: dict[str, str], override: str = "") -> ChatTemplate:
        """Find the templates: ``override`` (a file, or the text itself), else chat_template.jinja and
        additional_chat_templates/*.jinja, else chat_template.json, else tokenizer_config.json.

        Raises ConfigError for an override that is not there or does not compile, and for unreadable files.
        """
        if not override:
            return cls(_find_sources(folder, settings), special_tokens)
        source = override
        if "{" not in override:
            try:
                source = Path(override).expanduser().read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(f"--chat-template {override}: {error}") from error
        try:
            compile_template(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"--chat-template does not compile: {error}") from error
        return cls({"default": source}, special_tokens)

    def render(
        self,
        messages: list[Json],
        *,
        tools: list[Json] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Json | None = None,
    ) -> str:
        """The prompt text. ``kwargs`` are the client's chat_template_kwargs; they may replace special tokens.

        continue_final_message: the text ends right after the final message's content, whose trailing spaces are kept
        unless the template itself trims contents. Beyond Hugging Face, a message without content has an empty one, and
        tool-call arguments that are JSON text are given to the template as the object they hold, because that is how
        OpenAI clients send them and not what templates expect.

        Raises RequestError: 400 with the template's words if it refuses the messages or trips over them, 500 if it
        fails for any conversation.
        """
        kwargs = kwargs or {}
        if not self.sources:
            raise RequestError(
                "This model has no chat template; use /v1/completions, or start the server with --chat-template.",
                param="messages",
            )
        if not messages:
            raise RequestError("messages must hold at least one message.", param="messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true.", param="continue_final_message"
            )
        if clash := sorted(RESERVED & kwargs.keys()):
            raise RequestError(f"chat_template_kwargs must not hold {clash[0]!r}.", param="chat_template_kwargs")
        chat = [_prepare(message) for message in messages]
        final = _mark_end(chat, messages) if continue_final_message else None
        source = self._choose(bool(tools))
        context = {
            **self._special_tokens,
            "documents": None,
            **kwargs,
            "messages": chat,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _render(source, context)
        except RequestError:
            raise
        except TemplateRefusal as error:
            raise RequestError(str(error), param="messages") from None
        except Exception as error:
            raise self._blame(error, source, context) from None
        return text if final is None else _cut(text, final)

    def _choose(self, with_tools: bool) -> str:
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise RequestError(
                f"The model's chat templates ({', '.join(sorted(self.sources))}) have no default; start the server with "
                "--chat-template.",
                status=500,
                type="server_error",
            )
        return self.sources[name]

    @staticmethod
    def _blame(error: Exception, source: str, context: Json) -> RequestError:
        """An error that the simplest conversation provokes too is the template's own, any other the request's."""
        probe = {**context, "messages": [{"role": "user", "content": "a"}], "tools": None}
        try:
            _render(source, probe)
        except TemplateRefusal:
            pass
        except Exception:
            return RequestError(f"The model's chat template is faulty: {error}", status=500, type="server_error")
        return RequestError(f"The chat template cannot render these messages: {error}", param="messages")


def _find_sources(folder: Path, settings: Json) -> dict[str, str]:
    try:
        files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if (main := folder / "chat_template.jinja").is_file():
            files["default"] = main
        if files:
            return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        found = settings.get("chat_template")
        origin = folder / "tokenizer_config.json"
        if (other := folder / "chat_template.json").is_file():
            origin = other
            found = json.loads(other.read_text(encoding="utf-8"))
            found = found.get("chat_template") if isinstance(found, dict) else found
    except (OSError, ValueError) as error:
        raise ConfigError(f"the chat template in {folder} cannot be read: {error}") from error
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):  # [{"name": ..., "template": ...}]
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    if not isinstance(found, dict) or not all(isinstance(part, str) for pair in found.items() for part in pair):
        raise ConfigError(f"{origin}: chat_template must be a text or a list of names and texts")
    return found


def _prepare(message: Json) -> Json:
    """What the template sees of a message: no nulls, which templates print as "None"."""
    result = {key: value for key, value in message.items() if value is not None}
    result.setdefault("content", "")
    calls = result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = [_parse_arguments(call) for call in calls]
    reasoning = next((result[name] for name in REASONING_FIELDS if name in result), None)
    if reasoning is not None:  # the first name is the one that templates read; a few read the second
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _parse_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _mark_end(chat: list[Json], messages: list[Json]) -> str:
    """Append END_MARK to the final message's text; returns that text without it."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + END_MARK
        return content
    if isinstance(content, list):
        texts = [i for i, part in enumerate(content) if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if texts:
            text: str = content[texts[-1]]["text"]
            parts = list(content)
            parts[texts[-1]] = {**parts[texts[-1]], "text": text + END_MARK}
            chat[-1]["content"] = parts
            return text
    raise RequestError("continue_final_message: the final message has no text to continue.", param="messages")


def _cut(text: str, final: str) -> str:
    at = text.rfind(END_MARK.strip())
    if at < 0 or final.strip() not in text[:at]:
        raise RequestError(
            "continue_final_message: the chat template does not show the final message's content as it is.",
            param="messages",
        )
    # A template that trims contents has trimmed the mark's space, and would have trimmed the content's end as well.
    return text[:at] if text.startswith(END_MARK, at) else text[:at].rstrip()


def _render(source: str, context: Json) -> str:
    pieces: list[str] = []
    size = 0
    for piece in compile_template(source).generate(context):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_RENDERED_CHARS:
            raise RequestError(f"The rendered chat is longer than {MAX_RENDERED_CHARS} characters.", param="messages")
    return "".join(pieces)


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Raises jinja2.TemplateSyntaxError."""
    return _environment().from_string(source)


def identifiers(source: str) -> frozenset[str]:
    """Names in a template's tags, and the texts there that are like names, as in ``message['tool_calls']``; not what is
    in its text and comments. Empty for a template that cannot be read."""
    try:
        tokens = list(_environment().lex(source))
    except jinja2.TemplateError:
        return frozenset()
    return frozenset(value.strip("\"'") for _, kind, value in tokens if kind in ("name", "string"))


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it is just its contents."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block has a scope of its own, as in training: what is set inside does not reach the outside.
        return jinja2.nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape <, > and &."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
