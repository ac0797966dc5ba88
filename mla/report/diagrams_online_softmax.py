"""The pictures of notebook 03: one pass over the tiles of a request, and which SMs have work."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from mla.report.compare import BATCH_SIZES, at_shapes, tokens_name
from mla.report.style import BLUE, DARK, GREEN, GREY, INDIGO, ORANGE, SKY, caption, open_figure, styled

ARROW = {"arrowstyle": "-|>", "color": DARK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}
IDLE = "#eeeeee"
WAVE_COLOURS = (SKY, BLUE, INDIGO)


@styled
def one_pass(block_h: int, block_n: int, rank: int, rope: int) -> Figure:
    """Draw what one program does with one request: three tiles, what stays on the SM, what memory sees.

    Args:
        block_h: heads that the program takes.
        block_n: tokens in a tile.
        rank, rope: widths of the latent and of the rotated part of a cache row.
    """
    figure, (axes,) = open_figure(8.4, 4.5)
    figure.subplots_adjust(left=0.005, right=0.995, top=0.99, bottom=0.01)
    axes.set(xlim=(0, 100), ylim=(0, 56))
    axes.axis("off")
    for low, high, name in ((44, 56, "GPU memory"), (10.5, 43, "one SM"), (0, 9.5, "GPU memory")):
        axes.add_patch(Rectangle((0, low), 100, high - low, facecolor="#f6f6f6" if name != "one SM" else "white"))
        axes.text(1, high - 1, name, va="top", color=GREY, weight="bold")

    columns = (19, 44, 69)
    _arrow(axes, (13.5, 33.75), (19, 33.75))
    _box(axes, 1.5, 28, 12, 11, IDLE, f"query\n{block_h} × {rank + rope}\nloaded once,\nfor all tiles")
    _box(axes, 1.5, 14, 12, 10.5, IDLE, "start\nmax = -inf\nsum = 0\nacc = 0")
    for place, left in enumerate(columns):
        last = place == len(columns) - 1
        name = "last tile" if last else f"tile {place}"
        _box(axes, left, 46, 19, 6.5, SKY, f"{name}: {block_n} × {rank + rope}", alpha=0.55)
        _arrow(axes, (left + 9.5, 46), (left + 9.5, 40), "loaded once" if not place else "")
        _box(axes, left, 27.5, 19, 12.5, ORANGE, _uses(block_h, block_n, rank), alpha=0.3)
        _arrow(axes, (left + 9.5, 27.5), (left + 9.5, 24.5))
        _box(axes, left, 14, 19, 10.5, GREEN, f"max, sum: {block_h}\nacc: {block_h} × {rank}, fp32", alpha=0.3)
        _arrow(axes, (left - 6 if place else 13.5, 19), (left, 19), "× c" if place else "")
    axes.text(columns[1] + 22, 49.2, "…", ha="center", va="center", fontsize=14, color=DARK)
    _arrow(axes, (columns[2] + 9.5, 14), (columns[2] + 9.5, 7), "acc / sum", middle=11.9)
    _box(axes, columns[2], 1.2, 19, 5.8, SKY, f"out: {block_h} × {rank}\nlse: {block_h}, written once", alpha=0.55)
    axes.text(2, 3.5, "No score and no probability comes down here.", va="center", color=DARK)
    axes.text(90, 33.75, "scores\nexist only\nhere", ha="left", va="center", color=DARK, fontsize=8.5, linespacing=1.25)
    axes.text(90, 19.25, "running\nstate", ha="left", va="center", color=DARK, fontsize=8.5, linespacing=1.25)
    return figure


def _uses(block_h: int, block_n: int, rank: int) -> str:
    """The two uses of a tile, as the text of its box."""
    return f"as keys:\nscores {block_h} × {block_n}, then p\nas values:\np × ({block_n} × {rank})"


def _box(axes: Axes, left: float, low: float, width: float, height: float, colour: str, text: str, alpha: float = 1):
    """A box with a text in its middle."""
    options = {"boxstyle": "round,pad=0,rounding_size=0.8", "edgecolor": DARK, "linewidth": 0.8}
    patch = FancyBboxPatch((left, low), width, height, facecolor=colour, alpha=alpha, **options)
    axes.add_patch(patch)
    centre = (left + width / 2, low + height / 2)
    axes.text(*centre, text, ha="center", va="center", color=DARK, fontsize=8.5, linespacing=1.25)


def _arrow(axes: Axes, start: tuple, end: tuple, text: str = "", middle: float | None = None) -> None:
    """An arrow, with a text beside its middle (or beside the height `middle`)."""
    axes.annotate("", end, start, arrowprops=ARROW)
    if text and start[1] == end[1]:
        axes.text((start[0] + end[0]) / 2, start[1] + 1.4, text, ha="center", va="bottom", color=DARK, fontsize=8.5)
    elif text:
        height = (start[1] + end[1]) / 2 if middle is None else middle
        axes.text(start[0] + 0.8, height, text, va="center", color=DARK, fontsize=8.5)


@styled
def busy_sms(frame: pd.DataFrame, context_len: int, block_h: int, num_sms: int) -> Figure:
    """Draw the SMs of a GPU as squares, a panel a batch size, coloured by the programs that each has to run.

    Programs are counted, one a request and block of heads, each of which fills an SM; latencies are measured.

    Args:
        frame: what `data.load` returns; the latencies of `online_softmax` stand below the panels.
        context_len: tokens of every request.
        block_h: heads of a program.
        num_sms: SMs of the GPU.
    """
    rows = at_shapes(frame, "online_softmax")
    latency_us = rows["latency_us_p50"].where(rows["tflops"].notna())
    figure, all_axes = open_figure(9, 3.3, 1, len(BATCH_SIZES))
    figure.subplots_adjust(left=0.01, right=0.99, top=0.85, bottom=0.26, wspace=0.08)
    columns = 12
    most = 0
    for axes, batch_size in zip(all_axes, BATCH_SIZES, strict=True):
        axes.set(xlim=(0, columns), ylim=(-(-num_sms // columns), 0), aspect="equal")
        axes.axis("off")
        programs = batch_size * (128 // block_h)
        for sm, load in enumerate(loads(programs, num_sms)):
            colour = WAVE_COLOURS[min(load, len(WAVE_COLOURS)) - 1] if load else IDLE
            axes.add_patch(Rectangle((sm % columns + 0.08, sm // columns + 0.08), 0.84, 0.84, facecolor=colour))
            most = max(most, load)
        busy = min(programs, num_sms)
        axes.set_title(f"batch {batch_size}: {programs} programs\n{busy} of {num_sms} SMs busy", color=DARK)
        latency = latency_us[batch_size, context_len]
        text = "no result" if pd.isna(latency) else f"{latency:.0f} us"
        axes.text(0.5, -0.03, text, transform=axes.transAxes, ha="center", va="top", weight="bold", color=DARK)
    _load_legend(figure, most)
    caption(figure, frame, f"Online softmax, 128 heads, bf16, context {tokens_name(context_len)}; programs are counted")
    return figure


def loads(programs: int, num_sms: int) -> list[int]:
    """How many programs each SM runs, one after another, where they are all of the same length."""
    return [programs // num_sms + (sm < programs % num_sms) for sm in range(num_sms)]


def _load_legend(figure: Figure, most: int) -> None:
    """What the colours of `busy_sms` mean, in one line below the panels."""
    names = ["no program", "one program", "two, one after the other", "three or more"][: min(most, 3) + 1]
    colours = (IDLE, *WAVE_COLOURS)
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour) for colour in colours[: len(names)]]
    figure.legend(
        handles, names, loc="lower center", bbox_to_anchor=(0.5, 0.07), ncols=len(names), frameon=False, fontsize=8.5
    )
