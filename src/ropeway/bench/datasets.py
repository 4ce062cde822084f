"""What is sent: prompts and lengths of every kind of dataset, drawn from one seeded generator.

Owns: the dataset flags and all sampling of prompts, lengths and trace times. Must not know: HTTP, the engine, clocks.
Called by: bench.serve, bench.throughput.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ropeway.errors import ConfigError

if TYPE_CHECKING:
    from ropeway.server.tokenizer import Tokenizer

Rng = np.random.Generator
PromptForm = Literal["ids", "text", "chat"]
DatasetName = Literal[
    "random",
    "sharegpt",
    "custom",
    "prefix_repetition",
    "timed_trace",
    "azure-conv",
    "azure-code",
    "anyscale-exp",
    "nano",
]
DATASET_NAMES: tuple[str, ...] = get_args(DatasetName)
FILE_DATASETS = frozenset({"sharegpt", "custom", "timed_trace"})  # need --dataset-path
TEXT_DATASETS = frozenset({"sharegpt", "custom"})  # their prompts are texts by nature

WORD = re.compile(" [A-Za-z]+")
MIN_WORDS = 1000  # with fewer of them in the vocabulary, prompts would repeat themselves

# The trimming of ShareGPT that published results agree on: what is shorter or longer is left out.
SHAREGPT_MIN_TOKENS = 4
SHAREGPT_MAX_PROMPT = 1024
SHAREGPT_MAX_TOTAL = 2048

# Columns of the known request traces: ours and vidur's, Mooncake's, Azure's own.
TIME_COLUMNS = ("timestamp", "arrived_at", "TIMESTAMP")
INPUT_COLUMNS = ("input_length", "num_prefill_tokens", "ContextTokens")
OUTPUT_COLUMNS = ("output_length", "num_decode_tokens", "GeneratedTokens")

# Quantiles of the token counts in the Azure LLM inference traces 2023 (19,366 chat and 8,819 code requests, as processed
# by microsoft/vidur, MIT licence). Lengths are drawn by inverting them, log-linear in between. The fit's means differ
# from the traces' by -1.5 % (chat in), +0.4 % (chat out), +0.5 % (code in) and +4 % (code out). Prompt and answer are
# drawn independently: their rank correlation in the traces is 0.07 and -0.02.
AZURE_PROBABILITIES = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.995, 0.999, 1)
AZURE_QUANTILES = {
    "azure-conv": (
        (2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 4831, 6179, 14050),
        (7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 643, 954, 1000),
    ),
    "azure-code": (
        (3, 17, 75, 147, 386, 770, 1075, 1469, 1909, 2433, 3192, 5188, 7303, 7436, 7436, 7437, 7437),
        (6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 251, 359, 825, 1899),
    ),
}
NANO_RANGE = (100, 1024)  # both ends included, prompt and answer alike


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request to make. Exactly one of prompt_token_ids, prompt and messages is set."""

    prompt_token_ids: list[int] | None
    prompt: str | None
    prompt_len: int  # tokens; 0 where there was no tokenizer to count them
    output_len: int  # tokens wanted
    arrival: float | None = None  # seconds after the start, for timed traces
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """The dataset flags, under their own names. Lengths are tokens. Checked by load_dataset."""

    dataset_name: str = "random"
    dataset_path: str = ""
    num_prompts: int = 1000
    prompt_form: PromptForm = "ids"  # what the receiver takes: token ids, a text, or chat messages
    no_oversample: bool = False
    disable_shuffle: bool = False
    skip_chat_template: bool = False
    max_total_len: int | None = None  # traces and generators: prompts are cut so that prompt and answer fit
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256  # -1: each line has its own output_tokens
    anyscale_input_len: int = 512
    anyscale_mean_output_len: int = 128
    anyscale_max_output_len: int = 1536
    timed_trace_sec_multiplier: float = 1.0
    timed_trace_chunk_hash_size: int = 16


def load_dataset(
    options: DatasetOptions, *, vocab_size: int, tokenizer: Tokenizer | None, rng: Rng
) -> list[SampleRequest]:
    """The requests, in the order in which they are sent. The same options and seed give the same requests.

    vocab_size: ids are below it; special tokens and holes are left out where a tokenizer tells them. tokenizer: needed
    for every prompt_form but "ids", and for sharegpt and custom. Raises ConfigError.
    """
    _check(options, tokenizer)
    prompts = _Prompts(options.prompt_form, vocab_size, tokenizer, rng)
    samples = list(_LOADERS[options.dataset_name](options, prompts, rng))
    if not samples:
        raise ConfigError(f"--dataset-name {options.dataset_name}: no usable request in {options.dataset_path}")
    if options.dataset_name in TEXT_DATASETS and not options.no_oversample:
        return [samples[index % len(samples)] for index in range(options.num_prompts)]
    return samples


def _check(options: DatasetOptions, tokenizer: Tokenizer | None) -> None:
    name = options.dataset_name
    if name not in DATASET_NAMES:
        raise ConfigError(f"--dataset-name {name} is unknown; it must be one of {', '.join(DATASET_NAMES)}")
    if bool(options.dataset_path) != (name in FILE_DATASETS):
        wanted = "needs --dataset-path" if name in FILE_DATASETS else "is generated and takes no --dataset-path"
        raise ConfigError(f"--dataset-name {name} {wanted}")
    if tokenizer is None and (name in TEXT_DATASETS or options.prompt_form != "ids"):
        raise ConfigError(f"--dataset-name {name} needs a tokenizer for prompts as {options.prompt_form}")
    if not 0 <= options.random_range_ratio < 1:
        raise ConfigError("--random-range-ratio must be at least 0 and less than 1")
    at_least = {
        "num_prompts": 1, "random_input_len": 1, "random_output_len": 1, "random_prefix_len": 0,
        "prefix_repetition_prefix_len": 0, "prefix_repetition_suffix_len": 1, "prefix_repetition_num_prefixes": 1,
        "prefix_repetition_output_len": 1, "sharegpt_output_len": 1, "anyscale_input_len": 1,
        "anyscale_mean_output_len": 1, "anyscale_max_output_len": 1, "timed_trace_chunk_hash_size": 1,
        "max_total_len": 2,
    }  # fmt: skip
    for field, least in at_least.items():
        value = getattr(options, field)
        if value is not None and value < least:
            raise ConfigError(f"--{field.replace('_', '-')} must be at least {least}")
    if options.custom_output_len < 1 and options.custom_output_len != -1:
        raise ConfigError("--custom-output-len must be at least 1, or -1 for the output_tokens of each line")
    if not 0 < options.timed_trace_sec_multiplier < float("inf"):
        raise ConfigError("--timed-trace-sec-multiplier must be positive")


class _Prompts:
    """Makes requests of the wanted form out of random ids or given texts."""

    def __init__(self, form: PromptForm, vocab_size: int, tokenizer: Tokenizer | None, rng: Rng) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._rng = rng
        ids: Sequence[int] = range(vocab_size)
        if tokenizer is not None:
            ids = [token for token in ids if tokenizer.is_known(token) and token not in tokenizer.special_ids]
            if form != "ids":
                # Whole words come back as the tokens that they were; random bytes would merge and break.
                words = [token for token in ids if WORD.fullmatch(tokenizer.token_text(token))]
                ids = words if len(words) >= MIN_WORDS else ids
        self._ids = np.array(ids)

    def random_ids(self, count: int, rng: Rng | None = None) -> list[int]:
        ids: list[int] = (rng or self._rng).choice(self._ids, count).tolist()
        return ids

    def of_ids(self, ids: list[int], output_len: int, arrival: float | None = None) -> SampleRequest:
        if self._form == "ids":
            return SampleRequest(ids, None, len(ids), output_len, arrival)
        text, length = self._text_of(ids)
        return self._of_text(text, length, output_len, arrival)

    def of_text(self, text: str, output_len: int) -> SampleRequest:
        ids = self.encode(text)
        if self._form == "ids":
            return SampleRequest(ids, None, len(ids), output_len)
        return self._of_text(text, len(ids), output_len, None)

    def _of_text(self, text: str, length: int, output_len: int, arrival: float | None) -> SampleRequest:
        if self._form == "text":
            return SampleRequest(None, text, length, output_len, arrival)
        return SampleRequest(None, None, length, output_len, arrival, [{"role": "user", "content": text}])

    def encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special_tokens=False)

    def in_chat_template(self, text: str) -> str:
        """As one user message, where the receiver does not apply the template itself."""
        assert self._tokenizer is not None
        if self._form == "chat" or not self._tokenizer.has_chat_template:
            return text
        return self._tokenizer.render_chat([{"role": "user", "content": text}])

    def _text_of(self, ids: list[int]) -> tuple[str, int]:
        """A text of as many tokens as ``ids``, or nearly, and how many it has.

        Random ids need not be what their text encodes to; a few rounds of cutting and filling up make the length right.
        """
        assert self._tokenizer is not None
        wanted = len(ids)
        for _ in range(10):
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            ids = self.encode(text)
            length = len(ids)
            if length == wanted:
                break
            ids = ids[:wanted] if length > wanted else ids + self.random_ids(wanted - length)
        return text, length


# Generators


def _random(options: DatasetOptions, prompts: _Prompts, rng: Rng) -> Iterator[SampleRequest]:
    """Lengths uniform within the range ratio, after a prefix that all requests share."""
    inputs = _around(options.random_input_len, options)
    outputs = _around(options.random_output_len, options)
    prefix = prompts.random_ids(options.random_prefix_len)
    for _ in range(options.num_prompts):
        input_len, output_len = _uniform(rng, inputs), _uniform(rng, outputs)
        yield prompts.of_ids(prefix + prompts.random_ids(input_len), output_len)


def _around(length: int, options: DatasetOptions) -> tuple[int, int]:
    ratio = options.random_range_ratio
    return max(1, int(length * (1 - ratio))), max(1, int(np.ceil(length * (1 + ratio))))


def _uniform(rng: Rng, bounds: tuple[int, int]) -> int:
    return int(rng.integers(*bounds, endpoint=True))


def _nano(options: DatasetOptions, prompts: _Prompts, rng: Rng) -> Iterator[SampleRequest]:
    """The workload of nano-vllm's benchmark, with --num-prompts 256 and seed 0: prompts and answers uniform."""
    for _ in range(options.num_prompts):
        yield _generated(options, prompts, _uniform(rng, NANO_RANGE), _uniform(rng, NANO_RANGE))


def _anyscale_exp(options: DatasetOptions, prompts: _Prompts, rng: Rng) -> Iterator[SampleRequest]:
    """Prompts of one length and exponential answers under a cap, as in Anyscale's comparison of batching kinds."""
    for _ in range(options.num_prompts):
        drawn = int(np.ceil(rng.exponential(options.anyscale_mean_output_len)))
        output_len = min(max(1, drawn), options.anyscale_max_output_len)
        yield _generated(options, prompts, options.anyscale_input_len, output_len)


def _azure(options: DatasetOptions, prompts: _Prompts, rng: Rng) -> Iterator[SampleRequest]:
    for input_len, output_len in azure_lengths(options.dataset_name, options.num_prompts, rng):
        yield _generated(options, prompts, input_len, output_len)


def azure_lengths(name: str, count: int, rng: Rng) -> list[tuple[int, int]]:
    """Prompt and output tokens of ``count`` requests; name: azure-conv or azure-code."""
    drawn = [
        np.exp(np.interp(rng.random(count), AZURE_PROBABILITIES, np.log(quantiles)))
        for quantiles in AZURE_QUANTILES[name]
    ]
    return [(round(input_len), round(output_len)) for input_len, output_len in zip(*drawn, strict=True)]


def _generated(options: DatasetOptions, prompts: _Prompts, input_len: int, output_len: int) -> SampleRequest:
    input_len, output_len = _cut(options, input_len, output_len)
    return prompts.of_ids(prompts.random_ids(input_len), output_len)


def _cut(options: DatasetOptions, input_len: int, output_len: int) -> tuple[int, int]:
    limit = options.max_total_len
    if limit is None:
        return input_len, output_len
    output_len = min(output_len, limit - 1)
    return min(input_len, limit - output_len), output_len


def _prefix_repetition(options: DatasetOptions, prompts: _Prompts, rng: Rng) -> list[SampleRequest]:
    """Each prefix is shared by equally many requests, which come in random order."""
    if options.num_prompts < options.prefix_repetition_num_prefixes:
        raise ConfigError("--num-prompts must not be smaller than --prefix-repetition-num-prefixes")
    prefixes = [
        prompts.random_ids(options.prefix_repetition_prefix_len) for _ in range(options.prefix_repetition_num_prefixes)
    ]
    samples = [
        prompts.of_ids(
            prefixes[index % len(prefixes)] + prompts.random_ids(options.prefix_repetition_suffix_len),
            options.prefix_repetition_output_len,
        )
        for index in range(options.num_prompts)
    ]
    if not options.disable_shuffle:
        rng.shuffle(samples)
    return samples


# Files


def _sharegpt(options: DatasetOptions, prompts: _Prompts, rng: Rng) -> Iterator[SampleRequest]:
    """The first question and answer of each conversation; the answer tells how long ours shall be."""
    conversations = _read(options, _json_list)
    found = 0
    for index in _order(len(conversations), options, rng):
        entry = conversations[index]
        turns = entry.get("conversations") or entry.get("conversation") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            continue
        texts = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        if not isinstance(texts[0], str) or not isinstance(texts[1], str):
            continue
        input_len = len(prompts.encode(texts[0]))
        output_len = options.sharegpt_output_len or len(prompts.encode(texts[1]))
        if min(input_len, output_len if options.sharegpt_output_len is None else input_len) < SHAREGPT_MIN_TOKENS:
            continue
        if input_len > SHAREGPT_MAX_PROMPT or input_len + output_len > SHAREGPT_MAX_TOTAL:
            continue
        yield prompts.of_text(texts[0], output_len)
        found += 1
        if found == options.num_prompts:
            return


def _custom(options: DatasetOptions, prompts: _Prompts, rng: Rng) -> Iterator[SampleRequest]:
    """One object a line: `prompt`, and `output_tokens` where --custom-output-len is -1."""
    rows = _read(options, _json_lines)
    for index in _order(len(rows), options, rng)[: options.num_prompts]:
        row = rows[index]
        text, output_len = row.get("prompt"), options.custom_output_len
        if not isinstance(text, str):
            raise ConfigError(f"{options.dataset_path}: entry {index + 1} has no text `prompt`")
        if output_len == -1:
            output_len = int(_number(options, row, index, ("output_tokens",)))
        yield prompts.of_text(text if options.skip_chat_template else prompts.in_chat_template(text), output_len)


def _timed_trace(options: DatasetOptions, prompts: _Prompts, rng: Rng) -> Iterator[SampleRequest]:
    """The first --num-prompts rows of a CSV or JSONL trace, prompts random but of the lengths there.

    Rows with hash_ids (Mooncake) share what equal ids stand for: each id is --timed-trace-chunk-hash-size tokens.
    """
    rows = _read(options, _json_lines if options.dataset_path.endswith((".jsonl", ".json")) else _csv_rows)
    times = [_time(options, row, index) * options.timed_trace_sec_multiplier for index, row in enumerate(rows)]
    first = min(times, default=0.0)
    seed = int(rng.integers(2**32))
    blocks: dict[int, list[int]] = {}
    for index in sorted(range(len(rows)), key=times.__getitem__)[: options.num_prompts]:
        row = rows[index]
        lengths = [int(_number(options, row, index, names)) for names in (INPUT_COLUMNS, OUTPUT_COLUMNS)]
        if min(lengths) < 1:
            continue
        input_len, output_len = _cut(options, *lengths)
        ids: list[int] = []
        for block in row.get("hash_ids") or ():
            if block not in blocks:
                block_rng = np.random.default_rng([seed, int(block)])
                blocks[block] = prompts.random_ids(options.timed_trace_chunk_hash_size, block_rng)
            ids += blocks[block]
        ids = ids[:input_len]
        ids += prompts.random_ids(input_len - len(ids))
        yield prompts.of_ids(ids, output_len, times[index] - first)


def _order(count: int, options: DatasetOptions, rng: Rng) -> list[int]:
    return list(range(count)) if options.disable_shuffle else [int(index) for index in rng.permutation(count)]


def _read(options: DatasetOptions, parse: Callable[[Iterable[str]], list[Any]]) -> list[Any]:
    """Raises ConfigError for a file that is not there or not of the format."""
    path = Path(options.dataset_path)
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            return parse(lines)
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"--dataset-path {path} is not a {options.dataset_name} file: {error}") from None


def _json_list(lines: Iterable[str]) -> list[Any]:
    value = json.loads("".join(lines))
    if not isinstance(value, list):
        raise ValueError("expected a list of conversations")
    return value


def _json_lines(lines: Iterable[str]) -> list[Any]:
    rows = [json.loads(line) for line in lines if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("expected one JSON object a line")
    return rows


def _csv_rows(lines: Iterable[str]) -> list[Any]:
    return list(csv.DictReader(lines))


def _value(options: DatasetOptions, row: dict[str, Any], index: int, names: Iterable[str]) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ConfigError(f"{options.dataset_path}: entry {index + 1} has none of {', '.join(names)}")


def _number(options: DatasetOptions, row: dict[str, Any], index: int, names: Iterable[str]) -> float:
    value = _value(options, row, index, names)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{options.dataset_path}: entry {index + 1}: {value!r} is not a number") from None


def _time(options: DatasetOptions, row: dict[str, Any], index: int) -> float:
    """Seconds, or whatever the multiplier makes seconds of; Azure's own files have dates."""
    value = _value(options, row, index, TIME_COLUMNS)
    try:
        if isinstance(value, str) and "-" in value[1:]:
            return datetime.fromisoformat(value).replace(tzinfo=UTC).timestamp()
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{options.dataset_path}: entry {index + 1}: {value!r} is not a time") from None


_LOADERS: dict[str, Callable[[DatasetOptions, _Prompts, Rng], Iterable[SampleRequest]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "custom": _custom,
    "prefix_repetition": _prefix_repetition,
    "timed_trace": _timed_trace,
    "azure-conv": _azure,
    "azure-code": _azure,
    "anyscale-exp": _anyscale_exp,
    "nano": _nano,
}
