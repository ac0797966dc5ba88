"""The roofline: what each implementation reaches at its arithmetic intensity, below the measured ceilings."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mla.report.compare import contestants, finished, shape_name, usual
from mla.report.schema import IMPLEMENTATIONS
from mla.report.style import (
    DARK,
    GREY,
    LEADER,
    LOOKS,
    NEGLIGIBLE,
    caption,
    negligible_note,
    open_figure,
    spread,
    styled,
)

# The foot of the axis, unless a point lies lower.
LOWEST_TFLOPS = 50
# Marks closer than this share of the axis overlap.
OVERLAP = 0.035


@styled
def roofline(frame: pd.DataFrame, published: pd.DataFrame | None = None, timer: str = "cuda_graph") -> Figure:
    """Draw TFLOPS over arithmetic intensity below the measured roof, a point for each implementation and head count.

    Args:
        frame: what `data.load` returns.
        published: what `data.load_published` returns; with it the H100's ridge from its data sheet is noted.
        timer: `cuda_graph` or `eager`.
    """
    rows = usual(contestants(frame), timer)
    matmul_tflops, read_tbps = rows["matmul_tflops"].median(), rows["read_gbps"].median() / 1000
    ridge = matmul_tflops / read_tbps
    rows = largest_shapes(rows)
    left_out = rows[rows["tflops"] < NEGLIGIBLE * matmul_tflops].groupby("implementation")["tflops"].max()
    rows = rows[~rows["implementation"].isin(left_out.index)]
    low = np.nanmin([LOWEST_TFLOPS, rows["tflops"].min() * 0.8])
    high = 1.5 * np.nanmax([100, matmul_tflops, rows["tflops"].max()])
    figure, (axes,) = open_figure(9, 5.4)
    figure.subplots_adjust(left=0.065, right=0.795, top=0.97, bottom=0.19)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(np.nanmin([16, rows["intensity"].min() * 0.8]), 640)
    axes.set_ylim(low, high)
    if pd.notna(ridge):
        _draw_roof(axes, matmul_tflops, read_tbps)
    for name in [name for name in IMPLEMENTATIONS if name in set(rows["implementation"])]:
        points = rows[rows["implementation"] == name].sort_values("intensity")
        look = LOOKS[name]
        emphasised = name == finished(frame)
        crowded = any(_is_crowded(point, rows, np.log2(high / low)) for point in points.itertuples())
        axes.plot(
            points["intensity"],
            points["tflops"],
            color=look.colour,
            marker=look.marker,
            linestyle=look.dash,
            linewidth=2 if emphasised else 1,
            markersize=(7.5 if emphasised else 5.5) * (0.6 if crowded else 1),
        )
    _label_intensities(axes, rows)
    # A label above the roof would have its leader cross it.
    roof = np.nan_to_num(np.log2(matmul_tflops / low) / np.log2(high / low), nan=1)
    _label_points(axes, rows, finished(frame), low, high, roof - 0.02)
    axes.set_xlabel("arithmetic intensity of the decode, FLOP/byte (log)")
    axes.set_ylabel("TFLOPS (log)")
    axes.set_yticks([tick for tick in (10, 25, 50, 100, 200, 400, 800) if low <= tick <= high])
    axes.set_yticklabels([f"{tick:g}" for tick in axes.get_yticks()])
    axes.minorticks_off()
    caption(
        figure,
        frame,
        f"bf16, each at its largest shape{_shapes_at_128_heads(rows)}",
        negligible_note(left_out.to_dict()),
        h100_ridge(published),
        timer=timer,
    )
    return figure


def _draw_roof(axes: Axes, matmul_tflops: float, read_tbps: float) -> None:
    """The two measured ceilings, named along their lines, and the ridge where they meet; axis limits are set before."""
    ridge = matmul_tflops / read_tbps
    low = axes.get_ylim()[0]
    roof = np.array([axes.get_xlim()[0], ridge, axes.get_xlim()[1]])
    axes.plot(roof, np.minimum(roof * read_tbps, matmul_tflops), color=GREY, linewidth=2)
    axes.axvline(ridge, color=GREY, linewidth=0.8, linestyle=":")
    axes.annotate(
        f"ridge {ridge:.0f} FLOP/byte",
        (ridge, low),
        (-3, 4),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="bottom",
        color=GREY,
    )
    axes.annotate(
        f"bf16 matmul, measured: {matmul_tflops:.0f} TFLOPS",
        (ridge, matmul_tflops),
        (-4, 4),
        textcoords="offset points",
        ha="right",
        color=GREY,
    )
    start = roof[0] * 1.15
    (x0, y0), (x1, y1) = axes.transData.transform([(x, x * read_tbps) for x in (start, ridge)])
    axes.annotate(
        f"read, measured: {read_tbps:.2f} TB/s",
        (start, start * read_tbps),
        (0, 6),
        textcoords="offset points",
        rotation=np.degrees(np.arctan2(y1 - y0, x1 - x0)),
        rotation_mode="anchor",
        color=GREY,
    )


def _shapes_at_128_heads(rows: pd.DataFrame) -> str:
    """` (128 heads: 128 x 32K; naive, eager 64 x 16K)`: the usual shape, then who was drawn at another one."""
    rows = rows[rows["num_heads"] == 128].sort_values("tokens", ascending=False)
    if rows.empty:
        return ""
    names = [shape_name(row.batch_size, row.context_len) for row in rows.itertuples()]
    others = [
        f"; {LOOKS[implementation].label} {name}"
        for implementation, name in zip(rows["implementation"], names, strict=True)
        if name != names[0]
    ]
    return f" (128 heads: {names[0]}{''.join(others)})"


def _is_crowded(point: NamedTuple, rows: pd.DataFrame, height: float) -> bool:
    """Whether another implementation's point at the same heads is so near that the marks overlap."""
    others = rows[(rows["num_heads"] == point.num_heads) & (rows["implementation"] != point.implementation)]
    return bool((np.log2(others["tflops"] / point.tflops).abs() < OVERLAP * height).any())


def largest_shapes(rows: pd.DataFrame) -> pd.DataFrame:
    """The valid row with the most cached tokens of each implementation and head count."""
    rows = rows[rows["usable"]].assign(tokens=rows["batch_size"] * rows["context_len"])
    return rows.sort_values("tokens").groupby(["implementation", "num_heads"]).tail(1)


def h100_ridge(published: pd.DataFrame | None) -> str:
    """One sentence with the H100's ridge, computed from its data sheet; empty without the published values."""
    if published is None:
        return ""
    matmul_tflops, read_tbps = published.loc["h100-matmul", "value"], published.loc["h100-read", "value"]
    return (
        f"\nH100 by its data sheet: {matmul_tflops:g} TFLOPS, {read_tbps:g} TB/s, ridge {matmul_tflops / read_tbps:.0f}"
    )


def _label_intensities(axes: Axes, rows: pd.DataFrame) -> None:
    """Ticks at the intensities of the measured head counts; of close ones only the first keeps its name."""
    intensity = rows.groupby("num_heads")["intensity"].median()
    named = [heads for heads in intensity.index if np.log2(heads) % 1 == 0]
    axes.set_xticks(intensity[named], [f"{intensity[heads]:.0f}\n{heads} heads" for heads in named])


def _label_points(axes: Axes, rows: pd.DataFrame, emphasised: str, low: float, high: float, top: float) -> None:
    """Name and rate of each implementation at 128 heads, right of the panel and not above `top`, a share of it."""
    points = rows[rows["num_heads"] == 128]
    height = np.log2(high / low)
    places = spread(np.log2(points["tflops"] / low).div(height).tolist(), 0.04, 0.0, top)
    for row, place in zip(points.itertuples(), places, strict=True):
        look = LOOKS[row.implementation]
        axes.annotate(
            f"{look.label} {row.tflops:.0f}",
            (row.intensity, row.tflops),
            (1.01, place),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=DARK,
            weight="bold" if row.implementation == emphasised else "normal",
            arrowprops=LEADER | {"color": look.colour, "shrinkB": 5},
        )
