"""Constrained rows in the real runner and scheduler: with free neighbours, preempted, on a device that runs ahead."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tokenizers
from test_runner_ahead import Ahead, Plain, decoder, one_thread, serve  # noqa: F401

from fake_device import Order
from ropeway.model.decoder import Decoder
from ropeway.vocabulary import Vocabulary
from ropeway.worker.constraints import Constraints, Grammars

VOCAB = 120
SCHEMA = {
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yz", None]}},
    "x-guidance": {"whitespace_pattern": "[ ]{1,2}"},
}  # fmt: skip
JSON = f"start: %json {json.dumps(SCHEMA)}"


@cache
def vocabulary() -> Vocabulary:
    """One token per printable ASCII character, then an end token; the model has some ids more."""
    letters = ["Ġ", *map(chr, range(0x21, 0x7F))]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<e>"])
    return Vocabulary(backend, {"eos_token": "<e>"}, [])


def constrained(executor: Any) -> Any:
    """The executor, with what LocalExecutor has beside its runner."""
    grammars = Grammars(vocabulary, VOCAB)
    executor.runner.constraints = Constraints(grammars, VOCAB)

    def compile(grammar: str, done: Callable[[str], None]) -> None:
        grammars.matcher(grammar)
        done("")

    executor.compile = compile
    return executor


def prompt(start: int, length: int) -> list[int]:
    return [(start + 3 * i) % 95 for i in range(length)]


EOS = {"eos_token_ids": vocabulary().eos_token_ids}
FREE: list[tuple[list[int], dict[str, Any]]] = [
    (prompt(5, 6), {}),
    (prompt(9, 17), {"temperature": 1.0, "seed": 4}),
    (prompt(2, 3), {"temperature": 0.9, "seed": 9, "top_k": 9}),
]
BOUND: list[tuple[list[int], dict[str, Any]]] = [
    (prompt(7, 9), {"grammar": JSON, "max_tokens": 45, **EOS}),
    (prompt(11, 5), {"grammar": JSON, "max_tokens": 45, "temperature": 1.0, "seed": 3, **EOS}),
    (prompt(3, 12), {"grammar": "start: /[a-f]{4,20}/", "max_tokens": 30, "temperature": 1.2, "seed": 5, **EOS}),
    (prompt(8, 4), {"bad_words": ((40, 41), (7, 7)), "temperature": 1.5, "seed": 8, "max_tokens": 20}),
    (prompt(6, 4), {"grammar": "start: /[g-i]{6}/", "max_tokens": 30, "min_tokens": 20, "ignore_eos": True, **EOS}),
]
MIXED = [request for pair in zip(BOUND, [*FREE, FREE[0], FREE[1]], strict=True) for request in pair]


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> list[list[int]]:  # noqa: F811
    return [serve(constrained(Plain(decoder)), [request], overlap=False, caching=False)[0][0] for request in MIXED]


def test_what_a_row_alone_generates(decoder: Decoder, expected: list[list[int]]) -> None:  # noqa: F811
    texts = ["".join(vocabulary().token_bytes(t).decode() for t in tokens) for tokens in expected]
    for text in (texts[0], texts[2]):
        value = json.loads(text)
        assert 0 <= value["a"] <= 99
        assert value["b"] in ("x", "yz", None)
    assert 4 <= len(texts[4].removesuffix("<e>")) <= 20
    assert set(texts[4].removesuffix("<e>")) <= set("abcdef")
    assert not any(pair == (40, 41) or pair == (7, 7) for pair in zip(expected[6], expected[6][1:], strict=False))
    assert len(texts[8]) == 6, "the grammar ends before min_tokens"
    for bound, free in zip(expected[1::2], [*FREE, FREE[0], FREE[1]], strict=True):
        assert bound == serve(Plain(decoder), [free], overlap=False, caching=False)[0][0]


@pytest.mark.parametrize(
    ("order", "overlap", "num_blocks"),
    [("late", True, 60), ("late", False, 60), ("random", True, 60), ("late", True, 16), ("random", False, 16)],
)
def test_rows_together_equal_rows_alone(
    decoder: Decoder,  # noqa: F811
    expected: list[list[int]],
    order: Order,
    overlap: bool,
    num_blocks: int,
) -> None:
    executor = constrained(Ahead(decoder, order, num_blocks=num_blocks))
    tokens, preemptions = serve(executor, MIXED, overlap=overlap)
    assert tokens == expected
    assert (preemptions > 0) is (num_blocks == 16)
