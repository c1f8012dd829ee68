"""The `octavo` command. Nothing heavy is imported before a command needs it: --help answers at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

_HELP = """\
usage: octavo COMMAND ...

Serve a language model through an OpenAI-compatible API, or use it from the terminal.

  octavo serve       serve a model over HTTP
  octavo generate    one answer in the terminal
  octavo bench       load, measure and compare servers
  octavo config      print the settings in force and where each comes from
  octavo inspect     what a model's files hold
  octavo cache       what is kept of packed models: list, clear
  octavo --version   the version

Each command explains itself: octavo serve --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit code: 0, 1 (a problem, said on stderr) or 2 (a command line in error)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve,
        "generate": _generate,
        "bench": _bench,
        "config": _config,
        "inspect": _inspect,
        "cache": _cache,
        "--version": _version,
        "--help": _help,
        "-h": _help,
        "help": _help,
    }
    command = commands.get(name)
    if command is None:
        print(f"octavo: no command {name!r}\n\n{_HELP}", end="", file=sys.stderr)  # noqa: T201
        return 2
    try:
        return command(arguments[1:])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `octavo config | head`
        sys.stderr.close()
        return 0


def _help(arguments: list[str]) -> int:
    print(_HELP, end="")  # noqa: T201
    return 0


def _version(arguments: list[str]) -> int:
    from server.version import version

    print(f"octavo {version()}")  # noqa: T201
    return 0


def _serve(arguments: list[str]) -> int:
    from server import flags

    loaded = flags.parse_serve(arguments)
    from server.logs import configure_logging
    from server.serve import serve

    configure_logging(loaded.settings.log_level, loaded.settings.log_format)
    return serve(loaded.settings)


def _generate(arguments: list[str]) -> int:
    from server import flags

    loaded, wish = flags.parse_generate(arguments)
    from server.generate import generate

    return generate(loaded.settings, wish)


def _config(arguments: list[str]) -> int:
    from server import flags

    print(flags.describe(flags.parse_config(arguments)))  # noqa: T201
    return 0


def _bench(arguments: list[str]) -> int:
    from loadtest.cli import main as bench

    return bench(arguments)


def _inspect(arguments: list[str]) -> int:
    from server.inspect_model import main as inspect

    return inspect(arguments)


def _cache(arguments: list[str]) -> int:
    from server.cache_command import main as cache

    return cache(arguments)


if __name__ == "__main__":
    sys.exit(main())
