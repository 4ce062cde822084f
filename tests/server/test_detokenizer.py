"""The incremental detokeniser against whole decodes, for every kind of tokenizer and any ids."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from small_tokenizers import BYTE_TOKENS, KINDS, TEXTS, small_tokenizer

from ropeway.server.detokenizer import CleaningDetokenizer, make_detokenizer
from ropeway.server.tokenizer import Tokenizer, clean_up

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@functools.cache
def load(kind: str) -> Tokenizer:
    if kind != "demo":
        return small_tokenizer(kind)
    from ropeway.hub import resolve_model

    return Tokenizer.load(resolve_model(""))


def pieces(tokenizer: Tokenizer, ids: Sequence[int], skip: bool, prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push(id) for id in ids), detokenizer.flush()]


ALL_KINDS = [*KINDS, pytest.param("demo", marks=pytest.mark.real_model)]


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_texts_come_back_whole(kind: str, skip: bool) -> None:
    tokenizer = load(kind)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        found = pieces(tokenizer, ids, skip)
        assert "".join(found) == tokenizer.decode(ids, skip)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in found)


@pytest.mark.parametrize("kind", ALL_KINDS)
@QUICK
@given(data=st.data())
def test_any_ids_join_to_the_whole_decode(kind: str, data: st.DataObject) -> None:
    tokenizer = load(kind)
    # Half from the vocabulary's beginning, where bytes and special tokens are; some ids beyond its end.
    few = st.integers(0, min(tokenizer.vocab_size, 300) - 1)
    ids = data.draw(st.lists(few | st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip)
    found = pieces(tokenizer, ids, skip)
    assert "".join(found) == whole
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = make_detokenizer(tokenizer, (), skip)
    assert [detokenizer.extend(part) for part in (ids[:cut], ids[cut:], ())] == [
        "".join(found[:cut]),
        "".join(found[cut:-1]),
        "",
    ]
    sent = ""
    for piece in found:  # in particular, U+FFFD is sent only where the whole has it
        sent += piece
        assert whole.startswith(sent)


@QUICK
@given(
    st.lists(st.sampled_from([*BYTE_TOKENS[0x80:0xC5], *BYTE_TOKENS[0xE0:], "a", "▁", "</s>", "<0x41>"]), max_size=30)
)
@example(["<0xF0>", "<0x9F>", "</s>", "<0x98>", "<0x80>"])  # a skipped token inside a character
@example(["<0xC3>", "<0xA9>", "<0xFF>"])  # one bad byte spoils the run
def test_runs_of_byte_tokens(tokens: list[str]) -> None:
    for kind in ("llama2", "gemma"):
        tokenizer = load(kind)
        ids = [id for token in tokens if (id := tokenizer.token_id(token)) is not None]
        for skip in (True, False):
            assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@QUICK
@given(st.binary(max_size=40), st.booleans())
def test_any_bytes_are_replaced_as_in_the_whole_decode(data: bytes, split_at_special: bool) -> None:
    tokenizer = load("byte_level")
    by_byte = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
    ids = [by_byte[bytes([byte])] for byte in data]
    if split_at_special:
        ids.insert(len(ids) // 2, tokenizer.eos_token_ids[0])
    assert "".join(pieces(tokenizer, ids, True)) == tokenizer.decode(ids, True) == data.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", ALL_KINDS)
@QUICK
@given(data=st.data())
def test_after_a_prompt_the_text_is_what_the_output_adds(kind: str, data: st.DataObject) -> None:
    tokenizer = load(kind)
    text = data.draw(st.sampled_from([text for text in TEXTS if text.strip() and "\ufffd" not in text]))
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:cut], ids[cut:]
    skip = data.draw(st.booleans())
    found = "".join(pieces(tokenizer, output, skip, prompt))
    if tokenizer.cleans_up_spaces:  # spaces are cleaned up in the output alone
        raw = tokenizer.raw_decode(ids, skip)[len(tokenizer.raw_decode(prompt, skip)) :]
        assert found == clean_up(raw)
        return
    before = tokenizer.decode(prompt, skip)
    whole = tokenizer.decode(ids, skip)
    if whole.startswith(before):  # the prompt does not end inside a character
        assert found == whole[len(before) :]
    elif tokenizer.is_byte_level:  # then the output is decoded by itself
        assert found == tokenizer.decode(output, skip)


def test_leading_space_of_the_output_is_kept() -> None:
    tokenizer = load("llama2")
    prompt = tokenizer.encode("Hello.")
    ids = tokenizer.encode("It is fine.\n  indented  twice", add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids, True, prompt)) == " It is fine.\n  indented  twice"
    assert "".join(pieces(tokenizer, ids, True)) == "It is fine.\n  indented  twice"
    # Neither special tokens nor bytes before it change that.
    after_special = [*prompt, tokenizer.token_id("</s>")]
    assert "".join(pieces(tokenizer, ids, True, after_special)).startswith(" It")
    after_bytes = [*prompt, tokenizer.token_id("<0xF0>"), tokenizer.token_id("<0x9F>")]
    assert "".join(pieces(tokenizer, ids, True, after_bytes)).startswith(" It")


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    for kind in ("byte_level", "llama2", "gemma"):
        tokenizer = load(kind)
        ids = tokenizer.encode("The quick brown fox 1 + 2", add_special_tokens=False)
        assert all(pieces(tokenizer, ids, True)[1:-1])
    tokenizer = load("byte_level")
    found = pieces(tokenizer, tokenizer.encode("😀x"), True)
    assert [piece for piece in found if piece] == ["😀", "x"]
    assert found[0] == ""


WORDS = st.lists(st.sampled_from([" ", "  ", "'", "n", "n't", "t", "s", "'s", "'ve", "re", ".", "?", ",", "!", "é"]))


class _Scripted:
    """A detokeniser whose token i has text i."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def push(self, token_id: int) -> str:
        return self.texts[token_id]

    def flush(self) -> str:
        return ""


@settings(max_examples=600, deadline=None)
@given(WORDS)
@example(["n", " ' ", "t"])
@example(["n", " '", " ", "t"])
@example([" n", " ' ", "t"])
@example(["'", " '", " s"])
def test_cleaning_in_parts_is_cleaning_the_whole(words: list[str]) -> None:
    cleaning = CleaningDetokenizer(_Scripted(words))
    found = [*(cleaning.push(index) for index in range(len(words))), cleaning.flush()]
    assert "".join(found) == clean_up("".join(words))
