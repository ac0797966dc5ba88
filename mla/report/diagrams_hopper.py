"""Drawings of notebook 06: how tiles come from memory to the SMs, and what all drawings of the Hopper kernel share.

What is drawn of the kernel is written down here and in the modules named `diagrams_hopper_`, since the report imports
no kernels; the tests compare it with `mla/kernels/hopper.py`.
"""

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mla.report.style import DARK, GREEN, GREY, INDIGO, ORANGE, SKY, VERMILLION, open_figure, styled

# Who issues a product, frees a part of shared memory, or loads.
ROLE_COLOURS = {"even": SKY, "odd": ORANGE, "producer": GREEN}
TILE, RANK, ROPE = 64, 512, 64
TILE_BYTES = TILE * (RANK + ROPE) * 2
CENTRED = {"ha": "center", "va": "center", "color": DARK}
ARROW = {"arrowstyle": "-|>", "color": DARK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}


def small(axes: Axes, x: float, y: float, text: str, **options) -> None:
    """A small text, from its left end."""
    axes.text(x, y, text, **({"va": "center", "color": DARK, "fontsize": 8, "linespacing": 1.25} | options))


def foot(figure: Figure, text: str) -> None:
    """The small lines below a drawing."""
    figure.text(0.01, 0.012, text, fontsize=7.5, color=GREY, va="bottom", linespacing=1.25)


# What the producer of a CTA asks for with one pair of tiles, in order; {} stands for the tile that it prefetches.
STEPS = (
    "1  load tile t",
    "2  prefetch rows 0..31 of tile {}",
    "3  load tile t + 1",
    "4  prefetch rows 32..63 of tile {}",
)


@styled
def l2_to_sm_paths() -> Figure:
    """Draw how the two CTAs of a request with 128 heads get a pair of tiles, and the bytes on each way."""
    figure, (axes,) = open_figure(9, 5.2)
    figure.subplots_adjust(left=0.005, right=0.995, top=0.995, bottom=0.075)
    axes.set(xlim=(0, 100), ylim=(0, 60))
    axes.axis("off")
    for left, width, name in ((0, 17, "GPU memory"), (27, 23, "L2 cache"), (64, 36, "two SMs")):
        axes.add_patch(Rectangle((left, 15), width, 45, facecolor="#f6f6f6"))
        axes.text(left + 1, 58, name, color=GREY, weight="bold", va="center")
    for low, colour, tile, heads, sm_low in (
        (46, INDIGO, "t + 2", "0..63", 39), (18, VERMILLION, "t + 3", "64..127", 17),
    ):  # fmt: skip
        _block(axes, 1.5, low, 14, 8, colour, f"tile {tile}\n{TILE} × {RANK + ROPE}")
        for half, rows in enumerate(("rows 32..63", "rows 0..31")):
            _block(axes, 29, low + 4 * half, 19, 4, colour, f"tile {tile}, {rows}")
        axes.annotate("", (29, low + 4), (15.5, low + 4), arrowprops=ARROW)
        small(axes, 22.2, low + 5.7, "once", ha="center")
        _block(axes, 65.5, sm_low, 33, 17, colour, "")
        small(axes, 67, sm_low + 14.4, f"CTA of heads {heads}", weight="bold", fontsize=8.5)
        for place, step in enumerate(STEPS):
            small(axes, 67, sm_low + 11 - 2.9 * place, step.format(tile), fontsize=8.5)
        axes.annotate("", (48, low + 4), (65.5, low + 4), arrowprops=ARROW | {"linestyle": "--", "color": GREY})
        small(axes, 57, low + 5.7, "asks, in halves", ha="center")
    for low, tile in ((37, "t"), (30, "t + 1")):
        _block(axes, 29, low, 19, 6, GREEN, f"tile {tile}, here already")
    for end in (42, 31):
        axes.annotate("", (65.5, end), (48, 36.5), arrowprops=ARROW | {"linewidth": 2})
    small(axes, 63.3, 36.5, "each CTA\nloads both", ha="right")
    _draw_ways(axes)
    foot(
        figure,
        "Each CTA asks for one of the next two tiles, so L2 gets each once, and the loads of the next pair find it "
        "there. A whole tile at once, or in front of both loads,\nwould hold them up. In a run's first pair both "
        "halves come last, once tile t has landed. bytes_moved in data/ counts the first way: cache rows once.",
    )
    return figure


def pair_traffic() -> dict[str, tuple[int, float]]:
    """Bytes of a pair of tiles, and FLOP a byte at 128 heads, on the way to L2 and on the way to two SMs."""
    flops = 2 * TILE * 128 * 2 * (RANK + ROPE + RANK)
    return {name: (count * TILE_BYTES, flops / (count * TILE_BYTES)) for name, count in (("to L2", 2), ("to SMs", 4))}


def _draw_ways(axes: Axes) -> None:
    """Bars to scale: what a pair of tiles costs on each way."""
    traffic = pair_traffic()
    widest = max(size for size, _ in traffic.values())
    for low, name, text in (
        (8, "to L2", "GPU memory to L2, each tile once"),
        (1, "to SMs", "L2 to SMs, each tile twice"),
    ):
        size, intensity = traffic[name]
        width = 56 * size / widest
        axes.add_patch(Rectangle((0, low), width, 3, facecolor=GREEN))
        small(axes, 0, low + 4.4, f"{text}: {size:,} bytes a pair, {intensity:.0f} FLOP a byte", fontsize=8.5)


def _block(axes: Axes, left: float, low: float, width: float, height: float, colour: str, text: str) -> None:
    """A tile, a half of one, or a CTA."""
    axes.add_patch(
        Rectangle((left, low), width, height, facecolor=to_rgba(colour, 0.25), edgecolor=DARK, linewidth=0.8)
    )
    axes.text(left + width / 2, low + height / 2, text, fontsize=8.5, linespacing=1.25, **CENTRED)
