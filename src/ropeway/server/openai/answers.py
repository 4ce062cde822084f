"""How the answers of one chat request are read, and what they are made to look like: as its tools and its prompt, and
the served model, have it.

Owns: AnswerReader. Must not know: how a family writes calls or thoughts, how an endpoint words a message.
Called by: chat.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ropeway.errors import RequestError
from ropeway.server.grammar import GrammarError, ReasoningRule, grammar, text_rule
from ropeway.server.openai.errors import refused_grammar
from ropeway.server.openai.schema import ChatRequest
from ropeway.server.openai.structured import AnswerRule, answer_rule
from ropeway.server.openai.tools import ToolUse
from ropeway.server.output.families import Family
from ropeway.server.output.message import MessageParser
from ropeway.server.output.reasoning import ReasoningReader, Thought
from ropeway.server.service import Service
from ropeway.server.stream import TextDelta
from ropeway.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerReader:
    tokenizer: Tokenizer
    thought: Thought | None  # that the answer may begin with
    is_thinking: bool  # the prompt has begun the thought
    use: ToolUse | None  # with calls to be looked for
    family: Family | None
    shown_special_ids: frozenset[int]  # the marks that must be in the text

    @classmethod
    def find(cls, service: Service, body: ChatRequest, use: ToolUse | None, prompt: str) -> AnswerReader:
        """prompt: as rendered. It says whether a thought has begun, or is over before it could begin.

        Raises RequestError(400) for forced calls where none are looked for.
        """
        thought, family = service.output.thought, service.output.family if use else None
        if use is not None and use.is_forced and family is None:
            raise RequestError(
                "'tool_choice' can only be 'auto' or 'none' here: this server runs with --tool-call-parser none.",
                param="tool_choice",
                code="unsupported_parameter",
            )
        is_thinking = False
        if thought is not None:
            if body.continue_final_message:  # the thought is in the message's own text, or not at all
                content = body.messages[-1].content
                text = content if isinstance(content, str) else "".join(str(p.get("text")) for p in content or ())
                is_thinking = text.rfind(thought.start) > text.rfind(thought.end)
                thought = thought if is_thinking else None
            else:
                is_thinking = prompt.rstrip().endswith(thought.start)
                thought = None if prompt.rstrip().endswith(thought.end) else thought
        marks = [*(family.special if family else ()), *((thought.start, thought.end) if thought else ())]
        ids = {service.tokenizer.token_id(mark) for mark in marks}
        shown = frozenset(id for id in ids if id is not None) & service.tokenizer.special_ids
        return cls(service.tokenizer, thought, is_thinking, use, family, shown)

    @property
    def is_plain(self) -> bool:
        return self.thought is None and self.family is None

    def parser(self) -> MessageParser:
        """A new one, for one choice."""
        return MessageParser(
            None if self.thought is None else ReasoningReader(self.thought, is_open=self.is_thinking),
            None if self.use is None or self.family is None else self.use.reader(self.family),
            self._num_bytes,
        )

    def watch(self) -> Callable[[TextDelta], bool]:
        """For one choice: whether its message has got all the calls that it may have."""
        parser = self.parser()

        def is_complete(delta: TextDelta) -> bool:
            parser.feed(delta)
            return parser.is_full

        return is_complete

    def constraint(self, body: ChatRequest) -> AnswerRule | None:
        """The whole grammar that the request asks for. Raises RequestError(400)."""
        answer = answer_rule(body)
        param = "thinking_token_budget" if answer is None else answer.param
        if self.use is not None and self.use.is_forced:
            param = "tools"
        try:
            text = self.grammar(None if answer is None else answer.text, body.thinking_token_budget)
        except GrammarError as error:
            raise refused_grammar(error, "tools" if self.use else param) from None
        return AnswerRule(text, param) if text else None

    def grammar(self, rule: str | None, budget: int | None) -> str:
        """The grammar's source for answers that hold to ``rule`` (None: any text) where they are not calls, and have at
        most ``budget`` tokens of thought; empty if there is nothing to hold to. Raises GrammarError."""
        if self.use is not None and self.family is not None:
            if self.use.is_forced:
                rule = self.use.rule(self.family, self._literal)
            elif rule is not None:
                rule = f"({self.use.rule(self.family, self._literal)} | {rule})"
        if self.thought is None:
            return "" if rule is None else grammar(rule)
        if rule is None and budget is None:
            return ""
        start, end = self.thought.start, self.thought.end
        opens = not self.is_thinking
        reasoning = ReasoningRule(
            end,
            budget,
            self._special_id(end),
            begin=start if opens else "",
            begin_token=self._special_id(start) if opens else None,
        )
        return grammar(rule, reasoning=reasoning)

    def _literal(self, text: str) -> str:
        """The rule of a text in which marks that are special tokens may stand."""
        assert self.family is not None
        marks = [mark for mark in self.family.special if self._special_id(mark) is not None]
        parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
        return " ".join(f"<[{self._special_id(part)}]>" if part in marks else text_rule(part) for part in parts if part)

    def _special_id(self, text: str) -> int | None:
        token_id = self.tokenizer.token_id(text)
        return token_id if token_id in self.tokenizer.special_ids else None

    def _num_bytes(self, token_id: int) -> int:
        if token_id in self.tokenizer.special_ids and token_id not in self.shown_special_ids:
            return 0
        return len(self.tokenizer.token_bytes(token_id))
