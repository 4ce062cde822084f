"""Grammars and bad words as masks: matchers that follow their rows, and what becomes of those that cannot."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import write_folder

from ropeway.constraint import RefusedGrammarError
from ropeway.engine.step import NewRow, SchedulerOutput
from ropeway.protocol import SamplingParams
from ropeway.vocabulary import Vocabulary
from ropeway.worker.constraints import Constraints, Grammars
from ropeway.worker.sampler import SamplingInputs, draw, report
from ropeway_kernels import cpu

JSON = (
    'start: %json {"type": "object", "required": ["ok"], "properties": {"ok": {"enum": [true, "no", 12]}}, '
    '"additionalProperties": false, "x-guidance": {"whitespace_pattern": "[ ]{1,3}"}}'
)
WORD = "start: /[ab]{1,3}/"
PADDED = 40  # ids of the model beyond the tokenizer's


@cache
def vocabulary(kind: str = "byte_level") -> Vocabulary:
    with tempfile.TemporaryDirectory() as folder:
        return Vocabulary.load(write_folder(kind, Path(folder)))


def num_ids(kind: str = "byte_level") -> int:
    return vocabulary(kind).size + PADDED


@pytest.fixture
def constraints() -> Iterator[Constraints]:
    grammars = Grammars(vocabulary, num_ids())
    made = Constraints(grammars, num_ids())
    yield made
    made.close()
    grammars.close()


def row(request_id: int, grammar: str = "", outputs: list[int] | None = None, **sampling: Any) -> NewRow:
    eos = vocabulary().eos_token_ids
    params = SamplingParams(max_tokens=50, grammar=grammar, eos_token_ids=eos, **sampling)
    return NewRow(request_id, 0, [1, 2, *(outputs or [])], 2, 0, [1], params)


def plan(*ids: int, **parts: Any) -> SchedulerOutput:
    return SchedulerOutput(0, list(ids), [0] * len(ids), samples=[True] * len(ids), **parts)


def allowed(constraints: Constraints, *ids: int) -> list[set[int]]:
    """Of each row, and nothing of a row without a mask."""
    masks = constraints.begin(plan(*ids), list(range(len(ids))))
    found: list[set[int]] = [set() for _ in ids]
    if masks is not None:
        masks.wait()
        assert not masks.errors
        for i, words in zip(masks.rows.tolist(), masks.bits, strict=True):
            found[i] = set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
    return found


def text(tokens: list[int]) -> bytes:
    return b"".join(map(vocabulary().token_bytes, tokens))


def follow(constraints: Constraints, request_id: int, choose: Callable[[list[int]], int]) -> tuple[list[int], bool]:
    """Tokens until the grammar is complete or an end token comes; and which of the two."""
    tokens: list[int] = []
    while True:
        token = choose(sorted(allowed(constraints, request_id)[0]))
        tokens.append(token)
        if constraints.take(request_id, 0, token):
            return tokens, True
        if token in vocabulary().eos_token_ids:
            return tokens, False


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_choice_among_the_allowed_ends_in_a_valid_value(data: st.DataObject) -> None:
    grammars = Grammars(vocabulary, num_ids())
    constraints = Constraints(grammars, num_ids())
    constraints.apply(plan(added=[row(1, JSON)]))
    tokens, completed = follow(constraints, 1, lambda ids: data.draw(st.sampled_from(ids)))
    assert completed, "an object ends with its brace, not with an end token"
    assert json.loads(text(tokens))["ok"] in (True, "no", 12)
    constraints.close()
    grammars.close()


def test_padding_and_special_tokens_are_never_allowed(constraints: Constraints) -> None:
    constraints.apply(plan(added=[row(1, "start: /(?s:.*)/")]))
    (ids,) = allowed(constraints, 1)
    eos = set(vocabulary().eos_token_ids)
    assert eos <= ids
    assert not (ids - eos) & vocabulary().special_ids
    assert max(ids) < vocabulary().size
    assert len(ids) > vocabulary().size / 2


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma", "unigram"])  # others put spaces around each word
def test_every_kind_of_tokenizer_says_exactly_what_is_allowed(kind: str) -> None:
    """By the bytes that each token adds to a text, whatever the tokenizer makes of the forced text."""
    words = vocabulary(kind)
    grammars = Grammars(lambda: words, num_ids(kind))
    constraints = Constraints(grammars, num_ids(kind))
    constraints.apply(plan(added=[row(1, 'start: "Hello" /[a-z .]{0,5}/')]))
    tokens: list[int] = []
    for _ in range(12):
        (ids,) = allowed(constraints, 1)
        ids -= set(words.eos_token_ids)
        if not ids:
            break
        tokens.append(min(ids, key=lambda id: (-len(words.token_bytes(id)), id)))
        if constraints.take(1, 0, tokens[-1]):
            break
    found = b"".join(words.token_bytes(id) for id in tokens)
    assert found.startswith(b"Hello")
    assert len(found) == 10
    constraints.close()
    grammars.close()


def test_a_row_that_comes_back_goes_on_where_it_was(constraints: Constraints) -> None:
    constraints.apply(plan(added=[row(1, JSON)]))
    tokens, _ = follow(constraints, 1, lambda ids: ids[-1])
    for cut in range(len(tokens)):
        constraints.apply(plan(removed=[1], added=[row(1, JSON, tokens[:cut])]))
        rest, completed = follow(constraints, 1, lambda ids: ids[-1])
        assert tokens[:cut] + rest == tokens
        assert completed


def test_rows_do_not_see_each_other(constraints: Constraints) -> None:
    """Copies of one compiled grammar, at different places; and rows without any between them."""
    constraints.apply(plan(added=[row(1, WORD), row(2), row(3, WORD), row(4, JSON)]))
    start = allowed(constraints, 1)[0]
    a = vocabulary().backend.token_to_id("a")
    assert not constraints.take(1, 0, a)
    first, none, third, fourth = allowed(constraints, 1, 2, 3, 4)
    assert none == set()
    assert third == start
    assert first == (start | set(vocabulary().eos_token_ids)) - {
        id for id in start if len(vocabulary().token_bytes(id)) > 2
    }
    assert fourth == {id for id in fourth if text([id]).startswith(b"{")}
    assert not constraints.take(1, 0, a)
    assert constraints.take(1, 0, a), "three letters, and nothing may follow"


def test_results_of_another_epoch_change_nothing(constraints: Constraints) -> None:
    constraints.apply(plan(added=[row(1, WORD)]))
    before = allowed(constraints, 1)
    assert not constraints.take(1, 5, vocabulary().backend.token_to_id("a"))
    assert not constraints.take(99, 0, 3)
    assert allowed(constraints, 1) == before
    constraints.apply(plan(removed=[1]))
    assert not constraints
    assert constraints.begin(plan(1), [0]) is None


def test_min_tokens_forbids_ends_only_where_the_grammar_leaves_a_choice(constraints: Constraints) -> None:
    a = vocabulary().backend.token_to_id("a")
    eos = set(vocabulary().eos_token_ids)
    constraints.apply(plan(added=[row(1, WORD, min_tokens=9), row(2, 'start: "a" /a?/', min_tokens=9)]))
    constraints.take(1, 0, a)
    assert not allowed(constraints, 1)[0] & eos
    constraints.take(2, 0, a)
    assert not allowed(constraints, 2)[0] & eos
    assert constraints.take(2, 0, a), "complete, long before min_tokens"


def test_bad_words_are_never_completed(constraints: Constraints) -> None:
    constraints.apply(plan(added=[row(1, bad_words=((5, 6, 7), (6, 9))), row(2, WORD, bad_words=((5, 6),))]))
    everything = set(range(num_ids()))
    for token, banned in ((5, set()), (6, {7, 9}), (6, {9}), (5, set())):
        constraints.take(1, 0, token)
        assert everything - allowed(constraints, 1)[0] == banned
    constraints.apply(plan(removed=[1], added=[row(1, outputs=[5, 6], bad_words=((5, 6, 7),))]))
    assert everything - allowed(constraints, 1)[0] == {7}


def test_a_grammar_that_gets_too_complex_ends_its_row_alone(constraints: Constraints) -> None:
    constraints.apply(plan(added=[row(1, WORD), row(2, WORD)]))
    zero = vocabulary().backend.token_to_id("0")
    constraints.take(1, 0, zero)  # as if it had been allowed
    masks = constraints.begin(plan(1, 2), [0, 1])
    assert masks is not None
    masks.wait()
    assert set(masks.errors) == {0}
    assert "grammar" in masks.errors[0]
    assert not masks.bits[0].any()
    assert masks.bits[1].any()


def test_compiling_tells_why_it_cannot(constraints: Constraints) -> None:
    answers: list[str] = []
    done = threading.Event()

    def tell(problem: str) -> None:
        answers.append(problem)
        if len(answers) == 3:
            done.set()

    for source in (WORD, "start: x", WORD):
        constraints._grammars.compile(source, tell)
    assert done.wait(30)
    assert answers[0] == answers[2] == ""
    assert "x" in answers[1]
    with pytest.raises(RefusedGrammarError):
        constraints._grammars.matcher("start: x")


# The sampler's part


def bits_of(rows: list[set[int]], vocab: int) -> torch.Tensor:
    flags = np.zeros((len(rows), -(-vocab // 32) * 32), dtype=np.uint8)
    for line, ids in enumerate(rows):
        flags[line, sorted(ids)] = 1
    return torch.from_numpy(np.packbits(flags, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("native", [None, "native"])
@pytest.mark.parametrize("vocab", [31, 64, 151])
def test_o52_masks_with_every_other_parameter_in_one_batch(vocab: int, native: Any) -> None:
    """Each row's token is that of the row alone, one allowed token is taken, a row without any is an error."""
    kernels = cpu.load() if native else None
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, vocab, generator=generator) * 4
    logits[4, 3] = float("nan")
    masks = {0: {1, 7, 20}, 2: {5}, 3: set(), 4: {3, 4}, 5: set(range(vocab))}
    keys = torch.arange(12, dtype=torch.int32).view(6, 2)

    def inputs(rows: list[int]) -> SamplingInputs:
        places = [(place, row) for place, row in enumerate(rows) if row in masks]
        random = [(place, row) for place, row in enumerate(rows) if row != 0]
        return SamplingInputs(
            num_rows=len(rows),
            random_rows=torch.tensor([place for place, _ in random]) if random else None,
            temperature=torch.full((len(random), 1), 0.7),
            noise_keys=keys[[row for _, row in random]],
            masks=(torch.tensor([place for place, _ in places]), bits_of([masks[row] for _, row in places], vocab))
            if places
            else None,
            logprobs=[(place, 3) for place in range(len(rows))],
        )

    together = report(draw(logits.clone(), inputs(list(range(6))), kernels), inputs(list(range(6))))
    for row_index in range(6):
        alone = report(draw(logits[[row_index]].clone(), inputs([row_index]), kernels), inputs([row_index]))
        assert (row_index in together.errors) == (0 in alone.errors)
        assert together.token_ids[row_index] == alone.token_ids[0]
    assert set(together.errors) == {3, 4}
    assert "masked" in together.errors[3]
    assert together.token_ids[2] == 5
    assert int(together.token_ids[0]) == max(masks[0], key=lambda id: float(logits[0, id]))
    # Log-probabilities are those of the raw distribution, and finite.
    raw = logits.log_softmax(-1)
    assert together.logprobs[2].logprob == pytest.approx(float(raw[2, 5]), rel=1e-4)
    assert together.logprobs[2].top_ids[0] == int(logits[2].argmax())


def test_what_is_kept_of_compiled_grammars_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ropeway.worker.constraints.MAX_COMPILED", 3)
    monkeypatch.setattr("ropeway.worker.constraints.MAX_COMPILED_CHARS", 100)
    grammars = Grammars(vocabulary, num_ids())
    for letter in "abcda":
        grammars.matcher(f"start: /{letter}/")
    assert list(grammars._compiled) == ["start: /c/", "start: /d/", "start: /a/"]
    long = f'start: "{"x" * 90}"'
    grammars.matcher(long)
    assert list(grammars._compiled) == [long]
    assert grammars._num_chars == len(long)
    grammars.close()
