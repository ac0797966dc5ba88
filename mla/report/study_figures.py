"""The figures beside the sixteen shapes: the number of heads, and the steps to the finished kernel."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from mla.report import studies
from mla.report.compare import finished, shape_name, tokens_name
from mla.report.style import ALPHA_OF_STEPS, DARK, GREY, LEADER, LOOKS, caption, open_figure, spread, styled


@styled
def heads(frame: pd.DataFrame, timer: str = "cuda_graph") -> Figure:
    """Draw the share of the read ceiling and TFLOPS over the number of heads, a column a batch size.

    Args:
        frame: what `data.load` returns; with rows that `studies.heads` finds.
        timer: `cuda_graph` or `eager`.
    """
    rows = studies.heads(frame, timer)
    counts = sorted(set(rows["num_heads"]))
    top = 1.12 * np.nanmax([1, rows["tflops"].max(), rows["matmul_tflops"].max()])
    figure, all_axes = open_figure(9, 6.2, 2, len(studies.HEADS_BATCHES), sharex=True, sharey="row")
    figure.subplots_adjust(left=0.085, right=0.88, top=0.95, bottom=0.125, wspace=0.06, hspace=0.12)
    for column, batch_size in enumerate(studies.HEADS_BATCHES):
        above, below = all_axes[column], all_axes[column + len(studies.HEADS_BATCHES)]
        own = rows[rows["batch_size"] == batch_size]
        above.set_title(f"batch {batch_size}, context {tokens_name(studies.HEADS_CONTEXT)}")
        above.axhline(1, color=GREY, linewidth=1.4)
        above.set_ylim(0, 1.12)
        below.set_ylim(0, top)
        below.plot(*_lower_ceiling(own), color=GREY, linewidth=1.4)
        lines = _draw_lines(above, below, own, finished(frame))
        if column == len(studies.HEADS_BATCHES) - 1:
            _label_ends(above, {name: line["share_of_read"] for name, line in lines.items()}, finished(frame), 0.06)
            _label_ends(below, {name: line["tflops"] for name, line in lines.items()}, finished(frame), 0.06 * top)
        below.set_xscale("log", base=2)
        below.set_xticks(counts, [str(count) for count in counts])
        below.minorticks_off()
        below.set_xlabel("heads")
        if column == 0:
            _write_ceilings(above, below, own)
    all_axes[0].yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    all_axes[0].set_ylabel("of the measured read rate")
    all_axes[len(studies.HEADS_BATCHES)].set_ylabel("TFLOPS")
    caption(figure, frame, "bf16, pages of 64", timer=timer)
    return figure


def _lower_ceiling(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Heads, also between the measured ones, and the TFLOPS that the lower of both ceilings allows there."""
    costs = rows.groupby("num_heads")[["flops", "bytes_moved"]].median()
    counts = np.geomspace(costs.index.min(), costs.index.max(), 200) if len(costs) else np.array([])
    # both costs are linear in the heads
    flops, bytes_moved = (np.interp(counts, costs.index, costs[name]) for name in costs) if len(costs) else (1, 1)
    read_tflops = flops / bytes_moved * rows["read_gbps"].median() / 1000
    return counts, np.minimum(read_tflops, rows["matmul_tflops"].median()) + 0 * counts


def _write_ceilings(above: Axes, below: Axes, rows: pd.DataFrame) -> None:
    """Name the grey lines of both panels."""
    read, matmul = rows["read_gbps"].median() / 1000, rows["matmul_tflops"].median()
    if pd.isna(read + matmul):
        return
    text = dict(textcoords="offset points", fontsize=8, color=GREY)
    first = rows["num_heads"].min()
    above.annotate(f"read, measured: {read:.2f} TB/s", (first, 1), (0, 4), **text)
    words = f"the lower of read and bf16 matmul,\nmeasured: {matmul:.0f} TFLOPS"
    below.annotate(words, (first, matmul), (0, -4), va="top", **text)


def _draw_lines(above: Axes, below: Axes, rows: pd.DataFrame, emphasised: str) -> dict[str, pd.DataFrame]:
    """One implementation a line in both panels; returns their valid rows by number of heads."""
    lines = {}
    for name in (studies.OPPONENT, emphasised):
        own = rows[rows["implementation"] == name].set_index("num_heads").sort_index()
        look = LOOKS[name]
        for axes, column in ((above, "share_of_read"), (below, "tflops")):
            axes.plot(
                own.index,
                own[column],
                color=look.colour,
                marker=look.marker,
                linestyle=look.dash,
                linewidth=2.6 if name == emphasised else 1.2,
                markersize=6.5 if name == emphasised else 4.5,
                zorder=4 if name == emphasised else 3,
            )
        lines[name] = own.dropna(subset="tflops")
    return lines


def _label_ends(axes: Axes, lines: dict[str, pd.Series], emphasised: str, gap: float) -> None:
    """Name each line at the right of the panel, at least `gap` apart."""
    lines = {name: values for name, values in lines.items() if len(values)}
    places = spread([values.iloc[-1] for values in lines.values()], gap, 0, axes.get_ylim()[1])
    for (name, values), place in zip(lines.items(), places, strict=True):
        axes.annotate(
            LOOKS[name].label,
            (values.index[-1], values.iloc[-1]),
            (1.03, place),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
            annotation_clip=False,
            color=DARK,
            weight="bold" if name == emphasised else "normal",
            arrowprops=LEADER | {"color": LOOKS[name].colour, "shrinkB": 3},
        )


@styled
def staircase(frame: pd.DataFrame, timer: str = "cuda_graph") -> Figure:
    """Draw TFLOPS of each step to the finished kernel as bars, a panel a shape, beside the measured matmul rate.

    Args:
        frame: what `data.load` returns; with rows that `studies.staircase` finds.
        timer: `cuda_graph` or `eager`.
    """
    rows = studies.staircase(frame, timer)
    shapes = sorted(set(zip(rows["batch_size"], rows["context_len"], strict=True)))
    top = 1.04 * np.nanmax([1, rows["matmul_tflops"].max(), rows["tflops"].max()])
    figure, all_axes = open_figure(9, 3.5, 1, len(shapes), sharey=True)
    figure.subplots_adjust(left=0.185, right=0.99, top=0.88, bottom=0.2, wspace=0.07)
    places = np.arange(len(studies.STAIRCASE))[::-1]
    for axes, shape in zip(all_axes, shapes, strict=True):
        own = rows[(rows["batch_size"] == shape[0]) & (rows["context_len"] == shape[1])].set_index("implementation")
        ceiling = own["matmul_tflops"].median()
        axes.axvline(ceiling, color=GREY, linewidth=1.4)
        if pd.notna(ceiling):
            axes.annotate(
                f"matmul {ceiling:.0f}",
                (ceiling, 1),
                (0, 3),
                xycoords=axes.get_xaxis_transform(),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color=GREY,
            )
        for name, place in zip(studies.STAIRCASE, places, strict=True):
            _draw_step(axes, name, place, own["tflops"].get(name, np.nan), top)
        axes.set_xlim(0, top)
        axes.set_title(shape_name(*shape), loc="left")
        axes.set_xlabel("TFLOPS")
        axes.grid(axis="y", visible=False)
    all_axes[0].set_yticks(places, [LOOKS[name].label for name in studies.STAIRCASE])
    all_axes[0].get_yticklabels()[-1].set_weight("bold")
    caption(
        figure,
        frame,
        "128 heads, bf16, batch x context",
        "The line is the bf16 matmul rate of the same rounds",
        timer=timer,
    )
    return figure


def _draw_step(axes: Axes, name: str, place: float, rate: float, top: float) -> None:
    """One bar and its number, inside where it would meet the edge or the ceiling."""
    axes.barh(place, rate, height=0.68, color=LOOKS[name].colour, alpha=1 if name == "hopper" else ALPHA_OF_STEPS)
    known = pd.notna(rate)
    inside = known and rate > 0.6 * top
    axes.annotate(
        f"{rate:.0f}" if known else "no result",
        (np.nan_to_num(rate), place),
        (-4 if inside else 4, 0),
        textcoords="offset points",
        ha="right" if inside else "left",
        va="center",
        weight="bold",
        color="white" if inside and name == "hopper" else DARK,
    )
