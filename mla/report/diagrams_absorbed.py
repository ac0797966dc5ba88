"""The drawings of notebook 02: where w_uk and w_uv go, and FLOP per byte over the number of query heads."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from mla.config import MLAConfig
from mla.report.compare import usual
from mla.report.style import BLUE, DARK, GREEN, GREY, INDIGO, ORANGE, VERMILLION, open_figure, styled

# The foot of the axis of intensities, FLOP/byte.
LOWEST = 0.4
# Fill of a box: weights, what is cached once for all heads, what is rebuilt for each token, what one query token makes.
WEIGHT, SHARED, REBUILT, ONCE = "#e8e2f3", "#d9ecf7", "#f8ddd0", "#f4f4f4"


@styled
def absorption(config: MLAConfig) -> Figure:
    """Draw the naive and the absorbed decode of one head side by side, with the width of every vector.

    Args:
        config: the layer's dimensions, which are written into the boxes.
    """
    figure, all_axes = open_figure(7, 3.7, 2, 1)
    figure.subplots_adjust(left=0.005, right=0.995, top=0.995, bottom=0.005, hspace=0.03)
    for axes in all_axes:
        axes.set(xlim=(0, 100), ylim=(0, 33))
        axes.axis("off")
    _draw_naive(all_axes[0], config)
    _draw_absorbed(all_axes[1], config)
    return figure


def _draw_naive(axes: Axes, config: MLAConfig) -> None:
    rank, rope, nope, value = _widths(config)
    _title(axes, "Naive: w_uk and w_uv meet every cached token")
    _box(axes, 0.3, 19, 12.7, "q_nope, q_pe", f"{nope} + {rope}", ONCE)
    _box(axes, 0.3, 3, 12.7, "cached row", f"{rank} + {rope}", SHARED)
    _box(axes, 23, 9, 12, "w_uk", f"{nope} × {rank}", WEIGHT)
    _box(axes, 23, 0.5, 12, "w_uv", f"{value} × {rank}", WEIGHT)
    _box(axes, 43, 9, 13, "key", f"{nope} + {rope}", REBUILT)
    _box(axes, 43, 0.5, 13, "value", f"{value}", REBUILT)
    _box(axes, 61, 19, 15, "scores, softmax", "1 a token", ONCE)
    _box(axes, 84, 9, 15, "out", f"{value}", ONCE)
    for start, end in (
        ((13, 6.5), (23, 11.5)), ((13, 5.5), (23, 4)), ((35, 12.5), (43, 12.5)), ((35, 4), (43, 4)),
        ((13, 22.5), (61, 22.5)), ((56, 12.5), (65, 19)), ((56, 4), (84, 10.5)), ((76, 21), (86, 16)),
    ):  # fmt: skip
        _arrow(axes, start, end)
    axes.text(45.5, 17.2, "tokens × heads, every step", ha="center", fontsize=8.5, color=VERMILLION)


def _draw_absorbed(axes: Axes, config: MLAConfig) -> None:
    rank, rope, nope, value = _widths(config)
    _title(axes, "Absorbed: w_uk meets the query, w_uv the output")
    _box(axes, 0.3, 19, 12.7, "q_nope, q_pe", f"{nope} + {rope}", ONCE)
    _box(axes, 21, 19, 12, "w_ukᵀ", f"{rank} × {nope}", WEIGHT)
    _box(axes, 41, 19, 14, "q_absorbed", f"{rank} + {rope}", ONCE)
    _box(axes, 61, 19, 15, "scores, softmax", "1 a token", ONCE)
    roles = f"{rank} + {rope}: key; first {rank}: value"
    _box(axes, 22, 3, 33, "cached row, shared by all heads", roles, SHARED)
    _box(axes, 61, 3, 15, "attended latent", f"{rank}", ONCE)
    _box(axes, 80, 3, 9.5, "w_uv", f"{value}×{rank}", WEIGHT)
    _box(axes, 93, 3, 6.5, "out", f"{value}", ONCE)
    for start, end in (
        ((13, 22.5), (21, 22.5)), ((33, 22.5), (41, 22.5)), ((55, 22.5), (61, 22.5)), ((52, 10), (63, 19)),
        ((55, 6.5), (61, 6.5)), ((69, 19), (69, 10)), ((76, 6.5), (80, 6.5)), ((89.5, 6.5), (93, 6.5)),
    ):  # fmt: skip
        _arrow(axes, start, end)
    axes.text(27, 15.6, "once a step", ha="center", fontsize=8.5, color=GREEN)
    axes.text(85, 11.6, "once a step", ha="center", fontsize=8.5, color=GREEN)


def _widths(config: MLAConfig) -> tuple[int, int, int, int]:
    return config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim


def _title(axes: Axes, text: str) -> None:
    axes.text(0.3, 30.5, text, fontsize=9.5, weight="bold", color=DARK, va="center")


def _box(axes: Axes, x: float, y: float, width: float, name: str, size: str, colour: str) -> None:
    """A rounded box with a name and, below it, the width of what it holds."""
    shape = "round,pad=0,rounding_size=0.8"
    axes.add_patch(FancyBboxPatch((x, y), width, 7, shape, facecolor=colour, edgecolor=GREY, linewidth=0.9))
    axes.text(x + width / 2, y + 4.7, name, ha="center", va="center", fontsize=8.5, color=DARK)
    axes.text(x + width / 2, y + 2, size, ha="center", va="center", fontsize=8, color=GREY)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    look = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 1}
    axes.annotate("", end, start, arrowprops=look)


@styled
def intensity(frame: pd.DataFrame, published: pd.DataFrame, config: MLAConfig) -> Figure:
    """Draw FLOP per cached byte over the number of query heads, with the ridges of two GPUs.

    Args:
        frame: what `data.load` returns; its median ceilings give the measured ridge.
        published: what `data.load_published` returns, for the H100's data sheet.
        config: the layer's dimensions.
    """
    rows = usual(frame)
    gpu = str(frame["gpu"].iloc[0]).removeprefix("NVIDIA ")
    per_row = (config.cache_dim + config.kv_lora_rank) / config.cache_dim
    ridges = {
        "H100, data sheet": published.loc["h100-matmul", "value"] / published.loc["h100-read", "value"],
        f"{gpu}, measured": 1000 * rows["matmul_tflops"].median() / rows["read_gbps"].median(),
    }
    figure, (axes,) = open_figure(6.4, 3.3)
    figure.subplots_adjust(left=0.095, right=0.985, top=0.98, bottom=0.205)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = 2 ** np.arange(0, 9)
    axes.set_xlim(0.9, 300)
    axes.set_ylim(LOWEST, 700)
    axes.plot(ticks, per_row * ticks, "o-", color=BLUE, linewidth=2.2)
    axes.plot(ticks, np.ones(len(ticks)), "s--", color=ORANGE)
    _note(axes, f"MLA, absorbed: {per_row:.2f} × heads", (16, 16 * per_row), (-10, 2), BLUE, ha="right", weight="bold")
    _note(axes, "MHA, keys and values cached: 1", (16, 1), (0, 8), DARK, ha="center")
    for (name, ridge), colour in zip(ridges.items(), (INDIGO, VERMILLION), strict=True):
        # the labels of the two ridges stay apart
        is_upper = ridge == max(ridges.values())
        side = 1 if is_upper else -1
        axes.axhline(ridge, color=colour, linewidth=1.3, linestyle="-" if is_upper else "--")
        va = "bottom" if is_upper else "top"
        _note(axes, f"ridge of the {name}: {ridge:.0f} FLOP/byte", (1, ridge), (0, 4 * side), colour, va=va)
        crossing = ridge / per_row
        axes.plot([crossing, crossing], [LOWEST, ridge], color=colour, linewidth=0.9, linestyle=":")
        text, ha = f"{np.ceil(crossing):.0f}", "left" if is_upper else "right"
        _note(axes, text, (crossing, LOWEST), (4 * side, 3), colour, ha=ha, va="bottom", weight="bold")
    axes.axhspan(min(ridges.values()), max(ridges.values()), color="#f1f1f1", zorder=0)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
    axes.minorticks_off()
    axes.set_xlabel("query heads a GPU that share a cached row (log)")
    axes.set_ylabel("FLOP per byte of cache (log)")
    notes = (
        "Bold: the first head count above the ridge.",
        f"{gpu}, {frame['date'].iloc[0]}, and data/published.csv. bf16, one query token.",
    )
    figure.text(0.01, 0.012, " ".join(notes), fontsize=7.5, color=GREY, va="bottom")
    return figure


def _note(
    axes: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], colour: str, **options
) -> None:
    axes.annotate(text, place, offset, textcoords="offset points", color=colour, **options)
