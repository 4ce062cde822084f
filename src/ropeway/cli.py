"""The command line: flags made from the fields of the configuration, and the exit codes.

Owns: parsing, the flags of other servers that we accept or refuse, how an error is told. Must not know: what the flags
do. Called by: the console script. It is imported by the spawned engine, too (as its parent's main module), so nothing
heavy may be imported at the top.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import click

from ropeway import __version__
from ropeway.config import SECTIONS, Config, build_config
from ropeway.errors import ConfigError, EngineDeadError

EXIT_FAILED = 1
EXIT_USAGE = 2

# Flags of the best-known server that we do not have. Where ignoring one cannot change a result, its users' scripts go
# on working, with one warning line; where it would, they are told. Keep these short.
IGNORED_SWITCHES = frozenset(
    {
        "--disable-custom-all-reduce",
        "--disable-frontend-multiprocessing",
        "--disable-log-requests",
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
        "--enable-auto-tool-choice",  # tools are always on
        "--no-enable-log-stats",
        "--trust-remote-code",  # code from a model repository is never run
        "--use-v2-block-manager",
    }
)
ANY: tuple[str, ...] = ()
IGNORED_VALUES: dict[str, tuple[str, ...]] = {  # flag -> the values that may be ignored; any other is refused
    "--chat-template-content-format": ("auto", "string"),
    "--compilation-config": ANY,
    "--cpu-offload-gb": ("0",),
    "--data-parallel-size": ("1",),
    "--distributed-executor-backend": ("mp", "uni"),
    "--kv-offloading-size": ("0",),
    "--max-num-partial-prefills": ("1",),
    "--max-seq-len-to-capture": ANY,
    "--num-scheduler-steps": ("1",),
    "--pipeline-parallel-size": ("1",),
    "--quantization": ("none", "None"),
    "--runner": ("auto", "generate"),
    "--stream-interval": ANY,
    "--swap-space": ANY,
    "--task": ("auto", "generate"),
    "--tokenizer-mode": ("auto",),
    "--uvicorn-log-level": ANY,
}
NOT_SUPPORTED = frozenset(
    {
        "--default-chat-template-kwargs",
        "--enable-lora",
        "--hf-overrides",
        "--logits-processors",
        "--lora-modules",
        "--otlp-traces-endpoint",
        "--override-generation-config",
        "--speculative-config",
    }
)
SHORT_NAMES = {"-q": "--quantization", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0, 1 for a failure at run time, 2 for what the user can mend."""
    try:
        result = cli.main(
            args=list(sys.argv[1:] if arguments is None else arguments), prog_name="ropeway", standalone_mode=False
        )
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        return _complain(error.format_message(), EXIT_USAGE)
    except ConfigError as error:
        return _complain(str(error), EXIT_USAGE)
    except EngineDeadError as error:
        return _complain(str(error), EXIT_FAILED)
    except (KeyboardInterrupt, click.Abort):
        return 130


def _complain(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"ropeway: error: {line}", file=sys.stderr, flush=True)
    return code


def plain_flag(text: str) -> str:
    """`--max_model_len` is accepted as `--max-model-len`."""
    return text.replace("_", "-")


def adapt_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Other servers' spellings made ours: ``(arguments for our parser, warnings)``.

    Takes out flags that may be ignored, and spreads `MODEL --api-key a b` to `--api-key a --api-key b`. The latter
    only once the model has been named: before it, the second word is the model. Raises ConfigError.
    """
    flags = _flag_kinds()
    kept: list[str] = []
    warnings: list[str] = []
    has_model = False
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*kept, argument, *rest], warnings
        if not argument.startswith("-"):
            has_model = True
            kept.append(argument)
            continue
        name, has_value, value = argument.partition("=")
        name = plain_flag(name)
        name = SHORT_NAMES.get(name, name)
        if name in NOT_SUPPORTED:
            raise ConfigError(f"{name} is not supported yet")
        if name in IGNORED_SWITCHES:
            warnings.append(f"{name} is ignored")
            continue
        if name in IGNORED_VALUES:
            value = value if has_value else (rest.pop(0) if rest else "")
            if IGNORED_VALUES[name] is not ANY and value not in IGNORED_VALUES[name]:
                raise ConfigError(f"{name} {value} is not supported yet")
            warnings.append(f"{name} is ignored")
            continue
        kept.append(argument)
        kind = flags.get(name, "switch")
        if kind != "switch" and not has_value and rest:
            kept.append(rest.pop(0))
        while kind == "list" and has_model and rest and not rest[0].startswith("-"):
            kept += [name, rest.pop(0)]
    return kept, warnings


def _fields() -> list[tuple[str, dataclasses.Field[Any], Any]]:
    """(section, field, type) of every setting."""
    return [
        (section, field, typing.get_type_hints(kind)[field.name])
        for section, kind in SECTIONS.items()
        for field in dataclasses.fields(kind)
    ]


def _flag_kinds() -> dict[str, str]:
    kinds = {"--config": "value", "--help": "switch", "-h": "switch"}
    for _, field, hint in _fields():
        kind = "switch" if hint is bool else "list" if typing.get_origin(hint) is tuple else "value"
        kinds |= dict.fromkeys((_flag(field), *field.metadata["flags"]), kind)
    return kinds


def _flag(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


class _Flag(click.Option):
    """A setting's flag. Values stay text: build_config is the one place that reads them, wherever they come from."""

    def __init__(self, section: str, field: dataclasses.Field[Any], hint: Any) -> None:
        self.section = section
        flag, default, is_list = _flag(field), field.default, typing.get_origin(hint) is tuple
        help = field.metadata["help"]
        if default not in ("", ()):
            help += f" [default: {str(default).lower() if isinstance(default, bool) else default}]"
        if hint is bool:
            super().__init__([f"{flag}/--no-{flag[2:]}"], default=None, help=help)
            return
        if typing.get_origin(hint) is Literal:
            metavar = "|".join(typing.get_args(hint))
        else:
            metavar = field.metadata["parse"] or ("text" if hint is str or is_list else hint.__name__)
        super().__init__(
            [field.name, flag, *field.metadata["flags"]],
            type=str,
            multiple=is_list,
            default=None,
            metavar=metavar.upper() if metavar in ("text", "size", "int", "float") else metavar,
            help=help,
        )


class _EngineCommand(click.Command):
    """A command with a model and the engine's flags. Parses what adapt_arguments left, and groups the flags in its help like the configuration."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args, warnings = adapt_arguments(args)
        for warning in warnings:
            print(f"ropeway: warning: {warning}", file=sys.stderr, flush=True)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(parameter, "section", "general"), []).append(record)
        for title, records in groups.items():
            with formatter.section(title.capitalize()):
                formatter.write_dl(records)


def _settings(model_argument: str | None, config: str | None, flags: dict[str, Any]) -> Config:
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    if model_argument is not None:
        if given.get("model", model_argument) != model_argument:
            raise ConfigError(f"two models are named: {model_argument} and --model {given['model']}")
        given["model"] = model_argument
    return build_config(given, os.environ, Path(config) if config else None)


def _run_serve(model_argument: str | None, config: str | None, **flags: Any) -> int:
    settings = _settings(model_argument, config, flags)

    from ropeway.serve import serve  # the HTTP stack has no business in `ropeway --help`, nor in the engine process

    code: int = serve(settings)
    return code


def _model_parameters() -> list[click.Parameter]:
    return [
        click.Argument(["model_argument"], metavar="[MODEL]", required=False),
        click.Option(["--config"], metavar="FILE", help="TOML file with settings; the environment and flags win."),
    ]


ENGINE_CONTEXT: dict[str, Any] = {"token_normalize_func": plain_flag, "max_content_width": 120}


def _offline_command(name: str, short_help: str, module: Any) -> click.Command:
    """A bench command that runs an engine: its own flags and the engine's, of which it may have other defaults."""
    own: list[click.Parameter] = module.flags()
    names = [parameter.name for parameter in own]

    def run(model_argument: str | None, config: str | None, **values: Any) -> int:
        flags = {name: values.pop(name) for name in names}
        given = {name: value for name, value in values.items() if value is not None}
        settings = _settings(model_argument, config, {**module.DEFAULTS, **given})

        from ropeway.bench.offline import EngineParts

        code: int = module.run(settings, flags, EngineParts(settings))
        return code

    engine = [_Flag(*setting) for setting in _fields() if setting[0] != "server"]
    return _EngineCommand(
        name,
        callback=run,
        short_help=short_help,
        help=module.HELP,
        params=[*_model_parameters(), *own, *engine],
        context_settings=ENGINE_CONTEXT,
    )


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="ropeway %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Ropeway: an OpenAI-compatible inference server."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


cli.add_command(
    _EngineCommand(
        "serve",
        callback=_run_serve,
        short_help="Serve a model.",
        help="Serve MODEL: a Hugging Face folder, a .gguf file or a hub id. Without one, a small demo model is served.\n\n"
        "Each flag may also stand in a TOML file (--config) or in the environment (ROPEWAY_MAX_NUM_SEQS=64).",
        params=[*_model_parameters(), *(_Flag(*setting) for setting in _fields())],
        context_settings=ENGINE_CONTEXT,
    )
)


class _BenchGroup(click.Group):
    """Each command is a module of its name, imported when it is called."""

    COMMANDS: typing.ClassVar = {
        "latency": "Time of one batch, without a server.",
        "serve": "Load on a running OpenAI-compatible server.",
        "startup": "Time from process start to the first token.",
        "throughput": "Tokens per second, without a server.",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.COMMANDS:
            return None
        module = importlib.import_module(f"ropeway.bench.{cmd_name}")
        if not hasattr(module, "command"):
            return _offline_command(cmd_name, self.COMMANDS[cmd_name], module)
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.COMMANDS.items()))


cli.add_command(_BenchGroup("bench", help="Measure: a server under load, or the engine alone."))
