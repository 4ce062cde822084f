"""JSON schemas of wide variety, by the hundred: families of them, each varied by a seeded generator.

Owns: the families. Must not know: servers, grammars. Called by: structured.py.

Texts are kept short by lengths and patterns where a family is not about free ones, so that most answers end within a few
hundred tokens even with a small model at temperature 1.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

WORDS = ["name", "age", "city", "price", "title", "tags", "size", "color", "note", "count", "level", "owner", "kind"]
UNICODE = [
    "naïve",
    "größe",
    "名前",
    "年齢",
    "имя",
    "πλάτος",
    "नाम",
    "😀",
    "ключ 1",
    'a"b',
    "back\\slash",
    "new\nline",
    "tab\t",
]
PATTERNS = [
    "^[a-z]{3,8}$", "^[A-Z][a-z]+$", "^\\d{3}-\\d{4}$", "^(foo|bar|baz)+$", "^#[0-9a-f]{6}$", "^[^@ ]{1,8}@[a-z]{2,6}\\.(com|org)$",
    "^v\\d+\\.\\d+\\.\\d+$", "^hello\\!$", "[0-9]{2}", "^(\\+49|0)[1-9]\\d{4,7}$", "^[αβγ]{1,4}$", "^\\$\\d{1,4}\\.\\d{2}$",
    "^(?:[01]\\d|2[0-3]):[0-5]\\d$", "^[a-f0-9]{8}-[a-f0-9]{4}$", "^.{2,10}$", "^\"quoted\"$",
]  # fmt: skip


def short_text(rng: random.Random) -> Schema:
    least = rng.randrange(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(1, 12)}


def scalar(rng: random.Random) -> Schema:
    return rng.choice(
        [
            short_text(rng),
            {"type": "integer", "minimum": -50, "maximum": 1000},
            {"type": "number", "minimum": 0, "maximum": 100},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": ["red", "green", 3, None, True]},
        ]
    )


def strict(properties: dict[str, Any], **more: Any) -> Schema:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False, **more
    }  # fmt: skip


def flat(rng: random.Random) -> Schema:
    return strict({name: scalar(rng) for name in rng.sample(WORDS, rng.randrange(1, 6))})


def nested(rng: random.Random, depth: int = 3) -> Schema:
    properties: dict[str, Any] = {name: scalar(rng) for name in rng.sample(WORDS, rng.randrange(1, 3))}
    if depth:
        properties["inner"] = nested(rng, depth - 1)
        if rng.random() < 0.4:
            properties["list"] = {"type": "array", "items": nested(rng, 0), "maxItems": 2}
    return strict(properties)


def references(rng: random.Random) -> Schema:
    return {
        "type": "array", "minItems": 1, "maxItems": 3, "items": {"$ref": "#/$defs/T"},
        "$defs": {
            "T": strict({"who": {"$ref": "#/$defs/W"}, "mood": {"$ref": "#/$defs/M"}, "extra": {"$ref": "#/$defs/E/anyOf/0"}}),
            "W": {"enum": rng.sample(["ann", "bob", "cyd", "dan"], 2)},
            "M": {"enum": ["up", "down", None, 1, True]},
            "E": {"anyOf": [scalar(rng), scalar(rng)]},
        },
    }  # fmt: skip


def recursive(rng: random.Random) -> Schema:
    if rng.random() < 0.5:
        node = strict({"value": scalar(rng), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})
        return {"$ref": "#/$defs/node", "$defs": {"node": node}}
    return strict(
        {
            "label": short_text(rng),
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": rng.randrange(1, 4)},
        }
    )


def enumeration(rng: random.Random) -> Schema:
    values = ["a", "ab", "abc", "", " x ", 0, -1, 2.5, 1e10, None, True, False, [1, 2], {"k": "v"}, "ünï", 'q"uote']
    return strict({"pick": {"enum": rng.sample(values, rng.randrange(1, 8))}, "other": {"enum": rng.sample(WORDS, 3)}})


def constant(rng: random.Random) -> Schema:
    value = rng.choice([1, "fixed", None, True, [1, "two", {"three": 3}], {"a": {"b": []}}, "line\nbreak", -0.5])
    return strict({"version": {"const": value}, "free": scalar(rng)})


def pattern(rng: random.Random) -> Schema:
    return strict({name: {"type": "string", "pattern": rng.choice(PATTERNS)} for name in rng.sample(WORDS, 2)})


def any_of(rng: random.Random) -> Schema:
    options = [
        strict({"kind": {"const": f"k{i}"}, **{name: scalar(rng) for name in rng.sample(WORDS, 2)}})
        for i in range(rng.randrange(2, 5))
    ]
    return {"anyOf": [*options, scalar(rng)]}


def array_bounds(rng: random.Random) -> Schema:
    least = rng.randrange(0, 5)
    return {"type": "array", "items": scalar(rng), "minItems": least, "maxItems": least + rng.randrange(0, 4)}


def tuples(rng: random.Random) -> Schema:
    items = [scalar(rng) for _ in range(rng.randrange(1, 5))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def integer_bounds(rng: random.Random) -> Schema:
    low = rng.randrange(-10_000, 10_000)
    high = low + rng.choice([0, 1, 7, 93, 5000])
    kinds: list[Schema] = [
        {"minimum": low, "maximum": high}, {"exclusiveMinimum": low, "exclusiveMaximum": high + 2}, {"minimum": low, "maximum": low + 10**6},
        {"multipleOf": rng.choice([2, 3, 5, 10, 25]), "minimum": 0, "maximum": 500},
    ]  # fmt: skip
    return strict({"n": {"type": "integer", **rng.choice(kinds)}, "m": {"type": "integer", **rng.choice(kinds)}})


def number_bounds(rng: random.Random) -> Schema:
    low = round(rng.uniform(-100, 100), rng.randrange(0, 3))
    high = low + rng.choice([0.5, 1, 10, 1000])
    kinds: list[Schema] = [{"minimum": low, "maximum": high}, {"exclusiveMinimum": low, "exclusiveMaximum": high}]
    return strict({"x": {"type": "number", **rng.choice(kinds)}, "y": {"type": "number", **rng.choice(kinds)}})


def unicode(rng: random.Random) -> Schema:
    names = rng.sample(UNICODE, 3)
    return strict({name: rng.choice([{"enum": rng.sample(UNICODE, 2)}, scalar(rng)]) for name in names})


def optional(rng: random.Random) -> Schema:
    names = rng.sample(WORDS, 5)
    schema = strict({name: scalar(rng) for name in names})
    return {**schema, "required": rng.sample(names, rng.randrange(0, 3))}


def maps(rng: random.Random) -> Schema:
    return {
        "type": "object", "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 99}}, "required": ["id"],
        "additionalProperties": scalar(rng), "maxProperties": 4,
    }  # fmt: skip


def pattern_properties(rng: random.Random) -> Schema:
    return {
        "type": "object", "patternProperties": {"^n_[a-z]{1,4}$": {"type": "integer"}, "^s_[a-z]{1,4}$": short_text(rng)},
        "additionalProperties": False,
    }  # fmt: skip


def formats(rng: random.Random) -> Schema:
    kinds = rng.sample(["date", "time", "date-time", "email", "ipv4", "uuid", "duration", "ipv6"], 2)
    return strict({f"f{i}": {"type": "string", "format": kind} for i, kind in enumerate(kinds)})


def all_of(rng: random.Random) -> Schema:
    first, second = rng.sample(WORDS, 2)
    return {
        "type": "object",
        "allOf": [
            {"properties": {first: scalar(rng)}, "required": [first]},
            {"properties": {second: {"type": "integer", "minimum": 0}}, "required": [second]},
        ],
        "properties": {second: {"maximum": 99}},
    }


def several_types(rng: random.Random) -> Schema:
    types = rng.sample(["string", "integer", "boolean", "null", "number"], 3)
    return strict(
        {"v": {"type": types, "maxLength": 8}, "w": {"type": ["object", "null"], "properties": {"z": scalar(rng)}}}
    )


def loose(rng: random.Random) -> Schema:
    return rng.choice(
        [{"type": "object"}, {}, {"type": "array", "maxItems": 4}, {"type": "object", "required": ["answer"]}]
    )


def free_text(rng: random.Random) -> Schema:
    return strict({"thought": {"type": "string"}, "answer": {"type": "string"}, "sure": {"type": "boolean"}})


def root_scalar(rng: random.Random) -> Schema:
    return scalar(rng)


FAMILIES: dict[str, Callable[[random.Random], Schema]] = {
    family.__name__: family
    for family in (
        flat, nested, references, recursive, enumeration, constant, pattern, any_of, array_bounds, tuples, integer_bounds,
        number_bounds, unicode, optional, maps, pattern_properties, formats, all_of, several_types, loose, free_text, root_scalar,
    )
}  # fmt: skip


def make_schemas(per_family: int, seed: int = 0) -> list[tuple[str, Schema]]:
    """(family, schema), the same for the same arguments."""
    return [
        (name, family(random.Random(f"{seed}/{name}/{number}")))
        for number in range(per_family)
        for name, family in FAMILIES.items()
    ]
