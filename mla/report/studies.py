"""The measurements beside the sixteen shapes: heads, long contexts, ragged batches and the staircase, as tables."""

import numpy as np
import pandas as pd

from mla.report.compare import any_lengths, finished, usual
from mla.report.schema import ABLATIONS, DEFAULT_PAGE_SIZE

HEADS_CONTEXT = 8192
HEADS_BATCHES = (32, 128)
LONG_BATCHES = (1, 2, 4)
LONG_CONTEXT = 32768
OPPONENT = "flashmla"
# From the Triton kernel to the finished one, the last steps taken back one at a time.
STAIRCASE = ["portable", "gluon_simple", "gluon_warp_specialised", *ABLATIONS, "hopper"]
SHAPE = ["batch_size", "context_len", "num_heads"]


def heads(frame: pd.DataFrame, timer: str = "cuda_graph") -> pd.DataFrame:
    """The rows of the finished kernel and its opponent by number of heads; empty where only 128 were measured."""
    rows = usual(frame, timer)
    rows = rows[(rows["context_len"] == HEADS_CONTEXT) & rows["batch_size"].isin(HEADS_BATCHES)]
    rows = rows[rows["implementation"].isin([finished(frame), OPPONENT])]
    return rows if len(set(rows["num_heads"])) > 1 else rows.iloc[:0]


def long_contexts(frame: pd.DataFrame, timer: str = "cuda_graph") -> pd.DataFrame:
    """The rows of the finished kernel and its opponent at few requests and many tokens, 128 heads."""
    rows = usual(frame, timer)
    rows = rows[(rows["num_heads"] == 128) & rows["batch_size"].isin(LONG_BATCHES)]
    rows = rows[rows["context_len"] >= LONG_CONTEXT]
    return rows[rows["implementation"].isin([finished(frame), OPPONENT])]


def side_by_side(rows: pd.DataFrame, kernel: str) -> pd.DataFrame:
    """`kernel` and its opponent at each shape.

    Args:
        rows: of `heads` or `long_contexts`.
        kernel: the one in the first columns.

    Returns:
        Indexed by batch_size, context_len, num_heads: `limit` (which ceiling is the lower one there) and for each of
        the two `latency_us`, `tflops`, `share_of_read` and `share_of_limit` (of the lower ceiling, measured in the same
        rounds), the opponent's with the suffix `_opponent`; `ratio`: the opponent's latency over the kernel's. NaN
        where there is no valid result.
    """
    tables = []
    for name in (kernel, OPPONENT):
        own = rows[rows["implementation"] == name].set_index(SHAPE)
        table = own[["tflops", "share_of_read"]].assign(
            latency_us=own["latency_us_p50"].where(own["usable"]),
            # the ceiling that is reached first is the one of which the share is larger
            share_of_limit=own[["share_of_matmul", "share_of_read"]].max(axis=1),
        )
        tables.append(table)
    table = tables[0].join(tables[1].add_suffix("_opponent"), how="outer").sort_index()
    ceilings = rows.groupby(SHAPE)[["intensity", "matmul_tflops", "read_gbps"]].median()
    ridge = 1000 * ceilings["matmul_tflops"] / ceilings["read_gbps"]
    limit = pd.Series(np.where(ceilings["intensity"] > ridge, "matmul", "read"), index=ceilings.index)
    return table.assign(limit=limit, ratio=table["latency_us_opponent"] / table["latency_us"])


def total_tokens(rows: pd.DataFrame) -> pd.Series:
    """Cached tokens of all requests of each row's batch, from its FLOP (see data/README.md)."""
    return (rows["flops"] / (2 * (576 + 512) * rows["num_heads"])).round().astype(int)


def ragged(frame: pd.DataFrame, timer: str = "cuda_graph") -> pd.DataFrame:
    """Every ragged row beside the even one of the same implementation and, to half a page a request, total of tokens.

    Returns:
        Columns `implementation`, `batch_size`, `lengths`, `context_len`, `num_heads`, `tokens`, `status`, `latency_us`,
        `even_context_len`, `even_tokens`, `even_latency_us` and `ratio` (ragged over even); NaN where there is none.
    """
    rows = any_lengths(frame, timer)
    rows = rows.assign(tokens=total_tokens(rows), latency_us=rows["latency_us_p50"].where(rows["usable"]))
    is_even = rows["lengths"] == "even"
    columns = ["implementation", "batch_size", "lengths", "context_len", "num_heads", "tokens", "status", "latency_us"]
    table = rows.loc[~is_even, columns]
    pages = (table["tokens"] / table["batch_size"] / DEFAULT_PAGE_SIZE).round()
    table = table.assign(even_context_len=(pages * DEFAULT_PAGE_SIZE).astype(int))
    keys = ["implementation", "batch_size", "num_heads"]
    even = rows.loc[is_even, [*keys, "context_len", "tokens", "latency_us"]]
    even = even.rename(columns=lambda name: name if name in keys else f"even_{name}")
    table = table.merge(even, how="left", on=[*keys, "even_context_len"])
    return table.assign(ratio=table["latency_us"] / table["even_latency_us"])


def staircase(frame: pd.DataFrame, timer: str = "cuda_graph") -> pd.DataFrame:
    """The rows of the staircase at the shapes where the finished kernel's ideas were switched off; else empty."""
    rows = usual(frame, timer)
    rows = rows[(rows["num_heads"] == 128) & rows["implementation"].isin(STAIRCASE)]
    shapes = rows.loc[rows["implementation"].isin(ABLATIONS), SHAPE].drop_duplicates()
    return rows.merge(shapes, on=SHAPE)
