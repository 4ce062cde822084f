"""The flags that several bench commands share, spelled as users know them from `vllm bench`.

Owns: the dataset flags and their help, lists after one flag, flags that may be ignored. Must not know: what is measured.
Called by: bench.serve and its neighbours.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import click

from ropeway.bench.datasets import DATASET_NAMES, DatasetOptions, PromptForm
from ropeway.errors import ConfigError

DATASET_HELP = {
    "dataset_name": "What to send: " + ", ".join(DATASET_NAMES) + ".",
    "dataset_path": "File of a sharegpt (JSON), custom (JSONL) or timed_trace (CSV, JSONL) dataset.",
    "num_prompts": "Number of requests.",
    "no_oversample": "Do not repeat the lines of a file that has fewer than --num-prompts.",
    "disable_shuffle": "Keep the order of the file, or of the prefixes.",
    "skip_chat_template": "Send custom prompts to a completions endpoint as they are.",
    "max_total_len": "Traces and generators: cut prompts so that prompt and answer have at most so many tokens.",
    "random_input_len": "Prompt tokens of the random dataset.",
    "random_output_len": "Output tokens of the random dataset.",
    "random_range_ratio": "Draw both lengths from length * (1 - ratio) to length * (1 + ratio).",
    "random_prefix_len": "Tokens before them that all requests share.",
    "prefix_repetition_prefix_len": "Tokens of a prefix.",
    "prefix_repetition_suffix_len": "Tokens after it, different in each request.",
    "prefix_repetition_num_prefixes": "Number of prefixes; each is shared by num-prompts / num-prefixes requests.",
    "prefix_repetition_output_len": "Output tokens.",
    "sharegpt_output_len": "Output tokens, instead of the length of the recorded answer.",
    "custom_output_len": "Output tokens; -1 takes each line's output_tokens.",
    "anyscale_input_len": "Prompt tokens of the anyscale-exp dataset.",
    "anyscale_mean_output_len": "Mean of its exponential distribution of output tokens.",
    "anyscale_max_output_len": "Output tokens are cut here.",
    "timed_trace_sec_multiplier": "What makes seconds of the trace's times: 0.001 for milliseconds.",
    "timed_trace_chunk_hash_size": "Tokens that each of a row's hash_ids stands for.",
}
# One flag for the length, whatever the dataset.
INPUT_LENGTHS = ("random_input_len", "anyscale_input_len")
OUTPUT_LENGTHS = ("random_output_len", "prefix_repetition_output_len", "sharegpt_output_len", "custom_output_len")
# Users' scripts carry these; they cannot change a result here. Each takes a value or not.
IGNORED_SWITCHES = frozenset({"--trust-remote-code", "--no-stream"})
IGNORED_VALUES = frozenset({"--tokenizer-mode"})


def dataset_flags() -> list[click.Parameter]:
    """For a command's ``params``."""
    hints = typing.get_type_hints(DatasetOptions)
    options: list[click.Parameter] = [
        click.Option(["--seed"], type=int, default=0, show_default=True, help="Of all random draws."),
        click.Option(["--input-len"], type=int, help="Prompt tokens, for datasets that have one length."),
        click.Option(["--output-len"], type=int, help="Output tokens, likewise."),
    ]
    for field in dataclasses.fields(DatasetOptions):
        if field.name not in DATASET_HELP:
            continue
        flag = "--" + field.name.replace("_", "-")
        help, hint = DATASET_HELP[field.name], hints[field.name]
        if hint is bool:
            options.append(click.Option([flag], is_flag=True, help=help))
            continue
        kind: Any = float if hint is float else str if hint is str else int
        choices = click.Choice(DATASET_NAMES) if field.name == "dataset_name" else kind
        shown = field.default not in (None, "")
        metavar = "NAME" if field.name == "dataset_name" else None  # the help lists them, as they are spelled
        option = click.Option(
            [flag], type=choices, default=field.default, show_default=shown, metavar=metavar, help=help
        )
        options.append(option)
    return options


def take_dataset_options(flags: dict[str, Any], prompt_form: PromptForm) -> DatasetOptions:
    """Takes the dataset flags, the seed excepted, out of a command's ``flags``."""
    taken = {field: flags.pop(field) for field in DATASET_HELP}
    for flag, fields in (("input_len", INPUT_LENGTHS), ("output_len", OUTPUT_LENGTHS)):
        if (length := flags.pop(flag)) is not None:
            taken |= dict.fromkeys(fields, length)
    return DatasetOptions(**taken, prompt_form=prompt_form)


def pairs(flag: str, items: tuple[str, ...], separator: str = "=") -> dict[str, str]:
    """`KEY=VALUE` arguments. Raises ConfigError."""
    found = {}
    for item in items:
        key, has_value, value = item.partition(separator)
        if not key.strip() or not has_value:
            raise ConfigError(f"{flag} {item}: write it as KEY{separator}VALUE")
        found[key.strip()] = value.strip()
    return found


def numbers(flag: str, text: str) -> list[float]:
    """Comma-separated. Raises ConfigError."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{flag} {text}: write numbers with commas between them") from None


class BenchCommand(click.Command):
    """A command that takes several values after a flag that may be given several times, and `--num_prompts` for
    `--num-prompts`."""

    def __init__(self, name: str, **more: Any) -> None:
        settings = {"token_normalize_func": _plain, "max_content_width": 120}
        super().__init__(name, context_settings=settings, **more)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        lists = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        spread: list[str] = []
        rest = list(args)
        while rest:
            argument = rest.pop(0)
            name = _plain(argument.partition("=")[0])
            if name in IGNORED_SWITCHES or name in IGNORED_VALUES:
                click.echo(f"ropeway: warning: {name} is ignored", err=True)
                if name in IGNORED_VALUES and "=" not in argument and rest:
                    rest.pop(0)
                continue
            spread.append(argument)
            if name in lists:
                if "=" not in argument and rest:
                    spread.append(rest.pop(0))
                while rest and not rest[0].startswith("-"):
                    spread += [name, rest.pop(0)]
        return super().parse_args(ctx, spread)


def _plain(text: str) -> str:
    return text.replace("_", "-")
