"""Tool calls out of text: every family, however the text is cut, and what is not a call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ropeway.server.output.calls import CallReader
from ropeway.server.output.cursor import MAX_HELD
from ropeway.server.output.events import MessageDelta
from ropeway.server.output.families import ALIASES, FAMILIES, detect_family
from ropeway.server.output.format import OutputFormat
from ropeway.server.output.message import MessageParser
from ropeway.server.stream import TextDelta

SIGNATURES: dict[str, Any] = {
    "get_time": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "add": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    "note": {},
}


@dataclass
class Read:
    """A message, added up as clients do."""

    content: str
    calls: list[tuple[str, str]]
    finish_reason: str | None


def read(family: str, pieces: list[str], max_calls: int | None = None, reason: str = "stop") -> Read:
    """Checks the order of events on the way."""
    entry = FAMILIES[family]
    parser = MessageParser(
        None, CallReader(entry.marks, entry.read, SIGNATURES, make_id=entry.make_id, max_calls=max_calls)
    )
    content, names, arguments, ids = "", [], [], []
    finish_reason = None
    for index, piece in enumerate([*pieces, ""]):
        delta = parser.feed(TextDelta(piece, finish_reason=reason if index == len(pieces) else None))
        content += delta.content
        for call in delta.tool_calls:
            if call.name:
                assert call.index == len(names)
                assert call.id
                names.append(call.name)
                ids.append(call.id)
                arguments.append(call.arguments)
            else:
                assert call.index == len(names) - 1
                assert not call.id
                assert call.arguments
                arguments[-1] += call.arguments
        finish_reason = delta.finish_reason
    assert len(set(ids)) == len(ids)
    return Read(content, list(zip(names, arguments, strict=True)), finish_reason)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


ARGUMENTS = [
    '{"city": "Praha \\"ž\\" {😀}]", "days": [1, {"a": {"b": null}}]}',
    '{"a":1.5e3,"b":"</tool_call>[TOOL_CALLS]\\\\"}',
]
CALLS = [("get_time", ARGUMENTS[0]), ("add", ARGUMENTS[1])]


def objects(key: str) -> list[str]:
    return [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in CALLS]


PYTHON = "get_time(city='Praha \"ž\" {😀}]', days=[1, {'a': {'b': None}}]), add(a=1500.0, b=\"</tool_call>[TOOL_CALLS]\\\\\")"
XML = [
    '<function=get_time>\n<parameter=city>\nPraha "ž" {😀}]\n</parameter>\n<parameter=days>\n'
    '[1, {"a": {"b": null}}]\n</parameter>\n</function>',
    "<function=add>\n<parameter=a>1500.0</parameter><parameter=b>\n</tool_call>[TOOL_CALLS]\\\n</parameter>\n</function>",
]
# The same two calls as each family writes them, with text before, between and after where the family may have it.
TEXTS = {
    "hermes": [
        "Let me see. <tool_call>\n" + objects("arguments")[0] + "\n</tool_call>\nand\n<tool_call>"
        + objects("arguments")[1] + "</tool_call>\n\nDone <tool",
        "Let me see.\n\n<tool_call>" + objects("parameters")[0] + "</tool_call>and<tool_call>\n\n" + objects("arguments")[1]
        + "\n</tool_call>\n\nDone <tool",
    ],
    "qwen3_coder": [
        "Let me see.\n```json\n" + objects("arguments")[0] + "\n```\nand" + objects("arguments")[1] + "Done <tool",
        f"Let me see.\n<tool_call>\n{XML[0]}\n</tool_call>\nand {XML[1]}\nDone <tool",
        f"Let me see.{XML[0]}and\n<tool_call>\n" + objects("arguments")[1] + "</tool_call> Done <tool",
    ],
    "llama3_json": [
        "Let me see. " + objects("parameters")[0] + " and <|python_tag|>" + objects("parameters")[1] + "; Done <tool",
        'Let me see. {"type": "function", "name": "get_time", "parameters": ' + ARGUMENTS[0] + "}\nand\n"
        + objects("arguments")[1] + "\nDone <tool",
    ],
    "mistral": [
        f"Let me see. [TOOL_CALLS]get_time[ARGS]{ARGUMENTS[0]}and[TOOL_CALLS] add{ARGUMENTS[1]} Done <tool",
        f"Let me see.[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS] {ARGUMENTS[0]}\nand [TOOL_CALLS]"
        + objects("arguments")[1] + "Done <tool",
    ],
    "mistral_list": [
        "Let me see. [TOOL_CALLS] [" + objects("arguments")[0] + "]and[TOOL_CALLS][" + objects("arguments")[1]
        + "]\nDone <tool"
    ],
    "functionary": [
        f"Let me see. <function=get_time>{ARGUMENTS[0]}</function>and<function=add>\n{ARGUMENTS[1]} </function> Done <tool"
    ],
    "pythonic": [
        "Let me see. [" + PYTHON.split("), ")[0] + ")] and [ " + PYTHON.split("), ")[1] + " ]\nDone <tool",
        "Let me see. [" + PYTHON.split("), ")[0] + ")] and " + objects("arguments")[1] + "\nDone <tool",
    ],
    "gemma": [
        "Let me see.\n```tool_code\n" + PYTHON.split("), ")[0] + ")\n```\nand\n```tool_code\nprint("
        + PYTHON.split("), ")[1] + ")\n```\nDone <tool"
    ],
    "json": [
        "Let me see.\n```json\n" + objects("arguments")[0] + "\n```\nand\n```json" + objects("arguments")[1] + "``` Done <tool",
        "Let me see.\n" + objects("arguments")[0] + "\nand\n" + objects("parameters")[1] + "\nDone <tool",
        'Let me see. {"parameters": ' + ARGUMENTS[0] + ', "name": "get_time"} and {"id": 5, "name": "add", "arguments": '
        + json.dumps(ARGUMENTS[1]) + ', "id": [{}]} Done <tool',
    ],
}  # fmt: skip
PLAIN = [
    "",
    " \n",
    "  just text\n",
    'text with {"a": 1} and [1, 2] and ```python\nprint(get_time("x"))\n``` and <b>, <tool>, [TOOL_CALL]\n\n',
    "{{[[<<``",
]


def all_texts() -> list[tuple[str, str]]:
    return [(family, text) for family, texts in TEXTS.items() for text in texts]


@pytest.mark.parametrize(("family", "text"), all_texts())
def test_two_calls_among_text(family: str, text: str) -> None:
    result = read(family, [text])
    assert [name for name, _ in result.calls] == ["get_time", "add"]
    for (_, found), expected in zip(result.calls, ARGUMENTS, strict=True):
        assert json.loads(found) == json.loads(expected)
    assert "".join(result.content.split()) == "Letmesee.andDone<tool"
    assert result.finish_reason == "tool_calls"


@pytest.mark.parametrize(("family", "text"), all_texts())
def test_o24_no_cut_changes_anything(family: str, text: str) -> None:
    whole = read(family, [text])
    assert read(family, list(text)) == whole
    for place in range(len(text) + 1):
        assert read(family, [text[:place], text[place:]]) == whole


@settings(max_examples=300, deadline=None)
@given(case=st.sampled_from(all_texts()), places=st.lists(st.integers(0, 500), max_size=12), end=st.integers(0, 500))
def test_o24_no_cut_changes_anything_in_what_breaks_off(case: tuple[str, str], places: list[int], end: int) -> None:
    family, text = case
    text = text[: end % (len(text) + 1)]
    whole = read(family, [text], reason="length")
    assert read(family, cut(text, places), reason="length") == whole
    assert read(family, list(text), reason="length") == whole
    assert whole.finish_reason == ("tool_calls" if whole.calls else "length")


MARKS = sorted({mark for family in FAMILIES.values() for mark in (*family.marks, *family.special)})
SCRAPS = st.lists(
    st.sampled_from(
        [
            *MARKS, "{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ":", ";", " ", "\n", "a", "😀", "null", "1",
            '"name"', '"arguments"', '"get_time"', "get_time", "</tool_call>", "</function>", "<parameter=a>", "```", "```json",
            "</parameter>", '{"name": "add", "arguments": {', '{"name": "add", "arguments": {}}', "print(", "add(a=1)",
            '<tool_call>{"name": "x"', "<function=note>{}",
        ]
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(family=st.sampled_from([*FAMILIES]), scraps=SCRAPS, places=st.lists(st.integers(0, 200), max_size=8))
@example(family="gemma", scraps=["```", "`", "```tool_code", "\n", "```"], places=[2, 4])
def test_o24_no_cut_changes_anything_in_rubbish(family: str, scraps: list[str], places: list[int]) -> None:
    text = "".join(scraps)
    whole = read(family, [text])
    assert read(family, cut(text, places)) == whole
    assert read(family, list(text)) == whole
    if not whole.calls:
        assert whole.content == text  # nothing is lost or doubled


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", PLAIN)
def test_text_stays_as_it_is(family: str, text: str) -> None:
    assert read(family, list(text)) == Read(text, [], "stop")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "a <tool_call>{oops}</tool_call> b"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": 7}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "7"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "ad'),
        ("hermes", "<tool_call>\n"),
        ("qwen3_coder", "<function=add><parameter=a>1</parameter>"),
        ("qwen3_coder", "<function=add><b></function>"),
        ("llama3_json", '{"name": "unknown", "parameters": {"a": 1}}'),
        ("llama3_json", '{"name": "add"}'),
        ("llama3_json", '{"name": "add", "values": {}}'),
        ("json", '```json\n{"a": 1}\n``` ```json'),
        ("json", '{"title": "x", "name": "add"}'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] [1]"),
        ("mistral_list", "[TOOL_CALLS] []"),
        ("functionary", "<function=add>no</function>"),
        ("pythonic", "[add(a=open('x'))] [add(a=b)] [unknown(a=1)] [add(*x)] [add(1, 2, 3)]"),
        ("pythonic", "[add(a=float('nan'))] [add(a=1e999)] [add(a=b'x')] [add(a={1, 2})] [add(1, a=2)]"),
        ("gemma", "```tool_code\nimport os\n```"),
    ],
)
def test_what_is_no_call_is_content(family: str, text: str) -> None:
    assert read(family, list(text)) == read(family, [text]) == Read(text, [], "stop")


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": [1, "x', '{"a": [1, "x', ""),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}', '{"a": 1}', ""),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}\n</tool_', '{"a": 1}', ""),
        ('<tool_call>{"name": "add", "arguments": {"a": [1}}</tool_call>', '{"a": [1', "}}</tool_call>"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}} ...', '{"a": 1}', "..."),
        ('<tool_call>{"name": "add", "arguments": {}, "x": [1, "}"]}</tool_call>', "{}", ""),
        ('<tool_call>{"name": "add"}</tool_call>', "{}", ""),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "{}", ""),
        ('<tool_call>{"name": "add", "arguments": " "}</tool_call>', "{}", ""),
    ],
)
def test_a_call_that_goes_wrong_after_its_name(text: str, arguments: str, content: str) -> None:
    assert read("hermes", list(text)) == read("hermes", [text]) == Read(content, [("add", arguments)], "tool_calls")


def test_arguments_come_as_they_are_written() -> None:
    entry = FAMILIES["hermes"]
    reader = CallReader(entry.marks, entry.read, SIGNATURES, make_id=entry.make_id)
    shown = []
    for letter in '<tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>':
        delta = MessageDelta()
        reader.feed(letter, delta, False)
        shown += [call.name or call.arguments for call in delta.tool_calls]
    assert shown == ["add", *'{"a": 12}']


def test_parameters_in_tags_get_the_types_of_the_schema() -> None:
    def value(tool: str, key: str, text: str) -> Any:
        [(_, arguments)] = read(
            "qwen3_coder", [f"<function={tool}><parameter={key}>{text}</parameter></function>"]
        ).calls
        return json.loads(arguments)[key]

    assert value("get_time", "city", "12") == "12"
    assert value("get_time", "days", "12") == 12
    assert value("get_time", "days", "\ntrue\n") is True
    assert value("note", "x", "True") is True
    assert value("note", "x", "{'a': None}") == {"a": None}
    assert value("note", "x", "{1, 2}") == "{1, 2}"
    assert value("note", "x", "1e999") == "1e999"
    assert value("note", "x", "NaN") == "NaN"
    assert value("note", "x", "two words") == "two words"
    assert value("note", "x", "\n a\n\n") == " a\n"


def test_python_values_and_places() -> None:
    [(name, arguments)] = read("pythonic", ["[get_time('x', days=3)]"]).calls
    assert (name, json.loads(arguments)) == ("get_time", {"city": "x", "days": 3})
    [(_, arguments)] = read("pythonic", [r"[note(a='\d\ud800', b=-1, c=(1, True), d='''x''')]"]).calls
    assert json.loads(arguments) == {"a": "\\d\ud800", "b": -1, "c": [1, True], "d": "x"}
    arguments.encode()


def test_at_most_one_call() -> None:
    for family, text in all_texts():
        whole = read(family, [text], max_calls=1)
        assert len(whole.calls) == 1
        assert whole.content == read(family, [text]).content[: len(whole.content)] == "Let me see."
        assert read(family, list(text), max_calls=1) == whole
        entry = FAMILIES[family]
        reader = CallReader(entry.marks, entry.read, SIGNATURES, make_id=entry.make_id, max_calls=1)
        reader.feed(text, MessageDelta(), False)
        assert reader.is_full


def test_ids() -> None:
    for name, entry in FAMILIES.items():
        ids = {entry.make_id() for _ in range(100)}
        assert len(ids) == 100
        if name.startswith("mistral"):
            assert all(len(id) == 9 and id.isalnum() for id in ids)
        else:
            assert all(id.startswith("call_") for id in ids)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": ["' + "x" * (MAX_HELD + 500),
        "<tool_call>" + " " * (MAX_HELD + 500) + "{",
        '<tool_call>{"name": "' + "x" * 500 + '"}',
        "<function=add><parameter=a>" + "y" * (MAX_HELD + 10) + "</parameter></function>",
        "<function=" + "n" * 500 + ">",
    ],
)
def test_what_is_held_back_is_bounded(text: str) -> None:
    pieces = [text[at : at + 7919] for at in range(0, len(text), 7919)]
    assert read("qwen3_coder", pieces) == read("qwen3_coder", [text]) == Read(text, [], "stop")


def test_long_arguments_are_not_bounded() -> None:
    arguments = json.dumps({"a": ["x" * (3 * MAX_HELD), "\\" * 1000]})
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert read("hermes", [text]) == Read("", [("add", arguments)], "tool_calls")
    assert read("hermes", [text[at : at + 4099] for at in range(0, len(text), 4099)]).calls == [("add", arguments)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_of_forced_calls_is_read_back(family: str) -> None:
    form = FAMILIES[family].form
    calls = [form.before_name + name + form.before_arguments + a + form.after_arguments for name, a in CALLS]
    text = form.opening + form.separator.join(calls) + form.closing
    assert read(family, list(text)) == Read("", CALLS, "tool_calls")


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ('{% for tool in tools %}<tools></tools>{% endfor %}<tool_call>\n{"name": ', "hermes"),
        ("tools <tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder"),
        ('tools {"name": function name, "parameters": dictionary} <|python_tag|>', "llama3_json"),
        ("tools [AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral_list"),
        ("tools [TOOL_CALLS]name[ARGS]", "mistral"),
        ("tools <function=example_function_name>{", "functionary"),
        ("tools should be in the format of [func_name1(params_name1=params_value1", "pythonic"),
        ("tools ```tool_code", "gemma"),
        ("{{ messages }}", "json"),
    ],
)
def test_the_family_is_found_in_the_template(template: str, family: str) -> None:
    assert detect_family(template) == family
    found = OutputFormat.find(template, "auto", "auto")
    assert found.family is FAMILIES[family]
    assert OutputFormat.find(template, "none", "none").family is None


@pytest.mark.parametrize(
    ("template", "shows_tools", "shows_calls"),
    [
        ("{% for tool in tools %}{{ tool }}{% endfor %}", True, False),
        ("{%- if not tools is defined %}{% set tools = none %}{% endif %}{{ message['tool_calls'] }}", True, True),
        ("{{ m.tool_calls }}", False, True),
        (
            "You have no tools. {# tools tool_calls #}{{ 'I have no tools' }}{% for m in messages %}{% endfor %}",
            False,
            False,
        ),
        ("{{ ) tools }}", False, False),
        ("", False, False),
    ],
)
def test_what_a_template_shows(template: str, shows_tools: bool, shows_calls: bool) -> None:
    found = OutputFormat.find(template, "auto", "auto")
    assert (found.shows_tools, found.shows_calls) == (shows_tools, shows_calls)


def test_every_name_of_the_flag_is_a_family() -> None:
    import typing

    from ropeway.config import ModelConfig

    names = set(typing.get_args(typing.get_type_hints(ModelConfig)["tool_call_parser"]))
    assert names == {"auto", "none", *FAMILIES, *ALIASES}
    assert OutputFormat.find("", "llama4_pythonic", "none").family is FAMILIES["pythonic"]
