"""Chat templates against transformers' apply_chat_template, and whose fault an error is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import small_tokenizer, write_folder

from ropeway.errors import ConfigError, RequestError
from ropeway.server.chat_template import MAX_RENDERED_CHARS, ChatTemplate
from ropeway.server.tokenizer import Tokenizer

# Small templates in the styles of well-known models, with their use of whitespace control, namespaces and filters.
CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- set ns = namespace(system="", first=true) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|header|>system\\n\\nToday: " + date_string + "\\n" + ns.system + "<|eot|>" }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + "\\n\\n" + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant\\n\\n' }}
{%- endif %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and ns.last == messages|length - 1 %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" and tools %}{% continue %}{% endif %}
    {%- if message.role in ["user", "system"] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last %}
            {{- '\\n<think>' + message.reasoning_content.strip('\\n') + '</think>' }}
        {%- endif %}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n<tool_call>{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson(indent=2) }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>' + message.content + '</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}
{%- endif %}"""

MISTRAL = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
  {%- set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Roles must alternate: user, assistant, user, ...') }}
  {%- endif %}
  {%- if message['role'] == 'user' %}
    {{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') + message['content'] + ' [/INST]' }}
  {%- elif message['role'] == 'assistant' %}
    {%- generation %}
    {{- ' ' + message['content'] + eos_token }}
    {%- endgeneration %}
  {%- else %}{{ raise_exception('Only user and assistant are understood, not ' ~ message.role) }}
  {%- endif %}
{%- endfor %}"""

GEMMA = """\
{{ bos_token }}
{%- macro show(content) -%}
    {%- if content is string -%}
        {{ content | trim }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (show(message['content'])) + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

PLAIN = """{% for message in messages %}
    {% if message.role == 'user' %}
User: {{ message.content }}
    {% else %}
  {{ message.role }}: {{ message.content }}
    {% endif %}
{% endfor %}
  {# a comment on its own line #}
    {% if add_generation_prompt %}assistant:{% endif %}

"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA, "plain": PLAIN}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <two> & 'more' numbers: č 你",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<é>"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "  <b>&amp; 'quotes' \"x\"\n"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello {{ bos_token }} {% raw %}"},
        {"role": "user", "content": "你好 😀"},
    ],
    [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Four.", "reasoning": "\nadd\n", "name": None},
        {"role": "user", "content": "thanks"},
    ],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [{"role": "wizard", "content": "abracadabra"}],
    [{"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}],
    [{"role": "assistant", "content": "first"}],
    [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so", "reasoning": "\nhm\n"}],
    [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so", "thinking": "hm"}],
]


class Pair:
    """The same template through Ropeway and through transformers."""

    def __init__(self, folder: Path, template: Any, **more: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        write_folder("llama2", folder, chat_template=template, **more)
        self.ours = Tokenizer.load(folder)
        self.theirs = PreTrainedTokenizerFast.from_pretrained(folder)

    def check(self, chat: list[dict[str, Any]], tools: Any = None, kwargs: Any = None, **flags: bool) -> str | None:
        """Both give the same text, or both refuse. Returns the text."""
        flags = {"add_generation_prompt": False, **flags}
        expected: str | Exception
        try:
            expected = self.theirs.apply_chat_template(chat, tools=tools, tokenize=False, **flags, **(kwargs or {}))
        except Exception as error:
            expected = error
        if isinstance(expected, Exception):
            with pytest.raises(RequestError) as caught:
                self.ours.render_chat(chat, tools=tools, kwargs=kwargs, **flags)
            assert caught.value.status == 400
            if type(expected).__name__ == "TemplateError":
                assert caught.value.message == str(expected)
            return None
        text = self.ours.render_chat(chat, tools=tools, kwargs=kwargs, **flags)
        assert text == expected
        ids = self.theirs.apply_chat_template(chat, tools=tools, return_dict=False, **flags, **(kwargs or {}))
        assert self.ours.encode(text, add_special_tokens=False) == ids
        return text


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {name: Pair(tmp_path_factory.mktemp(name), template) for name, template in TEMPLATES.items()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_same_text_as_transformers(name: str, pairs: dict[str, Pair]) -> None:
    rendered = 0
    for chat in CHATS:
        for tools in (None, TOOLS):
            for kwargs in (None, {"enable_thinking": False, "date_string": "1 May 2026", "bos_token": "<B>"}):
                for flags in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}):
                    rendered += pairs[name].check(chat, tools, kwargs, **flags) is not None
    assert rendered >= 20


CONTENT = st.text(st.sampled_from("ab <>&'\"\n{}%#é😀"), max_size=12)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": CONTENT},
    optional={"reasoning_content": CONTENT, "name": st.none() | CONTENT},
)


@settings(max_examples=150, deadline=None)
@given(chat=st.lists(MESSAGE, min_size=1, max_size=5), name=st.sampled_from([*TEMPLATES]), how=st.integers(0, 2))
def test_random_chats_same_as_transformers(pairs: dict[str, Pair], chat, name: str, how: int) -> None:
    flags = ({}, {"add_generation_prompt": True}, {"continue_final_message": True})[how]
    pairs[name].check(chat, **flags)


def test_no_second_bos(pairs: dict[str, Pair]) -> None:
    ours = pairs["llama3"].ours
    ids = ours.encode(ours.render_chat(CHATS[0]), add_special_tokens=False)
    assert ids[0] == ours.bos_token_id
    assert ids.count(ours.bos_token_id) == 1


@pytest.mark.parametrize("content", ["one two ", "one\n\n ", "", " ", "one  two"])
def test_final_message_is_continued_where_its_content_ends(pairs: dict[str, Pair], content: str) -> None:
    chat = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": content}]
    text = pairs["chatml"].check(chat, continue_final_message=True)
    assert text is not None
    assert text.endswith("<|im_start|>assistant\n" + content)
    trimmed = pairs["gemma"].check(chat, continue_final_message=True)
    assert trimmed is not None
    assert trimmed.endswith("<start_of_turn>model\n" + content.strip() if content.strip() else "model")


def test_final_message_given_as_parts(pairs: dict[str, Pair]) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}, {"type": "image"}]
    chat = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": parts}]
    before = json.dumps(chat)
    text = pairs["gemma"].check(chat, continue_final_message=True)
    assert text is not None
    assert text.endswith("model\nonetwo")
    assert json.dumps(chat) == before


@pytest.mark.parametrize(
    "final",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": [{"type": "image"}]},
    ],
)
def test_nothing_to_continue_is_a_client_error(pairs: dict[str, Pair], final: dict[str, Any]) -> None:
    assert pairs["gemma"].check([CHATS[0][0], final], continue_final_message=True) is None


def test_a_template_that_hides_the_final_message(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    chat = [CHATS[0][0], {"role": "assistant", "content": "x"}]
    assert pair.check(chat, continue_final_message=True) is None
    with pytest.raises(RequestError, match="does not show the final message"):
        pair.ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True)


def test_a_template_that_rewrites_the_final_message(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "{% for m in messages %}{{ m.content | replace('o', '0') }}{% endfor %}")
    chat = [CHATS[0][0], {"role": "assistant", "content": "one"}]
    assert pair.check(chat, continue_final_message=True) is None


def test_both_flags_and_no_messages_are_client_errors(pairs: dict[str, Pair]) -> None:
    assert pairs["chatml"].check(CHATS[0], add_generation_prompt=True, continue_final_message=True) is None
    assert pairs["chatml"].check([]) is None


@pytest.mark.parametrize("key", ["messages", "tools", "chat_template", "add_generation_prompt"])
def test_template_variables_cannot_replace_the_request(pairs: dict[str, Pair], key: str) -> None:
    with pytest.raises(RequestError, match=key) as error:
        pairs["chatml"].ours.render_chat(CHATS[0], kwargs={key: "x"})
    assert (error.value.status, error.value.param) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_without_content(pairs: dict[str, Pair], name: str) -> None:
    """O-21: missing, null and empty contents and tool_calls are the same; arguments may be JSON text."""
    call_as_text = {**CALL, "function": {"name": "add", "arguments": json.dumps(CALL["function"]["arguments"])}}
    texts = set()
    for turn in (
        {"tool_calls": [call_as_text]},
        {"tool_calls": [call_as_text], "content": None},
        {"tool_calls": [CALL], "content": "", "refusal": None},
    ):
        chat = [CHATS[0][0], {"role": "assistant", **turn}, {"role": "user", "content": "thanks"}]
        texts.add(pairs[name].ours.render_chat(chat))
    assert len(texts) == 1
    assert "None" not in texts.pop()
    chats = [[CHATS[0][0], {"role": "assistant", "content": "x", **more}] for more in ({}, {"tool_calls": []})]
    assert pairs[name].ours.render_chat(chats[0]) == pairs[name].ours.render_chat(chats[1])


@pytest.mark.parametrize("arguments", ["", "  ", "[1]", "{", "3", None, 7])
def test_odd_tool_arguments_do_not_break_rendering(pairs: dict[str, Pair], arguments: Any) -> None:
    calls = [{"function": {"name": "add", "arguments": arguments}}]
    chat = [CHATS[0][0], {"role": "assistant", "tool_calls": calls}]
    text = pairs["qwen"].ours.render_chat(chat)
    shown = {} if isinstance(arguments, str) and not arguments.strip() else arguments
    assert f'"arguments": {json.dumps(shown)}' in text


def test_messages_of_odd_shape_are_client_errors(pairs: dict[str, Pair]) -> None:
    for chat in ([{"role": "user", "content": 5}], [{"content": "x"}], [{"role": "user", "content": [{"a": 1}]}]):
        for name in ("chatml", "mistral"):
            with pytest.raises(RequestError) as error:
                pairs[name].ours.render_chat(chat)
            assert error.value.status == 400
            assert "Traceback" not in error.value.message


def test_the_template_speaks_for_itself_when_it_refuses(pairs: dict[str, Pair]) -> None:
    for chat, words in (
        (CHATS[4], "Roles must alternate: user, assistant, user, ..."),
        (CHATS[7], "Roles must alternate: user, assistant, user, ..."),
    ):
        with pytest.raises(RequestError) as error:
            pairs["mistral"].ours.render_chat(chat)
        assert (error.value.status, error.value.message) == (400, words)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content | nonsense }}",
        "{% for m in messages %}",
        "{{ undefined_name.x }}",
        "{{ strange() }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_faulty_template_is_a_server_error(template: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_folder("byte_level", tmp_path, chat_template=template))
    for _ in range(2):
        with pytest.raises(RequestError) as error:
            tokenizer.render_chat(CHATS[0])
        assert (error.value.status, error.value.type) == (500, "server_error")
        assert "Traceback" not in error.value.message
    assert tokenizer.encode("still works")


def test_output_is_bounded(tmp_path: Path) -> None:
    template = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
    tokenizer = Tokenizer.load(write_folder("byte_level", tmp_path, chat_template=template))
    with pytest.raises(RequestError, match="longer than") as error:
        tokenizer.render_chat([{"role": "user", "content": "x" * (MAX_RENDERED_CHARS // 500)}])
    assert error.value.status == 400


def test_the_sandbox_holds(pairs: dict[str, Pair], tmp_path: Path) -> None:
    template = "{{ messages.clear() }}"
    tokenizer = Tokenizer.load(write_folder("byte_level", tmp_path, chat_template=template))
    chat = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError):
        tokenizer.render_chat(chat)
    assert chat == [{"role": "user", "content": "x"}]


def test_strftime_and_documents(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "{{ strftime_now('%Y') }}{% for d in documents or [] %}{{ d.title }}{% endfor %}")
    assert pair.check(CHATS[0]) is not None
    text = pair.check(CHATS[0], kwargs={"documents": [{"title": "T", "text": "x"}]})
    assert text is not None
    assert text.endswith("T")


# Where the template comes from


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    pair = Pair(tmp_path, named)
    assert pair.check(CHATS[0]) == "plain"
    assert pair.check(CHATS[0], TOOLS) == "with tools"
    without = Tokenizer.load(write_folder("byte_level", tmp_path / "x", chat_template=named[1:]))
    assert without.render_chat(CHATS[0], tools=TOOLS) == "with tools"
    with pytest.raises(RequestError, match="no default"):
        without.render_chat(CHATS[0])


def test_template_files_come_before_the_configuration(tmp_path: Path) -> None:
    folder = write_folder("byte_level", tmp_path, chat_template="from config")
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "from config"
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "from jinja"
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("from tool_use")
    assert Tokenizer.load(folder).render_chat(CHATS[0], tools=TOOLS) == "from tool_use"
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "from jinja"
    (folder / "mine.txt").write_text("mine {{ eos_token }}")
    assert Tokenizer.load(folder, str(folder / "mine.txt")).render_chat(CHATS[0]) == "mine <|im_end|>"
    assert Tokenizer.load(folder, "text {{ bos_token }}").render_chat(CHATS[0], tools=TOOLS) == "text <|im_start|>"


@pytest.mark.parametrize(
    ("given", "match"), [("no/such/file", "no/such/file"), ("{% for %}", "does not compile"), (".", "--chat-template")]
)
def test_bad_override_is_refused_at_start(tmp_path: Path, given: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Tokenizer.load(write_folder("byte_level", tmp_path), given)


def test_no_template() -> None:
    tokenizer = small_tokenizer("byte_level")
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template") as error:
        tokenizer.render_chat(CHATS[0])
    assert error.value.status == 400


def test_async_rendering_gives_the_same(pairs: dict[str, Pair]) -> None:
    ours = pairs["qwen"].ours
    long = [{"role": "user", "content": "word " * 1000}, {"role": "assistant", "content": None}]

    async def run() -> None:
        for chat in (CHATS[0], long):
            assert await ours.render_chat_async(chat) == ours.render_chat(chat)
            assert await ours.render_chat_async(chat, tools=TOOLS) == ours.render_chat(chat, tools=TOOLS)

    asyncio.run(run())


def test_a_template_is_compiled_once() -> None:
    from ropeway.server.chat_template import compile_template

    template = ChatTemplate({"default": "{{ messages[0].content }}{# once #}"}, {})
    template.render(CHATS[0])
    misses = compile_template.cache_info().misses
    for _ in range(5):
        template.render(CHATS[0])
    assert compile_template.cache_info().misses == misses
