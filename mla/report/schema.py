"""What a data file must look like besides its columns: fixed vocabularies, and the check that every file passes."""

from pathlib import Path

import pandas as pd

PUBLISHED_COLUMNS = [
    "id",
    "source",
    "place",
    "hardware",
    "batch_size",
    "context_len",
    "metric",
    "value",
    "unit",
    "quote_gist",
    "testable",
]
IMPLEMENTATIONS = [
    "naive",
    "absorbed",
    "torch_compile",
    "torch_compile_paged",
    "online_softmax",
    "split_kv",
    "portable",
    "gluon_simple",
    "gluon_warp_specialised",
    "hopper_without_prefetch",
    "hopper_without_pdl",
    "hopper",
    "flashmla",
    "flashinfer_fa3",
    "flashinfer_fa2",
]
# The finished kernel with one idea switched off: of interest in the staircase only.
ABLATIONS = ["hopper_without_prefetch", "hopper_without_pdl"]
ALLOWED = {
    "implementation": IMPLEMENTATIONS,
    "lengths": ["even", "log-uniform", "one-long"],
    "kernel": ["portable", "hopper"],
    "mode": ["whole", "equal_runs", "even_shares"],
    "prefetch": ["on", "off"],
    "timer": ["cuda_graph", "eager"],
    "form": ["matmul", "sdpa"],
    "cache": ["contiguous", "gathered"],
    "precision": ["bf16", "fp32_scores", "tf32", "fp32"],
    "compile_mode": ["eager", "default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune"],
    "step": ["plan", "call"],
    "l2_state": ["cold"],
    "loads": ["pointer", "descriptor"],
    "model": ["mla_patched", "mla_unpatched", "mha"],
    "fill": ["prefill", "random_rows"],
    "testable": ["yes", "later", "no", "constant"],
    "assembly": ["none", "timed", "untimed"],
}
# What files of one kind have in a column that others have as well.
OF_KIND = {
    "prefill": {
        "implementation": ["fused", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"],
        "timer": ["cuda_graph", "new_length"],
    },
}
# The names that torch prints, and the short ones used here.
DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DEFAULT_PAGE_SIZE = 64
# Columns that came later, and what a file without them holds. No other column may be missing.
LATER_COLUMNS = {"lengths": "even", "kernel": "portable", "mode": None, "prefetch": None, "by_rule": None}


def read_checked(path: Path, columns: list[str], allowed: dict[str, list[str]] = ALLOWED) -> pd.DataFrame:
    """Read a CSV and check columns, fixed vocabularies, statuses and latencies; ValueError says what is wrong.

    A file without one of `LATER_COLUMNS` is read as if it had its value in every row.

    Args:
        path: the file.
        columns: that it must have.
        allowed: column -> what may stand in it.
    """
    frame = pd.read_csv(path)
    frame = frame.assign(**{name: value for name, value in LATER_COLUMNS.items() if name not in frame})
    if missing := [column for column in columns if column not in frame]:
        raise ValueError(
            f"expected the {len(columns)} columns of data/README.md in {path.name}, got none named "
            f"{', '.join(missing)}; measure again with this version"
        )
    if frame.empty:
        raise ValueError(f"expected measurements in {path.name}, got a header alone; measure again")
    frame = frame[columns]
    for column in set(columns) & set(allowed):
        if unknown := sorted(set(frame[column].dropna().astype(str)) - set(allowed[column])):
            raise ValueError(
                f"expected {column} in {path.name} to be one of {', '.join(allowed[column])}, "
                f"got {', '.join(unknown)}; correct the file or extend mla/report/schema.py"
            )
    if "status" in columns:
        check_results(frame, path.name)
        frame = frame.assign(dtype=frame["dtype"].replace(DTYPE_NAMES))
    return frame


def check_results(frame: pd.DataFrame, name: str) -> None:
    """ValueError unless every status is known and exactly the rows that are ok have a positive latency."""
    status = frame["status"].fillna("").astype(str)
    known = status.isin(["ok", "out_of_memory"]) | status.str.startswith(("failed: ", "refused: "))
    if not known.all():
        unknown = ", ".join(sorted({repr(value) for value in status[~known]}))
        raise ValueError(
            f"expected status in {name} to be ok, out_of_memory, 'refused: <reason>' or 'failed: <reason>', got "
            f"{unknown}; fix it"
        )
    latency = frame["latency_us_p50"]
    wrong = frame.index[(latency > 0) != (status == "ok")]
    if len(wrong):
        raise ValueError(
            f"expected a positive latency_us_p50 in {name} where status is ok and none elsewhere, "
            f"got row {wrong[0] + 1} with {latency[wrong[0]]} and {status[wrong[0]]}; measure again"
        )
