"""What an H100 would give at the source's shape: a projection from counted bytes and FLOP and two cards' ceilings.

Both cards have the same tensor cores and differ in memory. What a call takes here is kept, and the bytes that it moves
are charged with what they cost more over there: not at all if they hide behind arithmetic (down to the time that moving
them takes by itself), in full if nothing hides them. Reality lies between; it is no measurement.
"""

from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mla.report.compare import OPPONENTS, at_shapes, shape_name
from mla.report.intermediates import calls
from mla.report.style import DARK, GREY, LOOKS, caption, open_figure, styled

KERNELS = ("portable", "hopper")
FROM, TO = "NVIDIA H200", "NVIDIA H100"


class Ceilings(NamedTuple):
    """What a card reaches: TFLOPS of a large bf16 matmul, GB/s of a large read."""

    matmul_tflops: float
    read_gbps: float


def ceilings(rows: pd.DataFrame, published: pd.DataFrame) -> tuple[Ceilings, Ceilings]:
    """The H200's as measured in the rounds of some rows, and the H100's: those times the ratio of both data sheets.

    Args:
        rows: of `data.load`.
        published: what `data.load_published` returns.
    """
    here = Ceilings(rows["matmul_tflops"].median(), rows["read_gbps"].median())
    matmul, read = (
        published.loc[f"h100-{name}", "value"] / published.loc[f"h200-{name}", "value"] for name in ("matmul", "read")
    )
    return here, Ceilings(here.matmul_tflops * matmul, here.read_gbps * read)


def projected_us(
    latency_us: float, flops: float, moved_bytes: float, here: Ceilings, there: Ceilings
) -> tuple[float, float]:
    """The least and the most that a call which takes `latency_us` here takes there, in microseconds."""
    arithmetic, reading = (
        [flops / c.matmul_tflops / 1e6 for c in (here, there)],
        [moved_bytes / c.read_gbps / 1e3 for c in (here, there)],
    )
    # of a faster ceiling nothing is promised
    more = [max(0.0, there - here) for here, there in (arithmetic, reading)]
    return max(latency_us + more[0], reading[1]), latency_us + sum(more)


def projection(frame: pd.DataFrame, intermediates: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Both opponents and our kernels at the shape of the source's largest lead.

    Args:
        frame: what `data.load` returns for an H200.
        intermediates: what `data.load_study` returns for `intermediates`.
        published: what `data.load_published` returns.

    Returns:
        Indexed by implementation, where both were measured: `latency_us` and `tflops` (measured), `bytes` (counted),
        `least_us`, `most_us`, `least_tflops` and `most_tflops` (projected).

    Raises:
        ValueError: the measurements are not from an H200.
    """
    if (gpu := frame["gpu"].iloc[0]) != FROM:
        raise ValueError(f"expected measurements from an {FROM} to project to an {TO}, got {gpu}; load those")
    claim = published.loc["article-largest-gap"]
    shape = (int(claim["batch_size"]), int(claim["context_len"]))
    counted, found = calls(intermediates), {}
    for name in (*OPPONENTS, *KERNELS):
        row = at_shapes(frame, name).loc[shape]
        if pd.isna(row["tflops"]) or (name, *shape) not in counted.index:
            continue
        cost = counted.loc[(name, *shape)]
        here, there = ceilings(row.to_frame().T, published)
        least, most = projected_us(row["latency_us_p50"], cost["flops"], cost["total_bytes"], here, there)
        found[name] = {
            "latency_us": row["latency_us_p50"],
            "tflops": row["tflops"],
            "bytes": cost["total_bytes"],
            "least_us": least,
            "most_us": most,
            "least_tflops": cost["flops"] / most / 1e6,
            "most_tflops": cost["flops"] / least / 1e6,
        }
    return pd.DataFrame.from_dict(found, orient="index")


def leads(table: pd.DataFrame) -> pd.DataFrame:
    """Our kernels' leads over both opponents, from `projection`: measured, and the least and the most projected.

    Returns:
        Indexed by kernel and opponent: `measured`, `least`, `most`.
    """
    found = {}
    for kernel in (name for name in KERNELS if name in table.index):
        for opponent in (name for name in OPPONENTS if name in table.index):
            ours, theirs = table.loc[kernel], table.loc[opponent]
            found[kernel, opponent] = {
                "measured": theirs["latency_us"] / ours["latency_us"],
                "least": theirs["least_us"] / ours["most_us"],
                "most": theirs["most_us"] / ours["least_us"],
            }
    return pd.DataFrame.from_dict(found, orient="index")


@styled
def projection_figure(frame: pd.DataFrame, intermediates: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Draw rates and leads as measured here and as projected to an H100, beside the source's two figures."""
    table = projection(frame, intermediates, published)
    claim, peak = published.loc["article-largest-gap"], published.loc["article-peak", "value"]
    figure, (rates, ratios) = open_figure(9, 3.9, 1, 2)
    figure.subplots_adjust(left=0.19, right=0.985, top=0.9, bottom=0.24, wspace=0.62)
    lines = {LOOKS[name].label: row[["tflops", "least_tflops", "most_tflops"]] for name, row in table.iterrows()}
    _draw_spans(rates, lines, 0, peak, f"source: {peak:g},\nshape not named")
    lines = {
        f"{LOOKS[kernel].label.split()[0]} over\n{LOOKS[opponent].label}": row[["measured", "least", "most"]]
        for (kernel, opponent), row in leads(table).iterrows()
    }
    _draw_spans(ratios, lines, 2, claim["value"], f"source: {claim['value']:g}")
    shape = shape_name(claim["batch_size"], claim["context_len"])
    rates.set_title(f"TFLOPS at {shape}")
    ratios.set_title(f"lead at {shape}")
    caption(
        figure,
        frame,
        "bf16, 128 heads. Dots: measured here. Bars: a projection to an H100, not measured, from counted bytes and\n"
        "FLOP and the ratio of both data sheets' ceilings, from all of the added time for memory exposed to all "
        "hidden. Dotted: the source, on an H100",
    )
    return figure


def _draw_spans(axes: Axes, lines: dict[str, pd.Series], digits: int, source: float, words: str) -> None:
    """A dot and a bar a line, with the bar's ends to so many digits, and the source's value."""
    for place, (measured, least, most) in enumerate(lines.values()):
        axes.barh(place, most - least, left=least, height=0.42, color="#c9d8e8", edgecolor=GREY, linewidth=0.8)
        axes.plot(measured, place, "o", color=DARK, zorder=4)
        axes.annotate(
            f"{least:.{digits}f} to {most:.{digits}f}",
            (max(most, measured), place),
            (8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.axvline(source, color=DARK, linestyle=":", linewidth=1.4, zorder=1)
    axes.set_yticks(range(len(lines)), list(lines))
    axes.set_ylim(len(lines) - 0.4, -0.95)
    axes.set_xlim(0, 1.45 * max([source, *(max(line) for line in lines.values())]))
    axes.annotate(words, (source, -0.9), (4, 0), textcoords="offset points", va="top", fontsize=8, color=DARK)
    axes.grid(visible=False, axis="y")
