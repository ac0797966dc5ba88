"""What a run measures: which cases, and which implementations at each of them."""

import argparse
import itertools
from dataclasses import replace

from mla.measure.cases import CPU_CASES, GROUPS, SHORTEST, SIXTEEN_SHAPES, Case
from mla.measure.implementations import ABLATIONS, IMPLEMENTATIONS, STAIRCASE, available

_SHAPE = ("batch_size", "context_len", "num_heads", "page_size", "lengths")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose cases and implementations."""
    cases = parser.add_argument_group("cases (default: the 16 shapes of the figure)")
    cases.add_argument(
        "--cases",
        nargs="+",
        choices=(*GROUPS, "all"),
        metavar="NAME",
        help=f"groups of cases, in place of a shape: {', '.join(GROUPS)} or all; staircase has implementations of its "
        f"own, {' and '.join(ABLATIONS)} among them",
    )
    cases.add_argument("--batch-size", type=int, nargs="+", metavar="N", help="requests")
    cases.add_argument("--context-len", type=int, nargs="+", metavar="N", help="cached tokens of the longest request")
    cases.add_argument("--num-heads", type=int, nargs="+", metavar="N", help="query heads")
    cases.add_argument("--page-size", type=int, nargs="+", metavar="N", help="tokens a page")
    cases.add_argument("--lengths", nargs="+", choices=tuple(SHORTEST), help="how the requests' lengths are spread")
    cases.add_argument(
        "--part",
        metavar="I/N",
        default="",
        help="every N-th of the cases from the I-th on: N runs on as many GPUs share them, and may write one file",
    )
    cases.add_argument("--dtype", choices=("bfloat16", "float16"), help="default: bfloat16, without a GPU float16")
    parser.add_argument("--implementations", nargs="+", metavar="ID", help=f"of {', '.join(IMPLEMENTATIONS)}")


def select(args: argparse.Namespace, has_gpu: bool) -> dict[Case, list[str]]:
    """The cases in order, each with the implementations to measure.

    Args:
        args: what a parser with `add_arguments` parsed.
        has_gpu: whether a CUDA GPU is there.

    Raises:
        ValueError: options that exclude each other, or that this machine cannot serve.
    """
    names = list(available(args.implementations, has_gpu))
    wanted: dict[Case, set[str]] = {}
    for group, cases in _chosen_cases(args, has_gpu).items():
        if args.implementations:
            implementations = set(names)
        elif group == "staircase":
            implementations = set(STAIRCASE)
        else:
            implementations = set(names) - set(ABLATIONS)
        for case in cases:
            wanted.setdefault(case, set()).update(implementations)
    first, step = _part(args.part)
    return {case: [name for name in names if name in wanted[case]] for case in list(wanted)[first - 1 :: step]}


def _part(text: str) -> tuple[int, int]:
    """I and N of "I/N"; 1 and 1 of ""."""
    first, _, number = (text or "1/1").partition("/")
    if not (first.isdigit() and number.isdigit() and 1 <= int(first) <= int(number)):
        raise ValueError(f"--part: expected I/N with I from 1 to N, such as 1/2, got {text!r}")
    return int(first), int(number)


def _chosen_cases(args: argparse.Namespace, has_gpu: bool) -> dict[str, list[Case]]:
    """The cases by group; "given" for a shape of the command line, and for the few cases without a GPU."""
    shape = {k: getattr(args, k) for k in _SHAPE}
    given = [f"--{k.replace('_', '-')}" for k, values in shape.items() if values]
    dtype = args.dtype or ("bfloat16" if has_gpu else "float16")
    if not has_gpu and dtype == "bfloat16":
        raise ValueError("--dtype: expected float16 without a GPU, since Triton's interpreter cannot multiply bfloat16")
    if args.cases and given:
        raise ValueError(f"--cases: expected groups or a shape, got both, {', '.join(given)} too; leave one out")
    if args.cases and not has_gpu:
        raise ValueError(
            "--cases: expected a GPU, since these cases are too large for Triton's interpreter; give a small shape, "
            "such as --batch-size 2 --context-len 70"
        )
    if given:
        # what is not given is usual; without a GPU a small shape is
        usual = SIXTEEN_SHAPES if has_gpu else (Case(2, 70, num_heads=16),)
        values = [shape[k] or sorted({getattr(c, k) for c in usual}) for k in _SHAPE]
        groups = {"given": [Case(**dict(zip(_SHAPE, v, strict=True))) for v in itertools.product(*values)]}
    elif has_gpu:
        named = args.cases or ["sixteen"]
        groups = {name: cases for name, cases in GROUPS.items() if name in named or "all" in named}
    else:
        groups = {"given": CPU_CASES}
    return {name: [replace(case, dtype=dtype) for case in cases] for name, cases in groups.items()}
