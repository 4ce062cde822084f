"""RequestStream: text, stop strings, counts and reasons, against a simple oracle on the whole text."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import KINDS, small_tokenizer

from ropeway.engine.client import TokenDelta
from ropeway.protocol import FinishReason, TokenLogprobs
from ropeway.server.detokenizer import make_detokenizer
from ropeway.server.stream import FINISH_WORDS, RequestStream, TextDelta
from ropeway.server.tokenizer import Tokenizer

QUICK = settings(max_examples=400, deadline=None)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(-1.0, 1, [token_id], [-1.0])


def run(
    tokenizer: Tokenizer,
    ids: list[int],
    finish: FinishReason | None = FinishReason.LENGTH,
    *,
    sizes: tuple[int, ...] = (1,),
    stop_reason: int | None = None,
    **options: Any,
) -> tuple[RequestStream, list[TextDelta]]:
    """Feed ``ids`` in deltas of these sizes, in turn; the reason comes with the last. Unless told otherwise, the token of
    a STOP is the model's end token."""
    if finish is FinishReason.STOP and stop_reason is None:
        options.setdefault("eos_token_ids", tuple(ids[-1:]))
    stream = RequestStream(tokenizer, prompt_token_ids=options.pop("prompt_token_ids", [5]), **options)
    deltas = []
    at = index = 0
    while at < len(ids) or index == 0:
        part = ids[at : at + sizes[index % len(sizes)]]
        at, index = at + len(part), index + 1
        delta = TokenDelta(part, logprobs=[logprob(id) for id in part])
        if at >= len(ids):
            delta.finish_reason, delta.stop_reason = finish, stop_reason
        deltas.append(stream.feed(delta, float(index)))
    return stream, deltas


@dataclass
class Result:
    text: str
    reason: str | None
    stop_reason: int | str | None
    num_tokens: int


def result(stream: RequestStream, deltas: list[TextDelta]) -> Result:
    """The whole of a stream, with what must hold for any."""
    ended = [delta for delta in deltas if delta.finish_reason is not None]
    assert len(ended) <= 1
    assert stream.finished == bool(ended)
    reason, stop_reason = (ended[0].finish_reason, ended[0].stop_reason) if ended else (None, None)
    if ended:
        for delta in deltas[deltas.index(ended[0]) + 1 :]:
            assert delta == TextDelta()
    for delta in deltas:
        entries = delta.logprobs or []
        assert len(entries) == len(delta.token_texts)
        assert [entry.top_ids[0] for entry in entries] == delta.token_ids[: len(entries)]
        assert len(delta.token_ids) - len(entries) <= (1 if delta is (ended or [None])[0] else 0)
    assert stream.num_output_tokens == sum(len(delta.token_ids) for delta in deltas)
    return Result("".join(delta.text for delta in deltas), reason, stop_reason, stream.num_output_tokens)


def play(tokenizer: Tokenizer, ids: list[int], finish: FinishReason | None = FinishReason.LENGTH, **options) -> Result:
    return result(*run(tokenizer, ids, finish, **options))


def oracle(
    tokenizer: Tokenizer,
    ids: list[int],
    finish: FinishReason,
    *,
    stop: list[str] = [],  # noqa: B006
    include_stop_str_in_output: bool = False,
    min_tokens: int = 0,
    skip_special_tokens: bool = True,
    prompt_token_ids: list[int] = [5],  # noqa: B006
) -> Result:
    """Look at the whole text: which stop string is complete first, and with which token."""
    hidden = {tokenizer.token_id(text): text for text in stop} if skip_special_tokens else {}
    special = next(
        (i for i, id in enumerate(ids) if id in hidden and id in tokenizer.special_ids and i + 1 >= min_tokens), None
    )
    end = len(ids) if special is None else special
    shown = ids[:end]
    if special is None and finish is FinishReason.STOP:
        shown = ids[:-1]
    detokenizer = make_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
    lengths = [0]  # of the text after so many tokens
    text = ""
    for id in shown:
        text += detokenizer.push(id)
        lengths.append(len(text))
    text += detokenizer.flush()
    num_tokens = min(end + 1, len(ids))
    if num_tokens > len(shown):
        lengths.append(len(text))
    else:
        lengths[-1] = len(text)
    found = []
    for word in set(stop) - {""}:
        for start in range(len(text)):
            if text.startswith(word, start):
                count = next(count for count, length in enumerate(lengths) if length >= start + len(word))
                if count >= min_tokens:
                    found.append((start + len(word), start, word, count))
    if found:
        stop_end, start, word, count = min(found)
        return Result(text[: stop_end if include_stop_str_in_output else start], "stop", word, count)
    if special is not None:
        word = hidden[ids[special]]
        return Result(text + (word if include_stop_str_in_output else ""), "stop", word, special + 1)
    return Result(text, FINISH_WORDS[finish], None, len(ids))


@functools.cache
def alphabet() -> Tokenizer:
    """One token for each of a, b, c and for some words of them, besides the ends."""
    import tokenizers
    from tokenizers import decoders, models

    from ropeway.server.chat_template import ChatTemplate

    words = ["<e>", "<x>", "a", "b", "c", "ab", "ba", "aab", "abc", "cab", "bbc"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<e>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<e>", "<x>"])
    return Tokenizer(backend, {"eos_token": "<e>"}, [], ChatTemplate({}, {}))


STOP_WORDS = st.text("abc", min_size=1, max_size=5) | st.sampled_from(["<x>", "<e>", "zz"])


@settings(max_examples=800, deadline=None)
@given(
    ids=st.lists(st.integers(1, 10), min_size=1, max_size=14),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    stop=st.lists(STOP_WORDS, max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
    skip=st.booleans(),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
@example([2, 3, 4], [3], ["bc", "abc"], False, 0, True, FinishReason.LENGTH)
@example([8, 3], [1], ["bb", "aa"], False, 2, True, FinishReason.LENGTH)
@example([2, 2, 2], [1], ["aa"], False, 3, True, FinishReason.LENGTH)
def test_stop_strings_equal_the_oracle(ids, sizes, stop, include, min_tokens, skip, finish) -> None:
    tokenizer = alphabet()
    options = {
        "stop": stop,
        "include_stop_str_in_output": include,
        "min_tokens": min_tokens,
        "skip_special_tokens": skip,
        "eos_token_ids": tokenizer.eos_token_ids,
    }
    if finish is FinishReason.STOP:
        ids = [*ids, 0]
    found = play(tokenizer, ids, finish, sizes=tuple(sizes), **options)
    options.pop("eos_token_ids")
    assert found == oracle(tokenizer, ids, finish, **options)
    if found.reason == "stop" and found.stop_reason in stop and not include and min_tokens == 0:
        assert not any(word in found.text for word in stop)


@pytest.mark.parametrize("kind", [*KINDS, pytest.param("demo", marks=pytest.mark.real_model)])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_split_of_any_tokens_gives_the_same(kind: str, data: st.DataObject) -> None:
    if kind == "demo":
        from ropeway.hub import resolve_model

        tokenizer = _load(resolve_model(""))
    else:
        tokenizer = small_tokenizer(kind)
    vocabulary = st.integers(0, min(tokenizer.vocab_size, 300) - 1) | st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(vocabulary, min_size=1, max_size=25))
    text = tokenizer.decode(ids, False)
    # Stop strings that are in the text, or begin in it.
    cuts = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6), st.sampled_from(["", "ZZ"]))
    stop = [text[at : at + size] + tail for at, size, tail in data.draw(st.lists(cuts, max_size=3))]
    options: dict[str, Any] = {
        "stop": stop,
        "include_stop_str_in_output": data.draw(st.booleans()),
        "min_tokens": data.draw(st.integers(0, 10)),
        "skip_special_tokens": data.draw(st.booleans()),
        "prompt_token_ids": data.draw(st.lists(vocabulary, max_size=3)),
    }
    finish = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    expected = oracle(tokenizer, ids, finish, **options)
    for sizes in ((1,), (len(ids),), tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))):
        assert play(tokenizer, ids, finish, sizes=sizes, **options) == expected


@functools.cache
def _load(folder) -> Tokenizer:
    return Tokenizer.load(folder)


@QUICK
@given(
    st.lists(st.integers(1, 10), max_size=14),
    st.lists(STOP_WORDS, min_size=1, max_size=3),
    st.sampled_from([0, 99]),
)
def test_nothing_is_sent_that_a_stop_string_would_take_back(ids: list[int], stop: list[str], min_tokens: int) -> None:
    """After each token, what was sent is a beginning of the answer whatever comes next, and all but a true beginning of
    a stop string was sent."""
    tokenizer = alphabet()
    stream, deltas = run(tokenizer, ids, None, stop=stop, min_tokens=min_tokens)
    if stream.finished:
        return
    sent = "".join(delta.text for delta in deltas)
    text = tokenizer.decode(ids)
    assert text.startswith(sent)
    held = text[len(sent) :]
    assert held == "" or any(word.startswith(held) and word != held for word in stop)
    longer = [
        end for end in range(len(sent)) if any(word.startswith(text[end:]) and word != text[end:] for word in stop)
    ]
    assert longer == []


# The cases that users reported


@pytest.mark.parametrize(("stop", "text", "tokens"), [("brown brown brown", " ", 3), ("own brown b", " br", 3)])
def test_beginning_of_a_stop_string_is_never_sent(stop: str, text: str, tokens: int) -> None:
    tokenizer = small_tokenizer("byte_level")
    word = ids_of(tokenizer, " brown")
    stream, deltas = run(tokenizer, word * 20, stop=[stop])
    assert "".join(delta.text for delta in deltas) == text
    assert (stream.finished, stream.num_output_tokens) == (True, (tokens - 1) * len(word) + _needed(tokenizer, stop))


def _needed(tokenizer: Tokenizer, stop: str) -> int:
    """Tokens of the last " brown" that complete the stop string."""
    rest = " brown" if stop.endswith(" brown") else " b"
    text = ""
    for count, id in enumerate(ids_of(tokenizer, " brown"), 1):
        text += tokenizer.decode([id])
        if text.startswith(rest):
            return count
    raise AssertionError


@pytest.mark.real_model
def test_reported_cases_with_the_demo_model() -> None:
    from ropeway.hub import resolve_model

    tokenizer = _load(resolve_model(""))
    brown, repo_name = 6354, 3
    for stop, text in (("brown brown brown", " "), ("own brown b", " br")):
        found = play(tokenizer, [brown] * 20, stop=[stop])
        assert found == Result(text, "stop", stop, 3)
    assert play(tokenizer, [brown] * 2, stop=["brown brown"]) == Result(" ", "stop", "brown brown", 2)
    assert play(tokenizer, [brown] * 3, stop=["brown brown brown brown zebra"]).text == " brown brown brown"
    assert play(tokenizer, [repo_name] * 30, stop=["<repo_name>"]) == Result("", "stop", "<repo_name>", 1)
    assert play(tokenizer, [2] * 30, stop=["<|im_end|>"]) == Result("", "stop", "<|im_end|>", 1)
    assert play(tokenizer, [10813] * 3).text == "\ufffd" * 3


def test_stop_string_that_is_a_special_token() -> None:
    tokenizer = small_tokenizer("byte_level")
    end = tokenizer.token_id("<|im_end|>")
    ids = ids_of(tokenizer, "fox") + [end] * 30
    count = len(ids) - 29
    for skip in (True, False):
        options = {"stop": ["<|im_end|>"], "skip_special_tokens": skip}
        assert play(tokenizer, ids, **options) == Result("fox", "stop", "<|im_end|>", count)
        shown = play(tokenizer, ids, include_stop_str_in_output=True, **options)
        assert shown == Result("fox<|im_end|>", "stop", "<|im_end|>", count)
    # Also when the engine ends there by itself.
    ended = play(tokenizer, ids[:count], FinishReason.STOP, stop=["<|im_end|>"], eos_token_ids=(end,))
    assert ended == Result("fox", "stop", "<|im_end|>", count)
    # Spelled by ordinary tokens it is a stop string as any other.
    spelled = [tokenizer.encode(letter)[0] for letter in "fox<|im_end|>zz"]
    assert play(tokenizer, spelled, stop=["<|im_end|>"]).text == "fox"


def test_stop_that_completes_on_the_token_limit() -> None:
    tokenizer = alphabet()
    assert play(tokenizer, [2, 3], FinishReason.LENGTH, stop=["ab"]) == Result("", "stop", "ab", 2)
    assert play(tokenizer, [2, 0], FinishReason.STOP, stop=["ab"]) == Result("a", "stop", None, 2)
    assert play(tokenizer, [2, 2], FinishReason.LENGTH, stop=["ab"]) == Result("aa", "length", None, 2)


def test_tokens_after_the_stop_are_not_reported() -> None:
    stream, deltas = run(alphabet(), [2, 3, 4, 4, 4], sizes=(5,), stop=["bc"])
    assert deltas[0].token_ids == [2, 3, 4]
    assert len(deltas[0].logprobs) == 3
    assert result(stream, deltas) == Result("a", "stop", "bc", 3)


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR])
def test_held_back_text_is_given_out_at_the_end(finish: FinishReason) -> None:
    ids = [2, 3, *([0] if finish is FinishReason.STOP else [])]
    stream, deltas = run(alphabet(), ids, finish, stop=["abz", "baz"])
    assert deltas[0].text == ""
    assert result(stream, deltas) == Result("ab", FINISH_WORDS[finish], None, len(ids))


def test_unfinished_characters_are_given_out_at_the_end() -> None:
    tokenizer = small_tokenizer("byte_level")
    face = ids_of(tokenizer, "😁")[:-1]
    assert play(tokenizer, face) == Result("\ufffd", "length", None, len(face))
    assert play(tokenizer, face, stop=["\ufffd"]) == Result("", "stop", "\ufffd", len(face))
    assert play(tokenizer, face, FinishReason.ERROR, stop=["\ufffd"]).reason == "error"
    end = tokenizer.eos_token_ids
    assert play(tokenizer, [*face, *end], FinishReason.STOP, eos_token_ids=end).text == "\ufffd"


def test_end_of_sequence_is_counted_and_never_shown() -> None:
    tokenizer = alphabet()
    for skip in (True, False):
        for include in (True, False):
            stream, deltas = run(
                tokenizer,
                [2, 0],
                FinishReason.STOP,
                skip_special_tokens=skip,
                include_stop_str_in_output=include,
                eos_token_ids=(0,),
            )
            assert result(stream, deltas) == Result("a", "stop", None, 2)
            assert deltas[-1].token_ids == [0]
            assert deltas[-1].logprobs == []
    # With ignore_eos it is a token like others.
    assert play(tokenizer, [2, 0, 3], skip_special_tokens=False, eos_token_ids=(0,)).text == "a<e>b"


def test_the_token_that_completes_a_grammar_is_shown() -> None:
    stream, deltas = run(alphabet(), [2, 3], FinishReason.STOP, eos_token_ids=(0,), stop=["xyz"])
    assert result(stream, deltas) == Result("ab", "stop", None, 2)
    assert [len(delta.logprobs or []) for delta in deltas] == [1, 1]


def test_stop_token_of_the_client() -> None:
    tokenizer = alphabet()
    stream, deltas = run(tokenizer, [2, 3], FinishReason.STOP, stop_reason=3)
    assert result(stream, deltas) == Result("a", "stop", 3, 2)
    assert [len(delta.logprobs) for delta in deltas] == [1, 0]
    options = {"stop_reason": 3, "include_stop_str_in_output": True}
    shown = run(tokenizer, [2, 3], FinishReason.STOP, **options)
    assert result(*shown) == Result("ab", "stop", 3, 2)
    assert [len(delta.logprobs) for delta in shown[1]] == [1, 1]
    # One that is also the model's own end token stays hidden.
    assert play(tokenizer, [2, 3], FinishReason.STOP, eos_token_ids=(3,), **options) == Result("a", "stop", 3, 2)


def test_a_stop_string_before_the_end_token_wins() -> None:
    tokenizer = alphabet()
    found = play(tokenizer, [2, 3, 4, 0], FinishReason.STOP, sizes=(4,), stop=["ab"])
    assert found == Result("", "stop", "ab", 2)


def test_stop_string_is_not_honoured_before_min_tokens() -> None:
    tokenizer = alphabet()
    ids = [2] * 12
    for min_tokens, count in ((0, 1), (1, 1), (6, 6), (13, 12)):
        for sizes in ((1,), (12,)):
            found = play(tokenizer, ids, stop=["a"], min_tokens=min_tokens, sizes=sizes)
            reason = ("stop", "a") if count < 12 else ("length", None)
            assert (found.reason, found.stop_reason, found.num_tokens) == (*reason, count)
            assert found.text == "a" * (count - (count < 12))


def test_delta_without_tokens() -> None:
    tokenizer = alphabet()
    assert play(tokenizer, [], FinishReason.ABORT) == Result("", "abort", None, 0)
    stream = RequestStream(tokenizer, prompt_token_ids=[2, 3])
    delta = stream.feed(TokenDelta([], FinishReason.ERROR, error="logits were NaN"), 1.0)
    assert (delta.finish_reason, delta.error) == ("error", "logits were NaN")
    assert stream.feed(TokenDelta([2], FinishReason.LENGTH), 2.0) == TextDelta()
    assert (stream.num_output_tokens, stream.first_token_time) == (0, None)


def test_counts_and_times() -> None:
    stream = RequestStream(alphabet(), prompt_token_ids=[2, 3, 4])
    stream.feed(TokenDelta([], first_scheduled=0.5, num_cached_tokens=2), 1.0)
    assert stream.first_token_time is None
    stream.feed(TokenDelta([2]), 2.0)
    delta = stream.feed(TokenDelta([3, 5]), 3.0)
    assert delta == TextDelta("bab", [3, 5])
    assert (stream.num_prompt_tokens, stream.num_output_tokens, stream.num_cached_tokens) == (3, 3, 2)
    assert (stream.first_scheduled, stream.first_token_time, stream.last_token_time) == (0.5, 2.0, 3.0)
    assert not stream.finished
    delta = stream.feed(TokenDelta([3, 5], logprobs=[logprob(3), logprob(5)]), 4.0)
    assert (delta.text, delta.token_texts) == ("bab", ["b", "ab"])


def test_empty_and_repeated_stop_strings() -> None:
    assert play(alphabet(), [2, 3], stop=["", "b", "b"]) == Result("a", "stop", "b", 2)
    assert play(alphabet(), [2, 3], stop=[""]) == Result("ab", "length", None, 2)
