"""Reported faults of kind 2: stop strings."""

from __future__ import annotations

import pytest
from case_client import BROWN, CHAT, COMPLETIONS, END, GREEDY, REPO_NAME, ask, both, forced
from e2e_server import Server

pytestmark = pytest.mark.real_model
SHORT = [{"role": "user", "content": "Reply with one short word"}]


@pytest.mark.parametrize(("stop", "text"), [("brown brown brown", " "), ("own brown b", " br")])
def test_o05_what_may_become_a_stop_string_is_held_back(tiny: Server, stop: str, text: str) -> None:
    body = {**forced(BROWN), "prompt": "The", "max_tokens": 20, "stop": [stop]}
    answer = both(tiny, COMPLETIONS, **body)
    assert (answer.text, answer.finish_reason) == (text, "stop")
    streamed = ask(tiny, COMPLETIONS, stream=True, **body)
    shown = ""
    for piece in streamed.pieces:
        shown += piece
        assert text.startswith(shown)


def test_o06_a_special_token_as_stop_string(tiny: Server) -> None:
    answer = both(tiny, COMPLETIONS, **forced(REPO_NAME), prompt="x", max_tokens=30, stop=["<repo_name>"])
    assert (answer.num_tokens, answer.finish_reason, answer.text) == (1, "stop", "")
    body = {**forced(END), "messages": SHORT, "max_tokens": 30, "ignore_eos": True, "stop": ["<|im_end|>"]}
    answer = both(tiny, CHAT, **body)
    assert (answer.num_tokens, answer.finish_reason, answer.text) == (1, "stop", "")


def test_o07_a_stop_on_the_last_allowed_token(tiny: Server) -> None:
    answer = both(tiny, COMPLETIONS, **forced(BROWN), prompt="The", max_tokens=2, stop=["brown brown"])
    assert (answer.text, answer.finish_reason) == (" ", "stop")
    natural = ask(tiny, CHAT, **GREEDY, messages=SHORT, max_tokens=60)
    assert natural.finish_reason == "stop", "the model does not end by itself here"
    for limit, reason in (
        (natural.num_tokens, "stop"),
        (natural.num_tokens + 1, "stop"),
        (natural.num_tokens - 1, "length"),
    ):
        assert both(tiny, CHAT, **GREEDY, messages=SHORT, max_tokens=limit).finish_reason == reason


def test_o08_held_back_text_comes_out_when_the_stop_never_does(tiny: Server) -> None:
    stop = ["brown brown brown brown zebra"]
    answer = both(tiny, COMPLETIONS, **forced(BROWN), prompt="The", max_tokens=3, stop=stop)
    assert (answer.text, answer.finish_reason) == (" brown brown brown", "length")
    natural = ask(tiny, CHAT, **GREEDY, messages=SHORT, max_tokens=60)
    stops = [natural.text[:2] + "ZZZ", natural.text[-1:] + "ZZZ", "assistant\n"]
    held = both(tiny, CHAT, **GREEDY, messages=SHORT, max_tokens=60, stop=stops)
    assert (held.text, held.finish_reason, held.usage) == (natural.text, "stop", held.usage)
    assert held.num_tokens == natural.num_tokens
