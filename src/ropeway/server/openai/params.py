"""From a validated body to SamplingParams: defaults, the model's limits, seeds.

Owns: every check that needs the vocabulary, the context length or another field. Must not know: endpoints, HTTP.
Called by: service.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ropeway.errors import ConfigError, RequestError
from ropeway.protocol import SamplingParams
from ropeway.server.openai.schema import GenerationBody

MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 128
_MASK64 = 2**64 - 1
BadWords = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Tokens that are a bad word by themselves, and runs of several tokens that are one together."""

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the engine found out, as far as requests are checked against it."""

    max_model_len: int  # prompt plus output, in tokens, no more than the KV pool holds
    vocab_size: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int = 0  # numbers of an embedding
    defaults: Mapping[str, float] = field(default_factory=dict)  # of load_sampling_defaults


def load_sampling_defaults(folder: Path) -> dict[str, float]:
    """The sampling fields of the model's generation_config.json; a request's own fields go before them.

    Only fields present in the file count, whatever ``do_sample`` says. Raises ConfigError.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {name: type(_NEUTRAL[name])(values[name]) for name in _NEUTRAL if values.get(name) is not None}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def choice_seed(seed: int, choice: int) -> int:
    """Seed of one choice of n. Choice 0 has the request's own seed, so it gives the same text as with n = 1; the others
    take the output function of SplitMix64, so that neighbouring seeds share no choices."""
    z = seed & _MASK64
    if choice == 0:
        return z
    z = (z + choice * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def stop_strings(body: GenerationBody) -> list[str]:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOP_STRINGS:
        raise _invalid("stop", f"at most {MAX_STOP_STRINGS} stop strings")
    if "" in stops:
        raise _invalid("stop", "a stop string must not be empty")
    return stops


def check_prompt_ids(ids: Sequence[int], limits: ModelLimits, param: str) -> None:
    """ids: integers, already checked to be such."""
    if not ids:
        raise RequestError(f"'{param}' has no tokens.", param=param, code="empty_prompt")
    if max(ids) >= limits.vocab_size or min(ids) < 0:
        raise _invalid(param, f"token ids must be at least 0 and below {limits.vocab_size}, the vocabulary size")


def truncated(ids: list[int], keep: int | None, max_tokens: int | None, limits: ModelLimits) -> list[int]:
    """The last tokens of a prompt, as truncate_prompt_tokens asks. max_tokens: None leaves room for one."""
    if keep is None:
        return ids
    if keep == 0:
        raise _invalid("truncate_prompt_tokens", "must be -1 or at least 1")
    return ids[-(keep if keep > 0 else max(1, limits.max_model_len - (1 if max_tokens is None else max_tokens))) :]


def build_sampling(
    body: GenerationBody,
    limits: ModelLimits,
    *,
    num_prompt_tokens: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    choice: int,
    param: str,
    bad_words: BadWords = ((), ()),
    grammar: str = "",
) -> SamplingParams:
    """Raises RequestError(400). max_tokens: None takes the rest of the context. prompt_logprobs: already checked. param:
    names the prompt in errors. bad_words: of split_bad_words. grammar: as the engine takes it."""
    room = limits.max_model_len - num_prompt_tokens
    if room < (1 if max_tokens is None else max_tokens):
        wanted = f" and {max_tokens} for the completion" if max_tokens else ""
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{num_prompt_tokens} tokens in the {param}{wanted}. Please reduce the length of the {param} or completion.",
            param=param,
            code="context_length_exceeded",
        )
    max_tokens = room if max_tokens is None else max_tokens
    if body.min_tokens > max_tokens:
        raise _invalid("min_tokens", f"must not be above max_tokens, which is {max_tokens}")
    if logprobs is not None and logprobs > limits.max_logprobs:
        name = "logprobs" if param == "prompt" else "top_logprobs"
        raise _invalid(name, f"at most {limits.max_logprobs} on this server")
    if body.prompt_logprobs is not None and body.prompt_logprobs > limits.max_logprobs:
        raise _invalid("prompt_logprobs", f"at most {limits.max_logprobs} on this server")
    if body.allowed_token_ids == []:
        raise _invalid("allowed_token_ids", "an empty list allows nothing")
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
        ids: list[int] = getattr(body, name) or []
        if ids and (max(ids) >= limits.vocab_size or min(ids) < 0):
            raise _invalid(name, f"token ids must be at least 0 and below {limits.vocab_size}, the vocabulary size")
    if body.allowed_token_ids and set(body.allowed_token_ids) <= set(body.banned_token_ids or ()):
        raise _invalid("banned_token_ids", "together with allowed_token_ids it allows nothing")
    default = {**_NEUTRAL, **limits.defaults}
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=default["temperature"] if body.temperature is None else body.temperature,
        # OpenAI's range includes 0, which keeps the likeliest token alone: any tiny share does that.
        top_p=max(default["top_p"] if body.top_p is None else body.top_p, 1e-9),
        top_k=max(int(default["top_k"] if body.top_k is None else body.top_k), 0),
        min_p=default["min_p"] if body.min_p is None else body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=(
            default["repetition_penalty"] if body.repetition_penalty is None else body.repetition_penalty
        ),
        seed=random.getrandbits(64) if body.seed is None else choice_seed(body.seed, choice),
        eos_token_ids=limits.eos_token_ids,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logit_bias=_logit_bias(body.logit_bias or {}, limits.vocab_size),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        banned_token_ids=(*(body.banned_token_ids or ()), *bad_words[0]),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        bad_words=bad_words[1],
    )


def split_bad_words(words: Sequence[str], encode: Callable[[str, bool], list[int]]) -> BadWords:
    """Words that must not be generated, as tokens: at the start of a text and, after a space, within one.

    encode: Tokenizer.encode. Raises RequestError(400).
    """
    if len(words) > MAX_BAD_WORDS:
        raise _invalid("bad_words", f"at most {MAX_BAD_WORDS} words")
    runs: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise _invalid("bad_words", f"a word has 1 to {MAX_BAD_WORD_CHARS} characters that are not all blank")
        for text in (word.lstrip(), " " + word.lstrip()):
            runs[tuple(encode(text, False))] = None
    return tuple(run[0] for run in runs if len(run) == 1), tuple(run for run in runs if len(run) > 1)


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    parsed: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= vocab_size:
            raise _invalid("logit_bias", f"keys must be token ids below {vocab_size}, the vocabulary size")
        if not -100 <= bias <= 100:
            raise _invalid("logit_bias", "values must be between -100 and 100")
        if int(key) in parsed:
            raise _invalid("logit_bias", f"token {int(key)} is given twice")
        parsed[int(key)] = bias
    return tuple(parsed.items())


def _invalid(param: str, reason: str) -> RequestError:
    return RequestError(f"Invalid value for '{param}': {reason}.", param=param, code="invalid_value")
