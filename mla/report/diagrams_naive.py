"""The pictures of notebook 01: how large a cache grows, and what the naive form builds from it."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.patheffects import withStroke

from mla.report.cache_size import BF16_BYTES, GIB
from mla.report.compare import tokens_name
from mla.report.style import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    LEADER,
    ORANGE,
    STRIP_COLOUR,
    VERMILLION,
    context_axis,
    open_figure,
    spread,
    styled,
)

CONTEXTS = [2**power for power in range(12, 21)]
# Colour and dash of each kind of attention; a model's name ends in its kind.
KINDS = {
    "(MHA)": (VERMILLION, (0, (1, 1))),
    "(GQA)": (ORANGE, "--"),
    "(MQA)": (GREEN, "-."),
    "(MLA)": (BLUE, "-"),
}


@styled
def cache_over_context(bytes_per_token: dict[str, int], memory_gib: dict[str, float]) -> Figure:
    """Draw the cache of one sequence over its length, a line a model, with the memory of GPUs as grey lines.

    Args:
        bytes_per_token: of all layers, by the model's name, which ends in `(MHA)`, `(GQA)`, `(MQA)` or `(MLA)`.
        memory_gib: by the GPU's name; where a line meets the smallest, the context is written.
    """
    figure, (axes,) = open_figure(8, 4)
    figure.subplots_adjust(left=0.08, right=0.73, top=0.98, bottom=0.125)
    context_axis(axes, CONTEXTS)
    axes.set_xticks(CONTEXTS, [tokens_name(tokens) if tokens < 2**20 else "1M" for tokens in CONTEXTS])
    axes.set_xlim(CONTEXTS[0], CONTEXTS[-1])
    axes.set_yscale("log", base=2)
    ticks = 2.0 ** np.arange(-5, 10, 2)
    axes.set_yticks(ticks, [f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks])
    axes.set_ylim(ticks[0], 2**9.6)
    axes.set_xlabel("context length, tokens (log)")
    axes.set_ylabel("cache of one sequence, GiB (log)")
    for name, gib in memory_gib.items():
        axes.axhline(gib, color=GREY, linewidth=1.1)
        text = f"{name}, {gib:g} GB"
        axes.annotate(text, (CONTEXTS[0], gib), (4, 2), textcoords="offset points", fontsize=8.5, color=DARK)
    smallest = min(memory_gib.values())
    for name, size in bytes_per_token.items():
        colour, dash = KINDS[name[name.rindex("(") :]]
        axes.plot(CONTEXTS, [tokens * size / GIB for tokens in CONTEXTS], color=colour, linestyle=dash, linewidth=2)
        full = smallest * GIB / size
        if full <= CONTEXTS[-1]:
            axes.plot(full, smallest, "o", color=colour, markersize=5)
            place = {"textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": 8.5, "weight": "bold"}
            text = axes.annotate(f"{full / 1024:.0f}K", (full, smallest), (-2, 3), color=DARK, **place)
            text.set_path_effects([withStroke(linewidth=3, foreground="white")])
    _label_lines(axes, {name: CONTEXTS[-1] * size / GIB for name, size in bytes_per_token.items()}, bytes_per_token)
    return figure


def _label_lines(axes: Axes, ends: dict[str, float], bytes_per_token: dict[str, int]) -> None:
    """Name each line and its bytes a token at the right, far enough apart to be read."""
    low, high = np.log2(axes.get_ylim())
    places = spread([float(np.log2(end)) for end in ends.values()], 1.5, low, high)
    for (name, end), place in zip(ends.items(), places, strict=True):
        axes.annotate(
            f"{name}\n{bytes_per_token[name]:,} B a token",
            (CONTEXTS[-1], end),
            (1.04, (place - low) / (high - low)),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=DARK,
            annotation_clip=False,
            arrowprops=LEADER | {"color": KINDS[name[name.rindex("(") :]][0]},
        )


@styled
def naive_step(
    num_heads: int, kv_lora_rank: int, qk_nope_head_dim: int, qk_rope_head_dim: int, v_head_dim: int
) -> Figure:
    """Draw what naive decode builds from the cache of n tokens, and cached against rebuilt bytes to scale."""
    figure, (axes,) = open_figure(8, 4)
    figure.subplots_adjust(left=0.005, right=0.995, top=0.995, bottom=0.005)
    axes.set_xlim(0, 90)
    axes.set_ylim(0, 46)
    axes.axis("off")
    heads = f"{num_heads} × "
    _box(axes, 2, 30, 13, 8, BLUE, f"latent\nn × {kv_lora_rank}")
    _box(axes, 2, 24, 13, 6, ORANGE, f"rope key\nn × {qk_rope_head_dim}")
    _note(axes, 8.5, 39.3, f"kv_cache: {kv_lora_rank + qk_rope_head_dim} wide\nkept between steps", bold=True)
    _stack(axes, 27, 34, 15, 7, BLUE, f"keys\n{heads}n × {qk_nope_head_dim}")
    _stack(axes, 27, 17, 15, 7, GREEN, f"values\n{heads}n × {v_head_dim}")
    _note(axes, 36, 43.3, "rebuilt at every step, then dropped", bold=True)
    _box(axes, 56, 28, 12, 7, "white", f"scores\n{heads}n")
    _box(axes, 56, 38, 12, 6, STRIP_COLOUR, f"query, one token\n{heads}{qk_nope_head_dim + qk_rope_head_dim}")
    _box(axes, 76, 28, 12, 7, "white", f"softmax\n{heads}n")
    _box(axes, 76, 17.5, 12, 6, STRIP_COLOUR, f"output\n{heads}{v_head_dim}")
    _arrow(axes, (15, 35.5), (27, 37.5), "× w_uk", (21, 38))
    _arrow(axes, (15, 32.5), (27, 21), "× w_uv", (22.8, 28.3))
    _arrow(axes, (44.2, 37.5), (56, 33), "q_nope ·", (51, 36.8))
    _arrow(axes, (15, 25.5), (56, 30), "q_pe ·  (one key, all heads)", (36.5, 30.2))
    _arrow(axes, (62, 38), (62, 35))
    _arrow(axes, (68, 31.5), (76, 31.5), "× scale", (72, 33))
    _arrow(axes, (82, 28), (82, 23.5))
    _arrow(axes, (44.2, 20.5), (76, 20.5), "weighted sum over the n tokens", (60, 21.9))
    cached = (kv_lora_rank + qk_rope_head_dim) * BF16_BYTES
    rebuilt = num_heads * (qk_nope_head_dim + v_head_dim) * BF16_BYTES
    _note(axes, 2, 11.6, f"One token in one layer, to scale: {cached:,} bytes are cached", align="left")
    _bar(axes, 8, 86 * cached / rebuilt, ORANGE)
    _bar(axes, 8, 86 * kv_lora_rank * BF16_BYTES / rebuilt, BLUE)
    _note(axes, 2, 5.6, f"{rebuilt:,} bytes of keys and values are rebuilt from them", align="left")
    _bar(axes, 2, 86 * qk_nope_head_dim / (qk_nope_head_dim + v_head_dim), BLUE)
    _bar(axes, 2, 86 * v_head_dim / (qk_nope_head_dim + v_head_dim), GREEN, 86)
    return figure


def _box(
    axes: Axes, x: float, y: float, width: float, height: float, colour: str, text: str, zorder: float = 3
) -> None:
    """A tensor, with its name and shape in it."""
    strength = 1 if colour in ("white", STRIP_COLOUR) else 0.35
    axes.add_patch(Rectangle((x, y), width, height, facecolor="white", edgecolor="none", zorder=zorder))
    axes.add_patch(
        Rectangle(
            (x, y), width, height, facecolor=to_rgba(colour, strength), edgecolor=DARK, linewidth=0.9, zorder=zorder
        )
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5, color=DARK, zorder=zorder)


def _stack(axes: Axes, x: float, y: float, width: float, height: float, colour: str, text: str) -> None:
    """A tensor with one sheet a head, the first in front."""
    for offset, zorder in ((2.2, 2.0), (1.1, 2.5)):
        _box(axes, x + offset, y + offset * 0.8, width, height, colour, "", zorder)
    _box(axes, x, y, width, height, colour, text)


def _note(axes: Axes, x: float, y: float, text: str, bold: bool = False, align: str = "center") -> None:
    weight = "bold" if bold else "normal"
    axes.text(x, y, text, ha=align, va="bottom", fontsize=8.5, color=DARK, weight=weight)


def _bar(axes: Axes, y: float, width: float, colour: str, end: float | None = None) -> None:
    """A bar to scale, from the left margin, or so that it ends `end` units from there."""
    left = 2 if end is None else 2 + end - width
    axes.add_patch(Rectangle((left, y), width, 3, facecolor=colour, edgecolor="none"))


def _arrow(axes: Axes, start: tuple, end: tuple, text: str = "", place: tuple = (0, 0)) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "color": GREY, "linewidth": 1.2, "shrinkA": 1, "shrinkB": 1}
    axes.add_patch(FancyArrowPatch(start, end, zorder=1.5, **style))
    axes.text(*place, text, ha="center", va="center", fontsize=8.5, color=DARK, zorder=5)
