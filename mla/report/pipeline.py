"""Whole models over the context length: which rows belong together, and how many times as fast one is as another."""

import pandas as pd

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
