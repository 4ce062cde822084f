"""Request bodies: which fields there are, their JSON types and ranges, and which are known but not there yet.

Owns: the pydantic models and the rules for fields outside them. Must not know: the model's vocabulary or context length
(params.py checks those), how answers look. Called by: chat, completions, tokenize; app (the OpenAPI document).

Types are strict: "5" is not a number and true is not an integer. Null means absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from ropeway.errors import RequestError
from ropeway.server.openai.errors import invalid_fields

TokenIds = Annotated[list[int], Field(fail_fast=True)]  # one error is enough: a body may hold millions of ids


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="One of GET /v1/models; without it the served model answers.")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchemaFormat(BaseModel):
    """strict is taken and changes nothing: every schema is held to, or refused."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """How the answer's text is bound. ``structural_tag`` takes the fields of a structural tag beside its type."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    object_schema: dict[str, Any] | None = Field(None, alias="schema", description="With json_object, as some clients.")


class StructuredOutputs(BaseModel):
    """One constraint, in vLLM's form. Schemas and structural tags are objects or their JSON text."""

    model_config = ConfigDict(strict=True, extra="allow")

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = Field(None, description="Lark, or GBNF (with ::=).")
    structural_tag: dict[str, Any] | str | None = None


class GenerationBody(Body):
    """What chat and completions have in common. None in a sampling field: the model's own default."""

    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=2**16)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="Choice i of n uses a stream of its own.")
    user: str | None = None
    metadata: dict[str, Any] | None = None
    # Extensions
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int = Field(0, ge=0, description="No end before so many tokens, unless a grammar is complete sooner.")
    ignore_eos: bool = False
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    allowed_token_ids: TokenIds | None = None
    banned_token_ids: TokenIds | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="Like structured_outputs.json; so the others.")
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, description="Keep the last k; -1: as many as fit.")
    cache_salt: str | None = Field(None, max_length=1024)
    return_token_ids: bool = False
    priority: int = Field(0, ge=-1000, le=1000, description="Lower runs first, with --scheduling-policy priority.")
    queue_timeout_ms: float | None = Field(
        None, ge=0, le=1e12, description="429 if it has not begun to run by then; also the header X-Queue-Timeout-Ms."
    )
    deadline_ms: float | None = Field(
        None, ge=0, le=1e12, description="When the answer ends, as far as it is; also the header X-Deadline-Ms."
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, description="Of every prompt token: itself and so many of the best."
    )
    request_id: str | None = Field(None, pattern=r"^[\x21-\x7e]{1,128}$")


class ChatMessage(BaseModel):
    """content: text, or a list of ``{"type": "text", "text": ...}``. Further keys go to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


Messages = Annotated[list[ChatMessage], Field(fail_fast=True)]


class FunctionSpec(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of type object; absent: no arguments.")
    strict: bool | None = Field(None, description="Arguments of forced calls obey the schema in any case.")


class FunctionTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: FunctionSpec


class TemplateFields(BaseModel):
    """How messages become a prompt."""

    tools: list[FunctionTool] | None = Field(None, max_length=1024)
    add_generation_prompt: bool | None = Field(None, description="Default: unless continue_final_message.")
    continue_final_message: bool = False
    add_special_tokens: bool | None = Field(None, description="Default: false for messages, true for a text.")
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(GenerationBody, TemplateFields):
    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=0, description="Goes before max_tokens.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: int | None = Field(
        None, ge=0, description="Tokens after which a model that thinks is made to answer; others do not mind."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Given to the chat template."
    )


_PROMPT_SCHEMA = {
    "title": "Prompt",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ],
}


class CompletionRequest(GenerationBody):
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]  # completions.py checks it: a union's errors are unreadable
    logprobs: int | None = Field(None, ge=0)
    echo: bool = False
    suffix: str | None = Field(None, description="What follows the answer; for models that fill in the middle.")
    best_of: int | None = Field(
        None,
        ge=1,
        le=128,
        description="So many are generated, and the n with the greatest mean log-probability returned.",
    )
    add_special_tokens: bool = True


class EmbeddingRequest(Body):
    """``user``, ``dimensions`` and ``encoding_format`` are OpenAI's; the rest are extensions."""

    input: Annotated[Any, WithJsonSchema({**_PROMPT_SCHEMA, "title": "Input"})]  # embeddings.py checks it
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="The first so many, brought back to length 1.")
    user: str | None = None
    pooling: Literal["mean", "last"] = Field("mean", description="Of the hidden states of the input's tokens.")
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, description="Keep the last k; -1: as many as fit.")
    cache_salt: str | None = Field(None, max_length=1024)


class TokenizeRequest(Body, TemplateFields):
    """A text, or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    tokens: TokenIds


# Known fields that this server cannot honour yet, and the values, besides null and empty ones, that ask for nothing.
_NOT_YET: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    **dict.fromkeys(
        (
            "guided_whitespace_pattern", "suffix", "functions", "function_call", "audio", "prediction",
            "web_search_options", "store",
            "use_beam_search", "echo", "logits_processors",
        ),
        lambda value, body: False,
    ),
    "best_of": lambda value, body: type(value) is int and value == body.get("n", 1),
    "service_tier": lambda value, body: value in ("auto", "default"),
    "modalities": lambda value, body: value == ["text"],
    "length_penalty": lambda value, body: value == 1,
}  # fmt: skip

# Fields that routers and gateways add for themselves, and that change nothing in the answer.
_TOLERATED = frozenset(
    {
        "no_stop_trim", "separate_reasoning", "stream_reasoning", "return_hidden_states", "session_params",
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params", "min_tokens", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention", "guided_decoding_backend",
    }
)  # fmt: skip

B = TypeVar("B", bound=Body)


def validate(schema: type[B], values: Mapping[str, Any]) -> B:
    """Raises RequestError(400) that names the field."""
    try:
        return schema.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        raise invalid_fields(error) from None


def outside_fields(body: Body, unknown_fields: str) -> list[str]:
    """Names of the fields that have no meaning here, to be reported as ignored. Raises RequestError(400) for fields
    that are known but not supported yet, and with ``unknown_fields == "reject"`` for unknown ones."""
    values = {**body.__dict__, **(body.model_extra or {})}
    unknown = []
    for name, value in (body.model_extra or {}).items():
        if name in _NOT_YET:
            if not (_is_empty(value) or _NOT_YET[name](value, values)):
                raise RequestError(f"'{name}' is not supported yet.", param=name, code="unsupported_parameter")
        elif name not in _TOLERATED:
            unknown.append(name)
    if unknown and unknown_fields == "reject":
        raise RequestError(f"Unknown parameter: '{unknown[0]}'.", param=unknown[0], code="unknown_parameter")
    return unknown if unknown_fields == "warn" else []


def _is_empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)
