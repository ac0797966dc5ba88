"""The figure of the sixteen shapes: which of them win, by how much, over which opponent."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from mla.report.compare import BATCH_SIZES, CONTEXT_LENS, OPPONENTS, count_wins, finished, ratios
from mla.report.style import (
    DARK,
    GREY,
    LOOKS,
    LOSING_REGION,
    LOSS,
    OPPONENT_NAMES,
    STRIP_COLOUR,
    caption,
    context_axis,
    open_figure,
    styled,
)

TICKS = np.array([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50])
# The strip below the scale in which the source's loss is named, as a share of the axis.
STRIP = 0.09
FINE_TICKS = np.array([0.5, 0.7, 1, 1.5, 2, 3, 4, 6])


@styled
def speedup(
    frame: pd.DataFrame,
    implementation: str | None = None,
    beside: str | None = None,
    published: pd.DataFrame | None = None,
    timer: str = "cuda_graph",
) -> Figure:
    """Draw the speed-up of one implementation over both torch.compile opponents at the sixteen shapes.

    Args:
        frame: what `data.load` returns.
        implementation: the one to show; default the finished kernel of the data.
        beside: a second one to show faintly beside it, such as the finished kernel beside a stage.
        published: what `data.load_published` returns; with it the source's two stated shapes are marked.
        timer: `cuda_graph` or `eager`.

    Returns:
        Two rows of panels, one an opponent; a panel a batch size; context length across (log2).
    """
    implementation = implementation or finished(frame)
    # The one to show comes last, so that it is drawn on top.
    shown = list(dict.fromkeys(name for name in (beside, implementation) if name))
    tables = {(name, opponent): ratios(frame, name, opponent, timer) for name in shown for opponent in OPPONENTS}
    figure, all_axes = open_figure(9, 6.2, 2, 4, sharex=True, sharey=True)
    figure.subplots_adjust(left=0.08, right=0.995, top=0.87, bottom=0.1, wspace=0.05, hspace=0.34)
    low, high = limits(tables, published)
    stars = {}
    if published is not None:
        gap = published.loc["article-largest-gap"]
        stars = {int(gap["batch_size"]): {int(gap["context_len"]): gap["value"]}}
    for row, opponent in enumerate(OPPONENTS):
        row_axes = all_axes[4 * row : 4 * row + 4]
        row_tables = {name: tables[name, opponent] for name in shown}
        for axes, batch_size in zip(row_axes, BATCH_SIZES, strict=True):
            prepare_panel(axes, low, high, published is not None)
            axes.set_title(f"batch {batch_size}", color=DARK)
            draw_panel(
                axes, {name: table.loc[batch_size] for name, table in row_tables.items()}, stars.get(batch_size, {})
            )
        if published is not None:
            mark_source(row_axes, published)
        wins = count_wins(row_tables[implementation])
        row_axes[0].annotate(
            f"{LOOKS[implementation].label}: faster than {OPPONENT_NAMES[opponent]} in {wins} shapes",
            (0, 1),
            (0, 23),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=10.5,
            weight="bold",
            color=DARK,
        )
        row_axes[0].set_ylabel("times as fast (log)")
        place = (0.97, 0.03 + (STRIP if published is not None else 0))
        row_axes[3].annotate("slower", place, xycoords="axes fraction", ha="right", va="bottom", color=LOSS)
    for axes in all_axes[4:]:
        axes.set_xlabel("context length")
    add_legend(figure, shown, published is not None)
    hollow = any(table["level"].any() for table in tables.values())
    marked = any((table["outlier"] & table["ratio"].notna()).any() for table in tables.values())
    notes = (
        "128 heads, bf16",
        "Hollow: the p20-p80 ranges overlap" if hollow else "",
        "†: torch.compile's own time is an outlier (see results.md)" if marked else "",
    )
    caption(figure, frame, *notes, timer=timer)
    return figure


def limits(tables: dict, published: pd.DataFrame | None) -> tuple[float, float]:
    """The range of the ratio axis: all ratios, the source's and some room for the numbers on the marks."""
    values = [0.8, 1.4, *pd.concat([table["ratio"] for table in tables.values()]).dropna()]
    if published is not None:
        values.append(published.loc["article-largest-gap", "value"])
    span = max(values) / min(values)
    return min(values) / span**0.3, max(values) * span**0.22


def prepare_panel(axes: Axes, low: float, high: float, with_strip: bool) -> None:
    """Axes, the line at 1, the losing region and, where asked for, the strip below the scale."""
    context_axis(axes, list(CONTEXT_LENS))
    axes.set_xlim(2**9.3, 2**15.7)
    axes.set_yscale("log", base=2)
    foot = low / (high / low) ** (STRIP / (1 - STRIP)) if with_strip else low
    axes.set_ylim(foot, high)
    axes.axhspan(foot, low, color=STRIP_COLOUR, zorder=0)
    ticks = FINE_TICKS if high / low < 20 else TICKS
    ticks = ticks[(ticks >= low) & (ticks <= high)]
    axes.set_yticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.axhspan(low, 1, color=LOSING_REGION, zorder=0)
    axes.axhline(1, color=DARK, linewidth=1.1, zorder=1)


def draw_panel(axes: Axes, tables: dict[str, pd.DataFrame], avoid: dict[int, float]) -> None:
    """Stems to the last implementation's marks, all marks, a number on each; `avoid`: other marks by context."""
    main = list(tables)[-1]
    for name, table in tables.items():
        look, known = LOOKS[name], table.dropna(subset="ratio")
        if name == main:
            axes.vlines(known.index, 1, known["ratio"], color=look.colour, linewidth=2.2, alpha=0.45, zorder=2)
        axes.plot(table.index, table["ratio"], color=look.colour, linestyle=look.dash, linewidth=1, alpha=0.6)
        for context_len, row in known.iterrows():
            face = "white" if row["level"] else look.colour
            axes.plot(context_len, row["ratio"], look.marker, color=look.colour, markerfacecolor=face, markersize=6.5)
            rivals = [other.loc[context_len, "ratio"] for key, other in tables.items() if key != name]
            rivals += [avoid[context_len]] if context_len in avoid else []
            rivals = [rival for rival in rivals if pd.notna(rival)]
            write_number(axes, context_len, row["ratio"], rivals, name == main, "†" if row["outlier"] else "")
    low, high = axes.get_ylim()
    upwards = high > 1 / low
    for context_len, gap in tables[main]["gap"][tables[main]["gap"] != ""].items():
        axes.annotate(
            gap.replace("_", " ").replace(": ", "\n"),
            (context_len, 1),
            # below the number that a rival may have there
            (0, 4 if upwards else -24),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom" if upwards else "top",
            fontsize=7,
            color=GREY,
        )


def write_number(axes: Axes, context_len: int, ratio: float, rivals: list[float], main: bool, mark: str) -> None:
    """Write a ratio and `mark` beside its point, on the side away from the line at 1 or from a near point."""
    over = [rival / ratio for rival in rivals if rival > ratio or (rival == ratio and not main)]
    under = [ratio / rival for rival in rivals if rival < ratio or (rival == ratio and main)]
    # Ratios to the next marks above and below; a mark that is further leaves room for the number.
    room_over, room_under = min([1.67, *over]), min([1.67, *under])
    above = ratio >= 1 if room_over == room_under else room_over > room_under
    # 16K and 32K are so close that their numbers would touch.
    shift = {CONTEXT_LENS[-2]: -4, CONTEXT_LENS[-1]: 4}.get(context_len, 0)
    text = axes.annotate(
        (f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.3f}") + mark,
        (context_len, ratio),
        (shift, 6 if above else -6),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "top",
        fontsize=8.5,
        weight="bold" if main else "normal",
        color=LOSS if ratio < 1 else DARK,
    )
    text.set_path_effects([withStroke(linewidth=2.5, foreground="white" if ratio >= 1 else LOSING_REGION)])


def mark_source(row_axes: list[Axes], published: pd.DataFrame) -> None:
    """The two shapes that the source names: its best ratio as a star, its loss in words in the strip below the scale.

    The loss has no value, so its mark must not sit where the axis gives one.
    """
    gap = published.loc["article-largest-gap"]
    axes = row_axes[BATCH_SIZES.index(gap["batch_size"])]
    axes.plot(gap["context_len"], gap["value"], "*", color="white", markeredgecolor=GREY, markersize=13, zorder=4)
    text, star = f"{gap['value']:g}", (gap["context_len"], gap["value"])
    axes.annotate(text, star, (0, 6), textcoords="offset points", ha="center", va="bottom", color=GREY)
    loss = published.loc["article-loss"]
    axes = row_axes[BATCH_SIZES.index(loss["batch_size"])]
    place = (loss["context_len"], STRIP / 2)
    across = axes.get_xaxis_transform()
    axes.annotate(
        "▼ article: loss",
        place,
        xycoords=across,
        xytext=(-4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=GREY,
    )


def add_legend(figure: Figure, shown: list[str], with_source: bool) -> None:
    """Name the marks; needed only where there is more than one kind."""
    handles = [
        Line2D(
            [],
            [],
            color=LOOKS[name].colour,
            marker=LOOKS[name].marker,
            linestyle=LOOKS[name].dash,
            label=LOOKS[name].label,
        )
        for name in reversed(shown)
    ]
    if with_source:
        handles.append(
            Line2D(
                [],
                [],
                color="white",
                marker="*",
                markeredgecolor=GREY,
                markersize=9,
                linestyle="none",
                label="article (H100), opponent's cache not said",
            )
        )
    if len(handles) > 1:
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.055, 1.0),
            ncols=len(handles),
            frameon=False,
            fontsize=8.5,
        )
