"""Compare implementations over the sixteen shapes: ratios of latencies, wins, and what is missing."""

from itertools import pairwise, product

import numpy as np
import pandas as pd

from mla.report.schema import ABLATIONS, DEFAULT_PAGE_SIZE

BATCH_SIZES = (8, 32, 64, 128)
CONTEXT_LENS = (1024, 4096, 16384, 32768)
SHAPES = pd.MultiIndex.from_tuples(list(product(BATCH_SIZES, CONTEXT_LENS)), names=["batch_size", "context_len"])
# The stronger opponent first: it decides the verdicts.
OPPONENTS = ("torch_compile", "torch_compile_paged")
# A compiled row stands out if its time a token is over this many times the mean of its context neighbours'.
OUTLIER = 1.25


def contestants(frame: pd.DataFrame) -> pd.DataFrame:
    """All rows but those of the ablations, which belong to the staircase only."""
    return frame[~frame["implementation"].isin(ABLATIONS)]


def finished(frame: pd.DataFrame) -> str:
    """The finished kernel of a file: `hopper` where it was measured, else `portable`."""
    return "hopper" if (frame["implementation"] == "hopper").any() else "portable"


def usual(frame: pd.DataFrame, timer: str = "cuda_graph") -> pd.DataFrame:
    """The usual rows of `any_lengths` whose requests are all equally long."""
    rows = any_lengths(frame, timer)
    return rows[rows["lengths"] == "even"]


def any_lengths(frame: pd.DataFrame, timer: str = "cuda_graph") -> pd.DataFrame:
    """The rows with one query token, bf16, contiguous or pages of 64, one timer; any heads, shape and lengths."""
    pages = frame["page_size"].isna() | (frame["page_size"] == DEFAULT_PAGE_SIZE)
    return frame[(frame["q_len"] == 1) & (frame["dtype"] == "bf16") & pages & (frame["timer"] == timer)]


def at_shapes(frame: pd.DataFrame, implementation: str, timer: str = "cuda_graph") -> pd.DataFrame:
    """One implementation at the sixteen shapes with 128 heads, a row a shape; a shape not measured is a row of NaN."""
    rows = usual(frame, timer)
    rows = rows[(rows["implementation"] == implementation) & (rows["num_heads"] == 128)]
    return rows.set_index(list(SHAPES.names)).reindex(SHAPES)


def ratios(frame: pd.DataFrame, implementation: str, opponent: str, timer: str = "cuda_graph") -> pd.DataFrame:
    """How many times as fast one implementation is as another, by median latency.

    Returns:
        A row for each of the sixteen shapes: `ratio` (over 1: `implementation` is faster; NaN: no answer), `level`
        (the p20-p80 ranges overlap), `outlier` (the opponent's row is in `outliers`) and `gap` (why there is no
        answer, else empty).
    """
    ours, theirs = at_shapes(frame, implementation, timer), at_shapes(frame, opponent, timer)
    # A rate is there exactly where the result is valid.
    both = ours["tflops"].notna() & theirs["tflops"].notna()
    level = (ours["latency_us_p20"] <= theirs["latency_us_p80"]) & (theirs["latency_us_p20"] <= ours["latency_us_p80"])
    gaps = [
        _gap(implementation, mine) or _gap(opponent, other)
        for (_, mine), (_, other) in zip(ours.iterrows(), theirs.iterrows(), strict=True)
    ]
    return pd.DataFrame(
        {
            "ratio": (theirs["latency_us_p50"] / ours["latency_us_p50"]).where(both),
            "level": level & both,
            "outlier": theirs["row_id"].map(without_timer, na_action="ignore").isin(outliers(frame)),
            "gap": gaps,
        }
    )


def _gap(implementation: str, row: pd.Series) -> str:
    """Why a row gives no number, or an empty string."""
    if pd.isna(row["status"]):
        return f"{implementation}: not measured"
    if row["status"] == "out_of_memory":
        return f"{implementation}: out of memory"
    return "" if row["usable"] else f"{implementation}: failed"


def count_wins(table: pd.DataFrame) -> str:
    """`13 of 16`, from `ratios`; the second number counts only the shapes that can be compared."""
    return f"{(table['ratio'] > 1).sum()} of {table['ratio'].notna().sum()}"


def outliers(frame: pd.DataFrame) -> set[str]:
    """Row ids without timer of torch.compile's rows that look like an accident of its autotuning.

    A fixed cost makes the time a token fall as the context grows, and always stay below the mean of both context
    neighbours; a row that is above both neighbours and over `OUTLIER` times their mean is slow for another reason.
    """
    found = set()
    for opponent in OPPONENTS:
        rows = at_shapes(frame, opponent)
        tokens = rows.index.get_level_values("batch_size") * rows.index.get_level_values("context_len")
        cost = rows["latency_us_p50"].where(rows["tflops"].notna()) / tokens
        before, after = (cost.groupby(level="batch_size").shift(step) for step in (1, -1))
        # Where a neighbour is missing the limit is NaN, and nothing is above it.
        limit = np.maximum(OUTLIER * (before + after) / 2, np.maximum(before, after))
        found |= set(rows.loc[cost > limit, "row_id"].map(without_timer))
    return found


def without_timer(row_id: str) -> str:
    """The part of a row id that both timers share."""
    return row_id.rsplit("/", 1)[0]


def outlier_wins(table: pd.DataFrame) -> str:
    """What to say after `count_wins` where a win is due to the opponent's outlier, or an empty string."""
    shapes = table.index[table["outlier"] & (table["ratio"] > 1)]
    names = ", ".join(shape_name(*shape) for shape in shapes)
    return (
        f", where {names} is won against what looks like an outlier of torch.compile († in the results)"
        if names
        else ""
    )


def growth_steps(ratio: pd.Series) -> tuple[int, int]:
    """Count the steps to the next batch size or context over which `ratio` (a value a shape) grows, and all steps."""
    grid = ratio.reset_index().pivot_table(index="batch_size", columns="context_len", values="ratio", dropna=False)
    steps = [
        later - earlier
        for table in (grid, grid.T)
        for line in table.to_numpy().tolist()
        for earlier, later in pairwise(line)
    ]
    known = [step for step in steps if pd.notna(step)]
    return sum(step > 0 for step in known), len(known)


def shape_name(batch_size: float, context_len: float) -> str:
    """`128 x 32K`."""
    return f"{int(batch_size)} x {tokens_name(context_len)}"


def tokens_name(tokens: float) -> str:
    """`32K` for 32768; a count that is no multiple of 1024 is written out."""
    return f"{int(tokens) // 1024}K" if int(tokens) % 1024 == 0 else str(int(tokens))
