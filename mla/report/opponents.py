"""Which way to write the baseline gives the source's lead: the study of opponents as a table and a sentence."""

import numpy as np
import pandas as pd

from mla.report.checks import REACHED
from mla.report.compare import shape_name
from mla.report.text import markdown, number

SHAPE = ["batch_size", "context_len"]
OPPONENT = ["form", "cache", "precision", "compile_mode"]
KERNELS = ("portable", "hopper")
# A mode that captures CUDA graphs of its own is launched by Python alone, and copies its inputs at every call.
GRAPH_MODES = ("reduce-overhead", "max-autotune")
PRECISIONS = {
    "bf16": "bf16",
    "fp32_scores": "bf16, fp32 scores",
    "tf32": "converted to fp32, TF32 products",
    "fp32": "converted to fp32",
}


def opponents(frame: pd.DataFrame) -> pd.DataFrame:
    """One row an opponent and shape, slowest first within a shape.

    Args:
        frame: what `data.load_study` returns for `opponents`.

    Returns:
        The valid rows, from a CUDA graph where the opponent can be captured, else eager, with `tflops` and for each of
        our kernels `ratio_<kernel>`: the opponent's latency over the kernel's by the same timer, NaN where it did not
        run.
    """
    rows = frame[frame["usable"]].sort_values("timer")
    rows = rows.groupby([*SHAPE, *OPPONENT], sort=False).head(1)
    ratios = {f"ratio_{name}": rows["latency_us_p50"] / rows[f"{name}_us_p50"] for name in KERNELS}
    rows = rows.assign(tflops=rows["flops"] / rows["latency_us_p50"] / 1e6, **ratios)
    return rows.sort_values([*SHAPE, "latency_us_p50"], ascending=[False, False, False]).reset_index(drop=True)


def like_the_source(rows: pd.DataFrame, published: pd.DataFrame, kernel: str = "portable") -> pd.DataFrame:
    """The opponents over which a kernel's lead is the source's largest one, at its shape.

    Args:
        rows: what `opponents` returns.
        published: what `data.load_published` returns.
        kernel: ours that stands for the source's.

    Returns:
        Rows at that shape, the nearest lead first, with `is_like` (within 10 %, the share from which on a figure counts
        as reached, either way).
    """
    claim = published.loc["article-largest-gap"]
    own = rows[(rows["batch_size"] == claim["batch_size"]) & (rows["context_len"] == claim["context_len"])]
    distance = np.log(own[f"ratio_{kernel}"] / claim["value"]).abs()
    own = own.assign(is_like=distance <= -np.log(REACHED))
    return own.loc[distance.sort_values().index]


def opponent_name(row) -> str:
    """`max-autotune, gathered, converted to fp32`: what sets an opponent apart from the first of its kind."""
    parts = ["eager torch" if row.compile_mode == "eager" else row.compile_mode]
    parts += [row.form] if row.form != "matmul" else []
    parts += [row.cache] if row.cache != "contiguous" else []
    parts += [PRECISIONS[row.precision]] if row.precision != "bf16" else []
    return ", ".join(parts)


def opponents_sentence(rows: pd.DataFrame, published: pd.DataFrame, kernel: str = "portable") -> str:
    """Which opponent gives the source's lead, and the rate that it would have had."""
    claim, peak = published.loc["article-largest-gap"], published.loc["article-peak", "value"]
    shape = shape_name(claim["batch_size"], claim["context_len"])
    nearest = like_the_source(rows, published, kernel)
    if nearest.empty:
        return f"No opponent was measured at {shape}."
    named = [
        f"{opponent_name(row)} ({getattr(row, f'ratio_{kernel}'):.2f} times, {row.tflops:.0f} TFLOPS)"
        for row in nearest.itertuples()
    ]
    like = [name for name, is_like in zip(named, nearest["is_like"], strict=True) if is_like]
    found = f"Within 10 % of it: {'; '.join(like)}." if like else f"None is within 10 % of it; the nearest: {named[0]}."
    return (
        f"The source leads by {claim['value']:g} times at {shape}, over {peak / claim['value']:.0f} TFLOPS if its peak "
        f"of {peak:g} was there. The lead of `{kernel}` here, on other hardware, depends on the opponent. {found}"
    )


def opponents_markdown(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """`figures/opponents.md`: every opponent with its rate and our leads over it."""
    rows = opponents(frame)
    cells = [
        {
            "shape": shape_name(row.batch_size, row.context_len),
            "form": row.form,
            "cache": row.cache,
            "precision": PRECISIONS[row.precision],
            "mode of torch.compile": row.compile_mode,
            "timer": row.timer.replace("cuda_graph", "CUDA graph"),
            "median, us": number(row.latency_us_p50, 1),
            "TFLOPS": number(row.tflops, 0),
            **{f"lead of {name}": number(getattr(row, f"ratio_{name}"), 2) for name in KERNELS},
        }
        for row in rows.itertuples()
    ]
    failed = frame[~frame["usable"]]
    without = [
        f"{opponent_name(row)} at {shape_name(row.batch_size, row.context_len)}, {row.timer}: {row.status}"
        for row in failed.itertuples()
    ]
    citable = "All rows are citable." if frame["citable"].all() else "Not citable: made from uncommitted code."
    return (
        f"# Opponents\n\n{frame['gpu'].iloc[0]}, {frame['date'].iloc[0]}, cold L2, 128 heads, bf16; medians. Made by "
        "`make figures`. The same arithmetic, written in torch in different ways: `gathered` copies the paged cache "
        f"first. {' and '.join(GRAPH_MODES)} capture CUDA graphs of their own and copy the query and the cache into "
        "them at every call, so they are timed from Python. A lead is the opponent's latency over the kernel's, by the "
        f"same timer in the same rounds. {citable}\n\n{opponents_sentence(rows, published)}\n\n{markdown(cells)}\n"
        + (f"\nWithout a result: {'; '.join(without)}.\n" if without else "")
    )
