"""The command line `hp`: one module per subcommand, each with `add_parser` and `execute`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from hp_core.cli import export, plugins, run
from hp_core.cli.rank_errors import EXIT_USER_ERROR
from hp_core.errors import HpError

OVERRIDE = re.compile(r"--[A-Za-z_][\w.\[\]]*=.*", re.DOTALL)

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one `hp` command and return its exit code.

    0: done; 2: something that the user can fix, told in one line on stderr; 130: interrupted. Other exceptions are
    defects and pass through with their traceback.
    """
    arguments = _parse(argv)
    try:
        code: int = arguments.execute(arguments)
    except HpError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hp", description="Train HuggingFace models on many devices.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (run, export, plugins):
        command.add_parser(commands)
    given = list(sys.argv[1:] if argv is None else argv)
    # argparse takes an option with a space in it for a positional argument.
    spaced = [each for each in given if " " in each and OVERRIDE.fullmatch(each)]
    arguments, unknown = parser.parse_known_args([each for each in given if each not in spaced])
    wrong = [each for each in unknown if not OVERRIDE.fullmatch(each)]
    overrides = [each for each in given if each in spaced or (each in unknown and each not in wrong)]
    if wrong or (overrides and getattr(arguments, "config", None) is None):
        parser.error(f"unrecognized arguments: {' '.join(wrong or overrides)}")
    arguments.overrides = overrides
    return arguments
