"""`suffix`: which models can fill in the middle, what they are asked with, and where their answers end."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from functools import cache
from pathlib import Path

import pytest
from http_harness import READY, House, in_loop
from small_tokenizers import small_tokenizer, write_folder

from fakes import Script
from ropeway.server.openai.infill import FAMILIES, Infill
from ropeway.server.tokenizer import Tokenizer

URL = "/v1/completions"
PROMPT, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"


@cache
def tokenizer_with(kind: str, *tokens: str) -> Tokenizer:
    plain = small_tokenizer(kind)
    added = {
        str(plain.vocab_size + index): {"content": token, "special": True, "normalized": False}
        for index, token in enumerate(tokens)
    }
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write_folder(kind, Path(folder), added_tokens_decoder=added))


def infill_of(tokenizer: Tokenizer) -> Infill:
    infill = Infill.find(tokenizer)
    assert infill is not None
    return infill


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.prompt)
@pytest.mark.parametrize("kind", ["byte_level", "gemma", "llama2"])
def test_every_family_is_asked_in_its_own_order(kind: str, family) -> None:
    marks = [mark for mark in (family.prompt, family.suffix, family.answer) if mark]
    tokenizer = tokenizer_with(kind, *marks, *family.ends)
    infill = infill_of(tokenizer)
    assert infill.family is family
    ids = asyncio.run(infill.prompt_ids(PROMPT, SUFFIX, True))
    begin = [] if kind == "byte_level" else [tokenizer.bos_token_id]
    assert ids[: len(begin)] == begin
    pieces: list[list[int]] = [[]]
    places = [tokenizer.token_id(mark) for mark in marks]
    found = []
    for token_id in ids[len(begin) :]:
        if token_id in places:
            found.append(marks[places.index(token_id)])
            pieces.append([])
        else:
            pieces[-1].append(token_id)
    texts = [tokenizer.decode(piece) for piece in pieces]
    if family.suffix_first:
        assert found == [family.suffix, family.prompt]
        assert texts == ["", SUFFIX, PROMPT]
    else:
        assert found == marks
        assert texts == ["", PROMPT, SUFFIX, ""]
    assert len(infill.end_token_ids) == len(family.ends)
    assert asyncio.run(infill.prompt_ids(PROMPT, SUFFIX, False)) == ids[len(begin) :]
    # A prompt of ids is taken as it is.
    given = asyncio.run(infill.prompt_ids([5, 6], SUFFIX, True))
    begin_of_prompt = given.index(tokenizer.token_id(family.prompt)) + 1
    assert given[begin_of_prompt : begin_of_prompt + 2] == [5, 6]


def test_a_suffix_does_not_begin_with_a_space_of_the_tokenizer() -> None:
    tokenizer = tokenizer_with("llama2", "▁<PRE>", "▁<SUF>", "▁<MID>")
    ids = asyncio.run(infill_of(tokenizer).prompt_ids("a", "b", True))
    after = ids[ids.index(tokenizer.token_id("▁<SUF>")) + 1 : -1]
    assert after != tokenizer.encode("b", False)
    assert b"".join(map(tokenizer.token_bytes, after)) == b"b"


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "unigram", "wordpiece"])
def test_others_cannot(kind: str) -> None:
    assert Infill.find(small_tokenizer(kind)) is None
    assert Infill.find(tokenizer_with(kind, "<|fim_prefix|>", "<|fim_suffix|>")) is None


def infill_house() -> tuple[House, Tokenizer]:
    tokenizer = tokenizer_with(
        "byte_level", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|fim_pad|>"
    )
    end = tokenizer.token_id("<|file_sep|>")
    ready = dataclasses.replace(READY, vocab_size=tokenizer.vocab_size)
    return House(lambda request: Script([*tokenizer.encode("a + b"), end]), tokenizer=tokenizer, ready=ready), tokenizer


@in_loop
async def test_a_suffix_over_http() -> None:
    house, tokenizer = infill_house()
    async with house.http() as http:
        body = {"prompt": PROMPT, "suffix": SUFFIX, "max_tokens": 50}
        answer = (await http.post(URL, json=body)).json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("a + b", "stop")
        asked = tokenizer.decode(house.client.added[-1].prompt_token_ids, skip_special_tokens=False)
        assert asked == f"<|fim_prefix|>{PROMPT}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
        assert answer["usage"]["prompt_tokens"] == len(house.client.added[-1].prompt_token_ids)
        # At the beginning of a file there is no prompt; and a suffix without text asks for nothing.
        await http.post(URL, json={**body, "prompt": ["", "x"]})
        assert [tokenizer.decode(request.prompt_token_ids) for request in house.client.added[-2:]] == [
            SUFFIX,
            "x" + SUFFIX,
        ]
        await http.post(URL, json={**body, "suffix": ""})
        assert house.client.added[-1].prompt_token_ids == tokenizer.encode(PROMPT)
        await http.post(URL, json={**body, "ignore_eos": True, "stop_token_ids": [7]})
        assert house.client.added[-1].sampling.stop_token_ids == (7,)
        for field in ({"echo": True}, {"truncate_prompt_tokens": 3}):
            response = await http.post(URL, json={**body, **field})
            assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(field)))


@in_loop
async def test_a_suffix_that_the_model_cannot_take() -> None:
    house = House()
    async with house.http() as http:
        for stream in (True, False):
            response = await http.post(URL, json={"prompt": "x", "suffix": "y", "stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (400, "suffix", "unsupported_parameter")
    assert house.client.added == []
