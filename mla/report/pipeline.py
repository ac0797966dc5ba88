"""Whole models over the context length: which rows belong together, and how many times as fast one is as another."""

import pandas as pd

from mla.report.compare import tokens_name

MODELS = ["mla_patched", "mla_unpatched", "mha"]
GIB = 2**30


def main_rows(frame: pd.DataFrame | None) -> pd.DataFrame | None:
    """The rows that figure and claims look at: eager ones where both were measured, at the most measured batch size.

    Args:
        frame: what `data.load_study(..., "pipeline")` returns.

    Returns:
        Rows of one batch size and one way to run, sorted; None where there is none.
    """
    if frame is None or frame.empty:
        return None
    keys = ["batch_size", "num_layers", "compiled"]
    counts = frame.groupby(keys, sort=True)["model"].count().reset_index(name="rows")
    # most rows; among equals eager ones and the larger batch
    best = counts.sort_values(["rows", "compiled", "batch_size"], ascending=[False, True, False]).iloc[0]
    rows = frame[(frame[keys] == best[keys]).all(axis=1)]
    return rows.sort_values(["model", "context_len"]).reset_index(drop=True)


def by_context(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """One model's rows, by context length."""
    return rows[rows["model"] == model].set_index("context_len").sort_index()


def leads(rows: pd.DataFrame, opponent: str) -> pd.Series:
    """How many times as fast a step of the patched model is as the opponent's, by context; without results no row."""
    times = [by_context(rows, model)["latency_us_p50"] for model in (opponent, "mla_patched")]
    return (times[0] / times[1]).dropna()


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a context length.

    Args:
        rows: what `main_rows` returns.

    Returns:
        Index context_len; columns are pairs: "ms a step" and "peak GiB" of each of `MODELS`, and the patched model
        "times as fast as" its opponents (`leads`). NaN where there is no result.
    """
    columns = {}
    for title, column, unit in (("ms a step", "latency_us_p50", 1e3), ("peak GiB", "decode_peak_bytes", GIB)):
        columns |= {(title, model): by_context(rows, model)[column] / unit for model in MODELS}
    columns |= {("times as fast as", opponent): leads(rows, opponent) for opponent in MODELS[1:]}
    return pd.DataFrame(columns).sort_index()


def faster_from(rows: pd.DataFrame, opponent: str) -> int | None:
    """The context length from which on the patched model is faster beyond the spread of the steps, or None.

    That is: at this and every longer context that both have, four fifths of its steps take less time than four fifths
    of the opponent's do.
    """
    ours, theirs = by_context(rows, "mla_patched"), by_context(rows, opponent)
    gap = (theirs["latency_us_p20"] - ours["latency_us_p80"]).dropna()
    found = None
    for context_len, us in gap.sort_index(ascending=False).items():
        if us <= 0:
            break
        found = int(context_len)
    return found


def lead_sentence(rows: pd.DataFrame, opponent: str, name: str) -> str:
    """Between what the median lead over `opponent` lies, where it is the largest, and from where on it is clear.

    Args:
        rows: what `main_rows` returns.
        opponent: one of `MODELS`.
        name: of the opponent, for the sentence.
    """
    lead, first = leads(rows, opponent), faster_from(rows, opponent)
    if lead.empty:
        return f"No context has a result of both the patched model and {name}."
    largest = tokens_name(int(lead.idxmax()))
    clear = "at no context up to the longest" if first is None else f"from {tokens_name(first)} on"
    return (
        f"The patched model is {lead.min():.1f} to {lead.max():.1f} times as fast as {name} by the median, the most at "
        f"{largest}; {clear} it is faster beyond the spread of the steps."
    )
