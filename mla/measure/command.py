"""What the benchmark's commands of their own have in common: two options, and how they begin and end."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch


def command_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser for `triton-mla-bench NAME` with --output and --seed."""
    parser = argparse.ArgumentParser(prog=f"triton-mla-bench {name}", description=description)
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help="a CSV file, or a folder")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs; kept in the file")
    return parser


def run_command(
    parser: argparse.ArgumentParser, argv: list[str], measure: Callable[[argparse.Namespace, list[str]], int | None]
) -> int:
    """Parse and measure, on a GPU only; a ValueError is told as a wrong option is.

    Args:
        parser: of the command.
        argv: its arguments.
        measure: takes what was parsed, and argv; returns the number of failures that count, if any.

    Returns:
        The exit code, 1 where something failed.
    """
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("expected a CUDA GPU to measure on, found none")
    try:
        return 1 if measure(args, argv) else 0
    except ValueError as error:
        parser.error(str(error))
