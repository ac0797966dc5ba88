"""How far the ratio to the peer differs from run to run: a table of the sixteen shapes, and a sentence."""

import numpy as np
import pandas as pd

from mla.report.compare import tokens_name
from mla.report.style import LOOKS
from mla.report.text import markdown, number

KERNEL, OPPONENT = "hopper", "flashmla"


def ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """How many times as fast the kernel is as the peer: a row a shape, a column a run, NaN where one gave no result.

    Args:
        frame: what `data.load_study` returns for `runs`.
    """
    us = frame.pivot_table("latency_us_p50", ["batch_size", "context_len"], ["implementation", "run"])
    return us[OPPONENT] / us[KERNEL]


def matmul_shares(frame: pd.DataFrame) -> pd.DataFrame:
    """The kernel's share of the matmul rate measured in the same rounds; rows and columns as in `ratios`."""
    rows = frame[frame["implementation"] == KERNEL]
    share = rows["flops"] / rows["latency_us_p50"] / 1e6 / rows["matmul_tflops"]
    return rows.assign(share=share).pivot_table("share", ["batch_size", "context_len"], "run")


def runs_sentence(table: pd.DataFrame) -> str:
    """The least ratio and the geometric mean of each run, and the largest spread of a shape.

    Args:
        table: what `ratios` returns.
    """
    means = np.exp(np.log(table).mean())
    stated = [
        f"run {run}: faster at {int((table[run] > 1).sum())} of {int(table[run].notna().sum())} shapes, least "
        f"{table[run].min():.3f}, geometric mean {means[run]:.3f}"
        for run in table.columns
    ]
    spread = table.max(axis=1) - table.min(axis=1)
    batch_size, context_len = spread.idxmax()
    return (
        f"{'; '.join(stated)}. The ratio of a shape differs between runs by {spread.median():.3f} in the median and by "
        f"{spread.max():.3f} at most, at {batch_size} x {tokens_name(context_len)}."
    )


def runs_markdown(frame: pd.DataFrame) -> str:
    """`figures/runs.md`: the ratio at every shape in every run, and the share of matmul."""
    table, shares = ratios(frame), matmul_shares(frame)
    cells = [
        {
            "batch": str(batch_size),
            "context": tokens_name(context_len),
            **{f"run {run}": number(row[run], 3) for run in table.columns},
            "least": number(row.min(), 3),
            "of matmul": _span(shares.loc[(batch_size, context_len)]),
        }
        for (batch_size, context_len), row in table.iterrows()
    ]
    citable = "All rows are citable." if frame["citable"].all() else "Not citable: made from uncommitted code."
    return (
        f"# Runs\n\n{frame['gpu'].iloc[0]}, {frame['date'].iloc[0]}, CUDA graph, cold L2, 128 heads, bf16. Made by "
        f"`make figures`. How many times as fast `{KERNEL}` is as {LOOKS[OPPONENT].label}, by the medians of runs in "
        f"processes of their own. Of matmul: the share of `{KERNEL}` of the bf16 matmul rate of the same rounds, from "
        f"the lowest run to the highest. {citable}\n\n{runs_sentence(table)}\n\n{markdown(cells)}\n"
    )


def _span(shares: pd.Series) -> str:
    low, high = (f"{share * 100:.0f}" for share in (shares.min(), shares.max()))
    return f"{low} %" if low == high else f"{low} to {high} %"
