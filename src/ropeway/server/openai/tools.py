"""What a chat request says of tools: checked, and turned into a reader of calls and the form of forced ones.

Owns: tools, tool_choice and parallel_tool_calls. Must not know: how families write calls. Called by: chat.

Rules:

* ``tools`` that are empty or null are as if absent. Without a ``tool_choice`` it is ``auto``.
* ``none``: the tools are not shown to the model, and nothing in its answer is taken for a call.
* ``auto``: the model is free. What it writes in the form of a call is one, whatever the arguments' schema says.
* ``required``: one call or more; a named function: exactly one call of it. Both are enforced while generating, and so is
  the schema of the arguments, with no properties but the listed ones unless it says that there may be others.
* ``allowed_tools``: the others are as if absent; its mode is ``auto`` or ``required``.
* ``parallel_tool_calls: false``: the answer ends after its first call.
* ``finish_reason`` is ``tool_calls`` exactly where there is a call, for a named function, too, and even if the answer was
  cut off inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ropeway.errors import RequestError
from ropeway.server.grammar import check_nesting, json_rule, lark_rule, text_rule
from ropeway.server.openai.schema import ChatRequest, FunctionTool
from ropeway.server.output.calls import CallReader, Signatures
from ropeway.server.output.families import Family


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request says of tools, the ones it may use."""

    tools: list[FunctionTool]
    choice: str  # "auto", "required" or "named"; with "named" there is one tool
    max_calls: int | None

    @property
    def is_forced(self) -> bool:
        return self.choice != "auto"

    @property
    def signatures(self) -> Signatures:
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}

    def reader(self, family: Family) -> CallReader:
        return CallReader(family.marks, family.read, self.signatures, make_id=family.make_id, max_calls=self.max_calls)

    def rule(self, family: Family, literal: Callable[[str], str] = text_rule) -> str:
        """A grammar rule for calls in the family's form: one, or as many as the model likes. ``literal``: the rule of a
        text of the form. Raises GrammarError."""
        form = family.form

        def fixed(text: str) -> list[str]:
            return [literal(text)] if text else []

        for schema in self.signatures.values():
            check_nesting(schema)
        calls = [
            [literal(form.before_name + name + form.before_arguments), json_rule({"type": "object", **closed(schema)})]
            for name, schema in self.signatures.items()
        ]
        more = [] if self.max_calls == 1 else [f"({' '.join([*fixed(form.separator), 'call'])})*"]
        lines = [
            " ".join(["start:", *fixed(form.opening), "call", *more, *fixed(form.closing)]),
            "call: " + " | ".join(" ".join([*call, *fixed(form.after_arguments)]) for call in calls),
        ]
        return lark_rule("\n".join(lines))


# Beside these, another schema may speak of the same object.
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas"})
# Under these, properties that are not listed are spoken of or may be needed.
_OPENING = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties"}
)


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without properties that it does not list, where it says nothing of others: a function has no use for
    them, and a small model that may go on making up more does. Every value of it is one of the given schema, too."""
    result = dict(schema)
    if _COMBINING & schema.keys():
        return result
    if isinstance(properties := schema.get("properties"), dict):
        result["properties"] = {
            name: closed(value) if isinstance(value, dict) else value for name, value in properties.items()
        }
        required = schema.get("required") or []
        if not _OPENING & schema.keys() and all(name in properties for name in required):
            result["additionalProperties"] = False
    if isinstance(items := schema.get("items"), dict):
        result["items"] = closed(items)
    return result


def read_tools(body: ChatRequest) -> ToolUse | None:
    """None: no tools are in play. Raises RequestError(400)."""
    tools = body.tools or []
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        param = f"tools[{index}].function"
        if tool.function.name in seen:
            raise _invalid(f"{param}.name", f"there are two functions named '{tool.function.name}'")
        seen.add(tool.function.name)
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise _invalid(f"{param}.parameters", "must be a JSON schema of type 'object'")
    mode, names = _read_choice(body.tool_choice, seen)
    if mode == "none" or not tools:
        return None
    tools = [tool for tool in tools if names is None or tool.function.name in names]
    return ToolUse(tools, mode, 1 if mode == "named" or body.parallel_tool_calls is False else None)


def _read_choice(choice: str | dict[str, Any] | None, names: set[str]) -> tuple[str, list[str] | None]:
    """(``none``, ``auto``, ``required`` or ``named``, the names of the tools to use or None for all)."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise _invalid("tool_choice", "must be 'none', 'auto', 'required' or an object that names a function")
        if choice == "required" and not names:
            raise _invalid("tool_choice", "'required' needs 'tools'")
        return choice, None
    kind = choice.get("type")
    if kind == "function":
        return "named", [_name_of(choice, "tool_choice", names)]
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        entries = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required"):
            raise _invalid("tool_choice.allowed_tools.mode", "must be 'auto' or 'required'")
        if not isinstance(entries, list) or not entries:
            raise _invalid("tool_choice.allowed_tools.tools", "must be a list of functions")
        path = "tool_choice.allowed_tools.tools"
        return allowed["mode"], [_name_of(entry, f"{path}[{i}]", names) for i, entry in enumerate(entries)]
    raise _invalid("tool_choice.type", "must be 'function' or 'allowed_tools'")


def _name_of(entry: Any, param: str, names: set[str]) -> str:
    function = entry.get("function") if isinstance(entry, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _invalid(f"{param}.function.name", "must be the name of one of 'tools'")
    if name not in names:
        raise _invalid(f"{param}.function.name", f"no function of 'tools' is named '{name[:64]}'")
    return name


def _invalid(param: str, reason: str) -> RequestError:
    return RequestError(f"Invalid value for '{param}': {reason}.", param=param, code="invalid_value")
