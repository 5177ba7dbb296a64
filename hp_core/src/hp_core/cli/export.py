"""`hp export CHECKPOINT OUT`: a HuggingFace folder from a training checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the arguments of `hp export`."""
    parser = commands.add_parser(
        "export", help="write a HuggingFace folder from a training checkpoint", allow_abbrev=False
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of one training checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--dtype", help="dtype of the written tensors, such as bfloat16 (default: as stored)")
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Write the folder. Returns the exit code."""
    from hp_core.models.export import export_hf

    export_hf(arguments.checkpoint, arguments.out, arguments.dtype)
    return 0
