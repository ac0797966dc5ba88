"""The figure of whole models: time a step and peak memory over the context length."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FormatStrFormatter, LogLocator

from mla.report.compare import tokens_name
from mla.report.pipeline import GIB, MODELS, by_context, leads, main_rows
from mla.report.style import (
    BLUE,
    DARK,
    GREY,
    LEADER,
    MID_GREY,
    VERMILLION,
    Look,
    context_axis,
    open_figure,
    spread,
    styled,
)

MODEL_LOOKS = {
    "mla_patched": Look("MLA, patched", BLUE, "o", "-"),
    "mla_unpatched": Look("MLA, unpatched", VERMILLION, "^", "--"),
    "mha": Look("MHA", MID_GREY, "s", ":"),
}


@styled
def pipeline(frame: pd.DataFrame) -> Figure:
    """Draw the time of a decode step and the peak memory over the context, a line a model.

    Args:
        frame: what `data.load_study(..., "pipeline")` returns.
    """
    rows = main_rows(frame)
    contexts = sorted(set(rows["context_len"]))
    figure, (left, right) = open_figure(9.6, 4.4, 1, 2)
    figure.subplots_adjust(left=0.06, right=0.845, top=0.92, bottom=0.2, wspace=0.58)
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    for axes, values, title in (
        (left, rows["latency_us_p50"] / 1e3, "time of a decode step, ms"),
        (right, rows["decode_peak_bytes"] / GIB, "peak memory while decoding, GiB"),
    ):
        lines = _draw_lines(axes, rows.assign(value=values))
        _set_limits(axes, values.dropna())
        _label_ends(axes, lines)
        _draw_out_of_memory(axes, rows)
        axes.set_title(title, loc="left")
        context_axis(axes, contexts)
        # room for the numbers of the first context beside the axis
        axes.set_xlim(left=contexts[0] * 0.66)
        axes.set_xlabel("context length")
    _write_leads(left, rows)
    figure.text(0.01, 0.012, _foot(rows), fontsize=7.5, color=GREY, va="bottom")
    return figure


def _draw_lines(axes: Axes, rows: pd.DataFrame) -> dict[str, pd.Series]:
    """A line a model; returns those with a result, by context length."""
    lines = {}
    for model in MODELS:
        line = by_context(rows, model)["value"].dropna()
        look = MODEL_LOOKS[model]
        emphasised = model == "mla_patched"
        axes.plot(
            line.index,
            line,
            color=look.colour,
            marker=look.marker,
            linestyle=look.dash,
            linewidth=2.6 if emphasised else 1.2,
            markersize=6.5 if emphasised else 4.5,
            zorder=4 if emphasised else 3,
        )
        if len(line):
            lines[model] = line
    return lines


def _set_limits(axes: Axes, values: pd.Series) -> None:
    """Room above for crosses; on the logarithmic axis also below, for the numbers; a linear one begins at zero."""
    if values.empty:
        return
    low, high = values.min(), values.max()
    if axes.get_yscale() == "log":
        span = max(high / low, 2.0)
        axes.set_ylim(low / span**0.3, high * span**0.15)
    else:
        axes.set_ylim(0, 1.15 * high)


def _label_ends(axes: Axes, lines: dict[str, pd.Series]) -> None:
    """Name each line at the right of the panel."""
    # places are shares of the panel, so that both scales need the same gap
    to_share = axes.transScale + axes.transLimits
    ends = [to_share.transform((line.index[-1], line.iloc[-1]))[1] for line in lines.values()]
    for (model, line), place in zip(lines.items(), spread(ends, 0.075, 0, 1), strict=True):
        axes.annotate(
            MODEL_LOOKS[model].label,
            (line.index[-1], line.iloc[-1]),
            (1.05, place),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            annotation_clip=False,
            color=DARK,
            weight="bold" if model == "mla_patched" else "normal",
            arrowprops=LEADER | {"color": MODEL_LOOKS[model].colour, "shrinkB": 3},
        )


def _draw_out_of_memory(axes: Axes, rows: pd.DataFrame) -> None:
    """Out of memory as crosses at the upper edge, by name."""
    missing = rows[rows["status"] == "out_of_memory"]
    for place, (model, own) in enumerate(missing.groupby("model")):
        height = 0.97 - 0.06 * place
        look = MODEL_LOOKS[model]
        points = dict(transform=axes.get_xaxis_transform(), color=look.colour, clip_on=False)
        axes.plot(own["context_len"], [height] * len(own), "x", markersize=6, **points)
        axes.annotate(
            "out of memory",
            (own["context_len"].min(), height),
            (-6, 0),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=7.5,
            color=look.colour,
        )


def _write_leads(axes: Axes, rows: pd.DataFrame) -> None:
    """How many times as fast the patched model is, under all points: first over the library's own, then over MHA."""
    lowest = rows.groupby("context_len")["latency_us_p50"].min() / 1e3
    for step, model in enumerate(("mla_unpatched", "mha")):
        for context_len, lead in leads(rows, model).items():
            axes.annotate(
                f"{lead:.1f}×",
                (context_len, lowest[context_len]),
                (0, -13 - 10 * step),
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=7.5,
                color=MODEL_LOOKS[model].colour if model == "mla_unpatched" else GREY,
                # grid lines stop short of the number
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )


def _foot(rows: pd.DataFrame) -> str:
    """GPU, date, what ran, and how the contexts were made."""
    first, failed = rows.iloc[0], rows["status"].str.startswith("failed").sum()
    prompts = rows.loc[rows["fill"] == "prefill", "context_len"]
    filled = "Contexts are" if prompts.empty else f"Contexts to {tokens_name(int(prompts.max()))} are prompts, longer"
    lines = [
        f"{first['gpu']}, {first['date']}, transformers' generate with a preallocated cache, "
        f"{'compiled' if first['compiled'] else 'eager'}. Batch {first['batch_size']}, {first['num_layers']} layers of "
        f"{first['hidden_size']}, {first['num_heads']} heads, random weights, {first['dtype']}.",
        f"{filled} random rows in the cache. Numbers: times as fast as transformers' own MLA, and below as MHA."
        + (f" Failed, not drawn: {failed} cases." if failed else ""),
    ]
    return "\n".join(lines)
