"""`triton-mla-bench generate`: tokens per second, time per token and memory of whole models over the context length.

Three models of one hidden size, number of heads and FFN, few layers, random weights, bf16: one with MLA as
transformers decodes it, the same after `mla.patch_model`, and one with plain multi-head attention. The loop is the
library's `generate` with a preallocated cache. Up to --prefill tokens the context is a prompt that the model reads;
beyond, where the models that rebuild or mask everything would not fit or take minutes, the cache is filled with random
rows.
"""

import argparse
import sys

from mla.measure import records
from mla.measure.bench import Progress
from mla.measure.command import command_parser, run_command
from mla.measure.pipeline_worker import ANSWER_BEGINS, MODELS, PipelineCase
from mla.measure.subprocesses import answers_in_process
from mla.schema import PIPELINE_COLUMNS

CONTEXTS = tuple(2**n for n in range(10, 18))
_KEYS = ("model", "batch_size", "context_len", "num_layers", "compiled")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("generate", __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS), metavar="N", help="tokens")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--prefill", type=int, default=8192, metavar="N", help="longest context that is a real prompt")
    parser.add_argument("--compiled", action="store_true", help="let `generate` compile decoding: half a minute a case")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="limit of one case")
    return parser


def cases(args: argparse.Namespace) -> list[PipelineCase]:
    """What the command line asks for, model by model."""
    return [
        PipelineCase(
            model, args.batch_size, n, is_prefilled=n <= args.prefill, is_compiled=args.compiled, num_layers=args.layers
        )
        for model in args.models
        for n in args.contexts
    ]


def row(case: PipelineCase, answer: dict[str, object], run_id: str) -> dict[str, object]:
    """A row of the file."""
    columns = {
        "model": case.model,
        "batch_size": case.batch_size,
        "context_len": case.context_len,
        "num_layers": case.num_layers,
        "hidden_size": case.hidden_size,
        "num_heads": case.num_heads,
        "dtype": "bf16",
        "fill": "prefill" if case.is_prefilled else "random_rows",
        "compiled": case.is_compiled,
        "run_id": run_id,
    }
    return dict.fromkeys(PIPELINE_COLUMNS) | columns | answer


def measure(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure what has no row yet, and print it; returns the number of cases that failed."""
    path = records.output_path(args.output, "pipeline")
    records.check_columns(path, PIPELINE_COLUMNS)
    run_id = records.start_run(path, ["generate", *argv], args.seed)
    done = {tuple(found[k] for k in _KEYS) for found in records.read_rows(path)}
    todo = [case for case in cases(args) if tuple(str(row(case, {}, run_id)[k]) for k in _KEYS) not in done]
    progress, num_failed = Progress(len(todo)), 0
    for model in args.models:
        own = [case for case in todo if case.model == model]
        command = [sys.executable, "-m", "mla.measure.pipeline_worker"]
        for case, answer, reason in answers_in_process(command, own, begins=ANSWER_BEGINS, timeout_s=args.timeout):
            made = row(case, answer or {"status": reason}, run_id)
            num_failed += str(made["status"]).startswith("failed")
            records.append_rows(path, PIPELINE_COLUMNS, [made])
            progress.step(f"{model} {case.context_len}: {_summary(made)}")
            print(f"{model:14} b{case.batch_size:<4} n{case.context_len:<7} {_summary(made)}", flush=True)
    progress.close()
    return num_failed


def _summary(made: dict[str, object]) -> str:
    if made["status"] != "ok":
        return str(made["status"])
    peak = (made["decode_peak_bytes"] or 0) / 2**30
    return (
        f"{made['latency_us_p50'] / 1e3:8.3f} ms a step, {made['tokens_per_s']:8.1f} tokens/s, cache "
        f"{made['cache_bytes'] / 2**30:6.2f} GiB, peak {peak:6.2f} GiB ({made['fill']})"
    )


def main(argv: list[str]) -> int:
    """Measure; returns the exit code."""
    return run_command(_parser(), argv, measure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
