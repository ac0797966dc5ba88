"""The drawing of one pair of tiles over time: what the three roles do, and the barriers between them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mla.report.diagrams_hopper import ARROW, CENTRED, ROLE_COLOURS, foot
from mla.report.style import DARK, GREEN, GREY, ORANGE, SKY, open_figure, styled


class Work(NamedTuple):
    """A piece of work in the timeline; `units` is what a product costs, in products of 64 x 64 x 32."""

    row: str
    start: float
    end: float
    text: str
    units: int = 0
    is_next: bool = False


class Signal(NamedTuple):
    """A barrier: arrived at when work of a row ends, waited for by work of another row."""

    name: str
    arrived: float
    sender: str
    waited: float
    receiver: str


# Seen from the end of S0. Where two products are in flight each has half of the tensor cores, which makes the lengths
# of all products; those of softmaxes and loads are for the eye.
PAIR_UNITS = 68
PAIR = (
    Work("even products", -20, 0, "S0 =\nQ K0ᵀ", 18),
    Work("even softmax", 0, 8, "softmax:\nm0, P0"),
    Work("even products", 8, 24, "O_L += P0 V0_left", 8),
    Work("even products", 32, 48, "O_L += P1 V1_left", 8),
    Work("even products", 48, 68, "S0 = Q K0ᵀ\nof the next pair", 18, True),
    Work("even softmax", 68, 76, "softmax:\nm0, P0", 0, True),
    Work("odd products", -4, 24, "S1 = Q K1ᵀ, chunk by chunk,\nas the odd tile lands", 18),
    Work("odd softmax", 24, 32, "softmax:\nm1, P1"),
    Work("odd products", 24, 32, "O_R += P0\nV0_right", 8),
    Work("odd products", 32, 48, "O_R += P1 V1_right", 8),
    Work("odd products", 64, 92, "S1 = Q K1ᵀ\nof the next pair", 18, True),
    Work("refills of left halves", 24, 41, "loads the next even tile:\nleft half and rotated part"),
    Work("refills of left halves", 48, 67, "loads the next odd tile:\nleft half"),
    Work("refills of right halves", 32, 46, "loads the next\neven tile: right half"),
    Work("refills of right halves", 48, 71, "loads the next odd tile:\nright half and rotated part"),
)
SIGNALS = (
    Signal("P_EVEN_READY", 8, "even softmax", 24, "odd products"),
    Signal("P_ODD_READY", 32, "odd softmax", 32, "even products"),
    Signal("EVEN_LEFT_FREE", 24, "even products", 24, "refills of left halves"),
    Signal("ODD_LEFT_FREE", 48, "even products", 48, "refills of left halves"),
    Signal("EVEN_RIGHT_FREE", 32, "odd products", 32, "refills of right halves"),
    Signal("ODD_RIGHT_FREE", 48, "odd products", 48, "refills of right halves"),
)
# Foot and height of each row.
_ROWS = {
    "refills of left halves": (53, 5.5),
    "even products": (41, 6),
    "even softmax": (35, 5.5),
    "odd softmax": (26, 5.5),
    "odd products": (19.5, 6),
    "refills of right halves": (8, 5.5),
    "tensor cores": (-5, 7),
}
_FIRST, _LAST = -9, 78
# Too short for a name in one line.
_SHORT = 10
_STRENGTHS = {"even": 0.7, "odd": 0.7, "producer": 0.4}


@styled
def pair_timeline() -> Figure:
    """Draw what the three roles do with one pair of tiles, the barriers between them, and what the tensor cores do."""
    figure, (axes,) = open_figure(9, 5.5)
    figure.subplots_adjust(left=0.005, right=0.995, top=0.995, bottom=0.1)
    axes.set(xlim=(_FIRST - 11, _LAST), ylim=(-8.5, 60))
    axes.axis("off")
    for name, low, high, colour in (
        ("producer\n(1 warp)", 52, 59.5, GREEN),
        ("even\n(4 warps)", 34.5, 47.5, SKY),
        ("odd\n(4 warps)", 19, 32, ORANGE),
        ("producer\n(the same\nwarp)", 7, 14.5, GREEN),
        ("tensor\ncores", -5.5, 2.5, GREY),
    ):
        axes.add_patch(Rectangle((_FIRST - 11, low), _LAST - _FIRST + 11, high - low, color=to_rgba(colour, 0.09)))
        axes.text(_FIRST - 10.5, (low + high) / 2, name, va="center", color=DARK, weight="bold", fontsize=8.5)
    for work in PAIR:
        role = "producer" if work.row.startswith("refills") else work.row.split()[0]
        low, height = _ROWS[work.row]
        _work(axes, work, work.start, work.end, low, height, role, work.text)
    _draw_tensor_cores(axes)
    for signal in SIGNALS:
        _draw_signal(axes, signal)
    quiet = {"ha": "center", "va": "center", "color": GREY, "fontsize": 8, "style": "italic"}
    axes.text(28, 44, "waits\nfor P1", **quiet)
    axes.text(56, 22.5, "waits for\nthe odd tile", **quiet)
    axes.annotate("", (_LAST, -7.5), (_FIRST, -7.5), arrowprops=ARROW | {"color": GREY})
    axes.text(_FIRST - 10.5, -7.5, "time", va="center", color=GREY, fontsize=8.5)
    foot(
        figure,
        "The order and the overlaps are the kernel's; lengths are not measured. Products are as long as their FLOP, "
        "at half the rate where two share\nthe tensor cores; softmax and loads are drawn for the eye. Pale and dashed: "
        "the next pair. The outer S0 and S1 are cut off. O_L and O_R: output columns\n0..255 and 256..511; V0 and V1: "
        "the latent parts of the two tiles.",
    )
    return figure


def tensor_shares(products: Sequence[Work]) -> list[tuple[Work, float, float, float, float]]:
    """(product, start, end, foot, height) of what each product has of the tensor cores, whose height is 1."""
    times = sorted({time for work in products for time in (work.start, work.end)})
    shares = []
    for start, end in pairwise(times):
        active = [work for work in products if work.start <= start and work.end >= end]
        for place, work in enumerate(reversed(active)):
            shares.append((work, start, end, place / len(active), 1 / len(active)))
    return shares


def _draw_tensor_cores(axes: Axes) -> None:
    low, height = _ROWS["tensor cores"]
    for work, start, end, below, share in tensor_shares([work for work in PAIR if work.units]):
        name = work.text[:2] if work.text.startswith("S") else work.text.split("+=")[1].replace("\n", " ").strip()
        if end - start < _SHORT:
            name = name.replace(" ", "\n") if share == 1 else ""
        _work(axes, work, start, end, low + below * height, share * height, work.row.split()[0], name)


def _work(axes: Axes, work: Work, start: float, end: float, low: float, height: float, role: str, text: str) -> None:
    """A rectangle from start to end, cut off at the edges of the picture."""
    start, end = max(start, _FIRST), min(end, _LAST)
    if start >= end:
        return
    colour = ROLE_COLOURS[role]
    look = {
        "facecolor": to_rgba(colour, 0.22 if work.is_next else _STRENGTHS[role]),
        "edgecolor": DARK,
        "linewidth": 0.8,
    }
    look |= {"linestyle": (0, (3, 2))} if work.is_next else {}
    axes.add_patch(Rectangle((start + 0.15, low), end - start - 0.3, height, zorder=3, **look))
    axes.text((start + end) / 2, low + height / 2, text, fontsize=8, linespacing=1.2, zorder=4, **CENTRED)


def _draw_signal(axes: Axes, signal: Signal) -> None:
    """An arrow from the end of work to what waits for it, with the barrier's name at its tail or beside it."""
    (foot, height), (to_foot, to_height) = _ROWS[signal.sender], _ROWS[signal.receiver]
    is_up = to_foot > foot
    start = (signal.arrived, foot + height if is_up else foot)
    end = (signal.waited, to_foot if is_up else to_foot + to_height)
    axes.annotate("", end, start, arrowprops=ARROW, zorder=5)
    text, place = signal.name, (signal.arrived + 0.8, (start[1] + end[1]) / 2)
    if signal.name.startswith("P_"):
        number = int("ODD" in signal.name)
        text += f":\nP{number}, m{number}, which rows moved"
        place = (signal.arrived + 1, foot + height / 2)
    axes.text(*place, text, va="center", color=DARK, fontsize=8, linespacing=1.2)
