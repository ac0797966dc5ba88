"""The figures, each a function from a DataFrame to a Figure."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mla.report.compare import (
    BATCH_SIZES,
    CONTEXT_LENS,
    SHAPES,
    at_shapes,
    contestants,
    finished,
    shape_name,
    tokens_name,
    usual,
)
from mla.report.pipeline_figure import pipeline
from mla.report.roofline_figure import roofline
from mla.report.schema import DEFAULT_PAGE_SIZE, IMPLEMENTATIONS
from mla.report.speedup_figure import speedup
from mla.report.study_figures import heads, staircase
from mla.report.style import (
    ALT,
    DARK,
    GREY,
    LEADER,
    LOOKS,
    NEGLIGIBLE,
    STRIP_COLOUR,
    caption,
    context_axis,
    negligible_note,
    open_figure,
    save,
    spread,
    styled,
)
from mla.report.tuning_tables import tuning_table

__all__ = ["ALT", "heads", "pipeline", "roofline", "save", "speedup", "staircase", "tflops", "tuning"]


@styled
def tflops(frame: pd.DataFrame, timer: str = "cuda_graph") -> Figure:
    """Draw TFLOPS over context length for every implementation, a panel a batch size, below the measured matmul rate.

    Args:
        frame: what `data.load` returns.
        timer: `cuda_graph` or `eager`.
    """
    rows = {name: at_shapes(contestants(frame), name, timer) for name in IMPLEMENTATIONS}
    rows = {name: table for name, table in rows.items() if table["status"].notna().any()}
    ceiling = usual(frame, timer).groupby(list(SHAPES.names))["matmul_tflops"].median().reindex(SHAPES)
    top = 1.1 * np.nanmax([1, ceiling.max(), *(table["tflops"].max() for table in rows.values())])
    best = {name: table["tflops"].max() for name, table in rows.items()}
    left_out = {name: rate for name, rate in best.items() if rate < NEGLIGIBLE * ceiling.max()}
    drawn = {name: table for name, table in rows.items() if name not in left_out}
    out_of_memory = any((table["status"] == "out_of_memory").any() for table in rows.values())
    figure, all_axes = open_figure(9, 6.7, 2, 2, sharex=True, sharey=True)
    figure.subplots_adjust(left=0.06, right=0.83, top=0.95, bottom=0.115, wspace=0.06, hspace=0.16)
    for axes, batch_size in zip(all_axes, BATCH_SIZES, strict=True):
        context_axis(axes, list(CONTEXT_LENS))
        axes.set_ylim(-0.09 * top if out_of_memory else 0, top)
        axes.set_title(f"batch {batch_size}")
        _draw_ceiling(axes, ceiling.loc[batch_size])
        for name, table in drawn.items():
            _draw_rate(axes, name, table.loc[batch_size], name == finished(frame))
        if out_of_memory:
            _draw_out_of_memory(axes, {name: table.loc[batch_size] for name, table in rows.items()}, top)
    for axes, batch_size in zip(all_axes[1::2], BATCH_SIZES[1::2], strict=True):
        ends = {name: table.loc[batch_size, "tflops"].dropna() for name, table in drawn.items()}
        label_ends(axes, ends, finished(frame), gap=0.047 * top, top=top)
    for axes in all_axes[::2]:
        axes.set_ylabel("TFLOPS")
    for axes in all_axes[2:]:
        axes.set_xlabel("context length")
    caption(figure, frame, "128 heads, bf16", negligible_note(left_out), _failed_note(rows), timer=timer)
    return figure


def _failed_note(rows: dict[str, pd.DataFrame]) -> str:
    """Which implementations gave no valid result, and at which shapes, out of memory aside."""
    parts = []
    for name, table in rows.items():
        failed = table.index[table["status"].notna() & table["tflops"].isna() & (table["status"] != "out_of_memory")]
        if len(failed):
            where = ", ".join(shape_name(*shape) for shape in failed) if len(failed) <= 3 else f"{len(failed)} shapes"
            parts.append(f"{LOOKS[name].label} at {where}")
    return f"\nFailed, not drawn: {'; '.join(parts)}; the reasons are in results.md" if parts else ""


def _draw_ceiling(axes: Axes, ceiling: pd.Series) -> None:
    """The matmul rate of the same rounds as a grey line with its name."""
    known = ceiling.dropna()
    axes.plot(known.index, known, color=GREY, linewidth=1.4)
    if len(known):
        text = f"bf16 matmul, measured: {known.min():.0f}-{known.max():.0f}"
        axes.annotate(text, (known.index[0], known.iloc[0]), (0, 5), textcoords="offset points", fontsize=8, color=GREY)


def _draw_rate(axes: Axes, name: str, table: pd.DataFrame, emphasised: bool) -> None:
    """One implementation's line; the finished kernel's is thicker. Rows without a valid result leave a hole."""
    look = LOOKS[name]
    axes.plot(
        table.index,
        table["tflops"],
        color=look.colour,
        marker=look.marker,
        linestyle=look.dash,
        linewidth=2.6 if emphasised else 1.2,
        markersize=6.5 if emphasised else 4.5,
        zorder=4 if emphasised else 3,
    )


def _draw_out_of_memory(axes: Axes, tables: dict[str, pd.DataFrame], top: float) -> None:
    """Crosses in a strip below zero, side by side where several implementations ran out of memory at a shape."""
    axes.axhspan(-0.09 * top, 0, color=STRIP_COLOUR, zorder=0)
    named = [LOOKS[name].label for name, table in tables.items() if (table["status"] == "out_of_memory").any()]
    text = ": ".join(["out of memory", *(["; ".join(named)] if named else [])])
    axes.annotate(text, (0.02, 0.012), xycoords="axes fraction", fontsize=8, color=GREY)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
    for context_len in CONTEXT_LENS:
        names = [name for name, table in tables.items() if table.loc[context_len, "status"] == "out_of_memory"]
        for place, name in enumerate(names):
            beside = context_len * 1.13 ** (place - (len(names) - 1) / 2)
            axes.plot(beside, -0.045 * top, "x", color=LOOKS[name].colour, markeredgewidth=2)


def label_ends(axes: Axes, ends: dict[str, pd.Series], emphasised: str, gap: float, top: float) -> None:
    """Name each line at the right of the panel, at least `gap` apart, with a leader to its last point; y is linear."""
    ends = {name: values for name, values in ends.items() if len(values)}
    places = spread([values.iloc[-1] for values in ends.values()], gap, 0, top)
    for (name, values), place in zip(ends.items(), places, strict=True):
        last = values.index[-1]
        # A leader from an earlier point would read as measured values at the larger contexts.
        stopped = last != CONTEXT_LENS[-1]
        axes.annotate(
            LOOKS[name].label + (f" (to {tokens_name(last)})" if stopped else ""),
            (last, values.iloc[-1]),
            (1.05, place),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
            annotation_clip=False,
            color=DARK,
            weight="bold" if name == emphasised else "normal",
            arrowprops=None if stopped else LEADER | {"color": LOOKS[name].colour, "shrinkB": 3},
        )


@styled
def tuning(tune: pd.DataFrame) -> Figure:
    """Draw how many times as fast the best configuration of the portable kernel is as the first guess, a bar a shape.

    Args:
        tune: what `data.load_tune` returns.
    """
    table = tuning_table(tune)
    table = table[(table["num_heads"] == 128) & (table["dtype"] == "bf16") & (table["page_size"] == DEFAULT_PAGE_SIZE)]
    table = table.set_index(list(SHAPES.names))["gain"].reindex(SHAPES)
    top = np.nanmax([1.5, table.max() * 1.15])
    figure, all_axes = open_figure(9, 3.4, 1, 4, sharey=True)
    figure.subplots_adjust(left=0.06, right=0.995, top=0.9, bottom=0.26, wspace=0.05)
    places = np.arange(len(CONTEXT_LENS))
    for axes, batch_size in zip(all_axes, BATCH_SIZES, strict=True):
        gains = table.loc[batch_size].tolist()
        axes.bar(places, gains, width=0.62, color=LOOKS["portable"].colour, alpha=0.8)
        axes.axhline(1, color=DARK, linewidth=1.1)
        for place, gain in zip(places, gains, strict=True):
            text = "no result" if np.isnan(gain) else f"{gain:.2f}"
            axes.annotate(
                text,
                (place, np.nan_to_num(gain)),
                (0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90 if np.isnan(gain) else 0,
                weight="bold",
                color=DARK,
            )
        axes.set_xticks(places, [f"{tokens // 1024}K" for tokens in CONTEXT_LENS])
        axes.set_title(f"batch {batch_size}")
        axes.set_xlabel("context length")
        axes.set_ylim(0, top)
    all_axes[0].set_ylabel("times as fast as the first guess")
    notes = (
        "Portable kernel, 128 heads, bf16, pages of 64",
        "The line at 1 is the first guess",
        "\nCases with 16 heads or small pages are in tuning.md",
    )
    caption(figure, tune, *notes)
    return figure
