"""The pictures of notebook 04: parts on SMs and their merge over time, and latency over the split count."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from mla.report.compare import BATCH_SIZES, CONTEXT_LENS, tokens_name
from mla.report.schema import DEFAULT_PAGE_SIZE
from mla.report.style import BLUE, DARK, GREEN, GREY, INDIGO, ORANGE, SKY, VERMILLION, caption, open_figure, styled

REQUEST_COLOURS = (SKY, ORANGE, GREEN)
CONTEXT_LOOKS = ((VERMILLION, "o"), (ORANGE, "s"), (BLUE, "^"), (INDIGO, "D"))
# How long the drawn merge lasts, in tiles: for the eye, not measured.
MERGE_TILES = 1.5


@styled
def timeline(batch_size: int, tiles: int, split_counts: tuple[int, ...], num_sms: int) -> Figure:
    """Draw which SM works on which part when, a panel a split count; a merge follows where there are parts.

    One program a part, all tiles of the same length, parts handed out in order: counted, not measured.

    Args:
        batch_size: requests, at most three; each has a colour and one block of heads.
        tiles: tiles of every request.
        split_counts: parts a request, a panel each; 1 stands for one pass without a merge.
        num_sms: SMs of the drawn GPU.
    """
    figure, all_axes = open_figure(9, 3.1, 1, len(split_counts), sharey=True)
    figure.subplots_adjust(left=0.045, right=0.995, top=0.86, bottom=0.27, wspace=0.06)
    for axes, num_splits in zip(all_axes, split_counts, strict=True):
        parts = schedule(batch_size, tiles, num_splits, num_sms)
        end = max(start + length for *_, start, length in parts)
        for sm, request, start, length in parts:
            _bar(axes, sm, start, length, REQUEST_COLOURS[request], str(length))
        if num_splits > 1:
            axes.add_patch(Rectangle((end, -0.45), MERGE_TILES, num_sms - 0.1, facecolor=DARK, alpha=0.75))
            axes.text(end + MERGE_TILES / 2, num_sms / 2 - 0.5, "merge", color="white", rotation=90, **_CENTRED)
        busy = sum(length for *_, length in parts) / (num_sms * end)
        programs = "program" if num_splits == 1 else "parts"
        axes.set_title(f"{num_splits} {programs} a request\n{end} tiles long, SMs busy {busy:.0%}", color=DARK)
        axes.set(xlim=(0, tiles + 0.3), ylim=(num_sms - 0.45, -0.55), xlabel="time, in tiles", yticks=range(num_sms))
        axes.grid(visible=False)
    all_axes[0].set_ylabel("SM")
    names = [f"request {request}" for request in range(batch_size)]
    handles = [Patch(facecolor=colour) for colour in REQUEST_COLOURS[:batch_size]]
    figure.legend(
        handles, names, loc="lower center", bbox_to_anchor=(0.5, -0.01), ncols=batch_size, frameon=False, fontsize=8.5
    )
    return figure


_CENTRED = {"ha": "center", "va": "center", "fontsize": 8.5}


def schedule(batch_size: int, tiles: int, num_splits: int, num_sms: int) -> list[tuple[int, int, int, int]]:
    """(sm, request, start, length) of every part with tiles; the SM that is free first takes the next part."""
    split_len = -(-tiles // num_splits)
    free_at = [0] * num_sms
    placed = []
    for request in range(batch_size):
        for first in range(0, tiles, split_len):
            sm = free_at.index(min(free_at))
            length = min(split_len, tiles - first)
            placed.append((sm, request, free_at[sm], length))
            free_at[sm] += length
    return placed


def _bar(axes: Axes, sm: int, start: int, length: int, colour: str, text: str) -> None:
    """One part on one SM."""
    axes.add_patch(Rectangle((start, sm - 0.42), length, 0.84, facecolor=colour, edgecolor="white", alpha=0.8))
    axes.text(start + length / 2, sm, text, color=DARK, **_CENTRED)


def split_sweep(
    tune: pd.DataFrame, block_h: int, block_n: int, num_sms: int, loads: str = "descriptor"
) -> pd.DataFrame:
    """Measured latencies of one tile shape at every split count that was swept, 128 heads, bf16.

    Args:
        tune: what `data.load_tune` returns.
        block_h, block_n: heads and tokens of a tile; the configuration with two stages.
        num_sms: SMs of the GPU, from which the kernel's own count follows.
        loads: `pointer` or `descriptor` (TMA).

    Returns:
        A row a shape and count: `batch_size`, `context_len`, `num_splits` (the kernel's own count filled in),
        `is_default`, `programs`, `waves`, `wave_tiles` (waves times the tiles of a part), `latency_us_p50`, and
        `times_default` (of the latency at the kernel's own count).

    Raises:
        ValueError: several configurations of the sweep have this tile shape.
    """
    rows = tune[tune["usable"] & (tune["num_heads"] == 128) & (tune["dtype"] == "bf16")]
    rows = rows[(rows["page_size"] == DEFAULT_PAGE_SIZE) & (rows["loads"] == loads) & (rows["num_stages"] == 2)]
    rows = rows[(rows["block_h"] == block_h) & (rows["block_n"] == block_n)]
    if len(set(rows["num_warps"])) > 1:
        raise ValueError(f"expected one configuration with tiles of {block_h} x {block_n}, got several; choose another")
    rows = rows[["batch_size", "context_len", "num_splits", "latency_us_p50"]].copy()
    head_blocks, tiles = 128 // block_h, rows["context_len"] // block_n
    own = (num_sms // (rows["batch_size"] * head_blocks)).clip(lower=1).combine(tiles, min)
    rows["is_default"] = rows["num_splits"].isna()
    rows["num_splits"] = rows["num_splits"].fillna(own).astype(int)
    rows["programs"] = rows["batch_size"] * head_blocks * rows["num_splits"]
    rows["waves"] = -(-rows["programs"] // num_sms)
    rows["wave_tiles"] = rows["waves"] * -(-tiles // rows["num_splits"])
    shape = ["batch_size", "context_len"]
    default_us = rows[rows["is_default"]].set_index(shape)["latency_us_p50"].rename("default_us")
    rows = rows.merge(default_us, left_on=shape, right_index=True)
    rows["times_default"] = rows["latency_us_p50"] / rows.pop("default_us")
    return rows.sort_values([*shape, "num_splits"]).reset_index(drop=True)


@styled
def latency_over_splits(tune: pd.DataFrame, block_h: int, block_n: int, num_sms: int) -> Figure:
    """Draw measured latency over the split count, a panel a batch size, as multiples of the kernel's own count.

    Args:
        tune, block_h, block_n, num_sms: as in `split_sweep`.
    """
    rows = split_sweep(tune, block_h, block_n, num_sms)
    figure, all_axes = open_figure(9, 3.7, 1, len(BATCH_SIZES), sharey=True)
    figure.subplots_adjust(left=0.085, right=0.995, top=0.91, bottom=0.36, wspace=0.06)
    for axes, batch_size in zip(all_axes, BATCH_SIZES, strict=True):
        here = rows[rows["batch_size"] == batch_size]
        for context_len, (colour, marker) in zip(CONTEXT_LENS, CONTEXT_LOOKS, strict=True):
            line = here[here["context_len"] == context_len]
            axes.plot(line["num_splits"], line["times_default"], color=colour, marker=marker, markersize=5)
        axes.axhline(1, color=GREY, linewidth=1, zorder=1)
        axes.set_title(f"batch {batch_size}", color=DARK)
        axes.set_xscale("log", base=2)
        counts = here.drop_duplicates("num_splits").sort_values("num_splits")
        labels = [_tick(row) for row in counts.itertuples()]
        axes.set_xticks(counts["num_splits"], labels, fontsize=8.5, linespacing=1.2)
        axes.minorticks_off()
        axes.margins(x=0.25)
    all_axes[0].set_ylabel("latency, times own count's")
    figure.text(0.012, 0.333, "parts\nprograms\nwaves", va="top", color=DARK, fontsize=8.5, linespacing=1.2)
    handles = [Line2D([], [], color=colour, marker=marker, markersize=5) for colour, marker in CONTEXT_LOOKS]
    names = [f"context {tokens_name(context_len)}" for context_len in CONTEXT_LENS]
    figure.legend(
        handles, names, loc="lower center", bbox_to_anchor=(0.5, 0.04), ncols=len(names), frameon=False, fontsize=8.5
    )
    note = f"Portable kernel, tiles of {block_h} heads and {block_n} tokens, 128 heads, bf16; programs are counted"
    caption(figure, tune, note)
    return figure


def _tick(row) -> str:
    """Parts, programs and waves of one count, below each other; the kernel's own is marked."""
    return f"{row.num_splits}{' (own)' if row.is_default else ''}\n{row.programs}\n{row.waves}"
