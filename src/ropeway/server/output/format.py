"""What the served model's answers look like: how it thinks and how it calls tools.

Owns: OutputFormat, found once at start from the chat template and two flags. Must not know: HTTP, requests.
Called by: service (find), server.openai (readers for one request).
"""

from __future__ import annotations

from dataclasses import dataclass

from ropeway.server.chat_template import identifiers
from ropeway.server.output.families import ALIASES, FAMILIES, Family, detect_family
from ropeway.server.output.reasoning import THOUGHTS, Thought, detect_thought


@dataclass(frozen=True, slots=True)
class OutputFormat:
    family: Family | None  # None: calls are not looked for
    thought: Thought | None  # None: thoughts are not looked for
    shows_tools: bool  # the chat template writes the tools into the prompt
    shows_calls: bool  # and earlier calls

    @classmethod
    def find(cls, template: str, tool_call_parser: str, reasoning_parser: str) -> OutputFormat:
        """template: the text of all the model's chat templates. The flags: a name, ``auto`` or ``none``; the
        configuration has checked them."""
        name = ALIASES.get(tool_call_parser, tool_call_parser)
        if name == "auto":
            name = detect_family(template)
        thought = detect_thought(template) if reasoning_parser == "auto" else THOUGHTS.get(reasoning_parser)
        known = identifiers(template)
        return cls(FAMILIES.get(name), thought, "tools" in known, "tool_calls" in known)
