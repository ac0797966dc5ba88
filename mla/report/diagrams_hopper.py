"""The drawings of notebook 06: one pair of tiles over time, the budget of a SM, the work plan, and L2 between CTAs.

What is drawn of the kernel is written down here, since the report imports no kernels; the tests compare it with
`mla/kernels/hopper.py`.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from mla.report.style import DARK, GREEN, GREY, INDIGO, ORANGE, PINK, SKY, STRIP_COLOUR, VERMILLION, open_figure, styled

# Who issues a product, frees a part of shared memory, or loads.
ROLE_COLOURS = {"even": SKY, "odd": ORANGE, "producer": GREEN}
TILE, RANK, ROPE = 64, 512, 64
CHUNK_BYTES = 64 * 64 * 2
TILE_BYTES = TILE * (RANK + ROPE) * 2
SHARED_BYTES = 232_448
REGISTERS = 65_536
# Registers of a thread in each of three groups of four warps, together.
REGISTERS_OF_THREE = 504


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
    axes.annotate("", (_LAST, -7.5), (_FIRST, -7.5), arrowprops=_ARROW | {"color": GREY})
    axes.text(_FIRST - 10.5, -7.5, "time", va="center", color=GREY, fontsize=8.5)
    _foot(
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
    for work, start, end, foot, share in tensor_shares([work for work in PAIR if work.units]):
        name = work.text[:2] if work.text.startswith("S") else work.text.split("+=")[1].replace("\n", " ").strip()
        if end - start < _SHORT:
            name = name.replace(" ", "\n") if share == 1 else ""
        _work(axes, work, start, end, low + foot * height, share * height, work.row.split()[0], name)


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
    axes.text((start + end) / 2, low + height / 2, text, fontsize=8, linespacing=1.2, zorder=4, **_CENTRED)


_CENTRED = {"ha": "center", "va": "center", "color": DARK}
_ARROW = {"arrowstyle": "-|>", "color": DARK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}


def _draw_signal(axes: Axes, signal: Signal) -> None:
    """An arrow from the end of work to what waits for it, with the barrier's name at its tail or beside it."""
    (foot, height), (to_foot, to_height) = _ROWS[signal.sender], _ROWS[signal.receiver]
    is_up = to_foot > foot
    start = (signal.arrived, foot + height if is_up else foot)
    end = (signal.waited, to_foot if is_up else to_foot + to_height)
    axes.annotate("", end, start, arrowprops=_ARROW, zorder=5)
    text, place = signal.name, (signal.arrived + 0.8, (start[1] + end[1]) / 2)
    if signal.name.startswith("P_"):
        number = int("ODD" in signal.name)
        text += f":\nP{number}, m{number}, which rows moved"
        place = (signal.arrived + 1, foot + height / 2)
    axes.text(*place, text, va="center", color=DARK, fontsize=8, linespacing=1.2)


def shared_memory() -> dict[str, int]:
    """Bytes of everything that the kernel keeps in shared memory, by the names that it has there."""
    rows = 2 * TILE * 4
    return {
        "q": 9 * CHUNK_BYTES, "kv": 18 * CHUNK_BYTES, "p_even": CHUNK_BYTES,
        "shared_max": rows, "sums": rows, "moved": rows, "bars": 21 * 8,
    }  # fmt: skip


@styled
def shared_memory_budget(consumer_registers: int) -> Figure:
    """Draw what fills the shared memory of a CTA and who frees it, and to whom the registers of the SM go.

    Args:
        consumer_registers: of a thread of `even` or `odd`; a thread of the producer's group has what is left.
    """
    figure, (memory, registers) = open_figure(9, 4.6, 1, 2, width_ratios=(5.9, 3.1))
    figure.subplots_adjust(left=0.005, right=0.995, top=0.995, bottom=0.085, wspace=0.02)
    _draw_shared_memory(memory)
    _draw_registers(registers, consumer_registers)
    _foot(
        figure,
        "Memory to scale. A square is a chunk of 64 × 64 in 16 bits, 8,192 bytes, with its number in the row; chunk 8 "
        "is the rotated part. The left half\nis chunks 0 to 3, the right half 4 to 7. At the end of a run each "
        "consumer writes its output through its half of the odd tile.",
    )
    return figure


def _draw_shared_memory(axes: Axes) -> None:
    sizes = shared_memory()
    axes.set(xlim=(0, 59), ylim=(0, 46))
    axes.axis("off")
    axes.text(0.5, 44.3, f"shared memory of a CTA: {SHARED_BYTES:,} bytes", weight="bold", color=DARK, va="center")
    for name, low, size, notes in (
        ("Q", 33.5, sizes["q"], ("loaded once a run: Q_FREE", "", "rotated: then P1")),
        ("even\ntile", 23.5, sizes["kv"] // 2, ("EVEN_LEFT_FREE", "EVEN_RIGHT_FREE", "rotated: with left")),
        ("odd\ntile", 13.5, sizes["kv"] // 2, ("ODD_LEFT_FREE", "ODD_RIGHT_FREE", "rotated: with right")),
    ):
        axes.text(0.5, low + 2.5, name, weight="bold", linespacing=1.2, va="center", color=DARK)
        colours = [SKY] * 4 + [ORANGE] * 4 + [SKY if name == "even\ntile" else ORANGE]
        for chunk, colour in enumerate(colours):
            _chunk(axes, _chunk_left(chunk), low, INDIGO if name == "Q" and chunk < 8 else colour, str(chunk))
        for chunk, note in zip((0, 4, 8), notes, strict=True):
            _small(axes, _chunk_left(chunk), low + 5.8, note, va="baseline")
        _small(axes, 58.8, low + 2.5, f"{size:,}", ha="right")
    rest = sum(sizes[name] for name in ("shared_max", "sums", "moved", "bars"))
    left = SHARED_BYTES - sum(sizes.values())
    _chunk(axes, _chunk_left(0), 5, SKY, "P0")
    _small(axes, _chunk_left(1) + 0.8, 7.5, f"{sizes['p_even']:,}")
    for start, size, colour, low, text in (
        (_chunk_left(4), rest, GREY, 8.8, f"{rest:,}: maxima, sums, barriers"),
        (_chunk_left(4) + _width(rest), left, "white", 6.2, f"{left:,}: left for the compiler"),
    ):
        axes.add_patch(Rectangle((start, 5), _width(size), 5, facecolor=colour, edgecolor=DARK, linewidth=0.8))
        _small(axes, _chunk_left(4) + _width(rest + left) + 0.8, low, text)
    for place, colour, text in (
        (0, SKY, "the even consumer frees or writes it"),
        (5, ORANGE, "the odd consumer frees or writes it"),
    ):
        axes.add_patch(Rectangle((_chunk_left(place), 0.9), 1.8, 1.8, facecolor=to_rgba(colour, 0.6)))
        _small(axes, _chunk_left(place) + 2.6, 1.8, text)


def _width(size: int) -> float:
    """Units of a chunk's height that so many bytes are wide."""
    return 5 * size / CHUNK_BYTES


def _chunk_left(chunk: int) -> float:
    """Where a chunk's square begins: the halves and the rotated part stand a little apart."""
    return 5.5 + 5 * chunk + (chunk >= 4) * 0.6 + (chunk >= 8) * 0.6


def _chunk(axes: Axes, left: float, low: float, colour: str, text: str) -> None:
    strength = 0.3 if colour == INDIGO else 0.6
    axes.add_patch(Rectangle((left, low), 5, 5, facecolor=to_rgba(colour, strength), edgecolor="white", linewidth=1.2))
    axes.text(left + 2.5, low + 2.5, text, fontsize=8.5, **_CENTRED)


def _small(axes: Axes, x: float, y: float, text: str, **options) -> None:
    axes.text(x, y, text, **({"va": "center", "color": DARK, "fontsize": 8, "linespacing": 1.25} | options))


def thread_registers(consumer_registers: int) -> dict[str, int]:
    """What a consumer's 128 threads keep in registers between them, a thread's share of each."""
    held = {
        "output, fp32": TILE * RANK // 2 // 128,
        "scores, fp32": TILE * TILE // 128,
        "P, 16 bits": TILE * TILE // 2 // 128,
        "Q rotated": TILE * ROPE // 2 // 128,
    }
    return {**held, "all else": consumer_registers - sum(held.values())}


def group_registers(consumer_registers: int) -> dict[str, int]:
    """Registers a thread of the three groups of four warps."""
    producer = REGISTERS_OF_THREE - 2 * consumer_registers
    return {"even": consumer_registers, "odd": consumer_registers, "producer": producer}


def _draw_registers(axes: Axes, consumer_registers: int) -> None:
    axes.set(xlim=(0, 31), ylim=(0, 46))
    axes.axis("off")
    axes.text(1, 44.3, f"registers of a SM: {REGISTERS:,}", weight="bold", color=DARK, va="center")
    groups = group_registers(consumer_registers)
    height, top = 31.5, 40.0
    for role, count in groups.items():
        part = height * 128 * count / REGISTERS
        axes.add_patch(
            Rectangle((1, top - part), 10.5, part, facecolor=to_rgba(ROLE_COLOURS[role], 0.6), edgecolor="white")
        )
        if role != "producer":
            _small(axes, 6.25, top - part / 2, f"{role}\n128 threads\n× {count}\n= {128 * count:,}", ha="center")
        top -= part
    unused = REGISTERS - 128 * sum(groups.values())
    part = height * unused / REGISTERS
    axes.add_patch(Rectangle((1, top - part), 10.5, part, facecolor="white", edgecolor=GREY, linewidth=0.8))
    text = f"producer: 128 × {groups['producer']} = {128 * groups['producer']:,}\n(one warp works, three idle)"
    _small(axes, 1, 4.2, f"{text}\nnot given out: {unused:,}")
    # a thread of `even`, drawn as high as all registers
    for high, other in ((40.0, 40.0), (40.0 - height * 128 * consumer_registers / REGISTERS, 40.0 - height)):
        axes.plot((11.5, 16.5), (high, other), color=GREY, linewidth=0.8)
    _small(axes, 16.5, 41.5, f"one thread: {consumer_registers}")
    top = 40.0
    for place, (name, count) in enumerate(thread_registers(consumer_registers).items()):
        part = height * count / consumer_registers
        face = STRIP_COLOUR if name == "all else" else to_rgba(SKY, (0.6, 0.4)[place % 2])
        axes.add_patch(Rectangle((16.5, top - part), 13.5, part, facecolor=face, edgecolor="white"))
        _small(axes, 23.25, top - part / 2, f"{name}: {count}", ha="center")
        top -= part


class Run(NamedTuple):
    """Consecutive tiles of one request that one part of the plan walks."""

    request: int
    first_tile: int
    tiles: int


REQUEST_COLOURS = (SKY, ORANGE, GREEN, PINK)
RUN_COST_COLOUR = "#bbbbbb"


def runs_of_parts(plan, seq_lens: Sequence[int]) -> list[list[Run]]:
    """The runs of each part of a `mla.kernels.work_plan.WorkPlan`; a request without tokens counts as one tile.

    Args:
        plan: made from `seq_lens`.
        seq_lens: tokens of each request.
    """
    parts = []
    for num_runs, request, first_tile, end_request, end_tile, *_ in plan.parts.tolist():
        runs = []
        for r in range(request, request + num_runs):
            first = first_tile if r == request else 0
            end = end_tile if r == end_request else max(-(-seq_lens[r] // TILE), 1)
            runs.append(Run(r, first, end - first))
        parts.append(runs)
    return parts


@styled
def work_plan_chart(plans: Mapping[str, Sequence[Sequence[Run]]], run_cost: int = 0) -> Figure:
    """Draw which part walks which tiles, a panel a batch and a colour a request, in tiles from left to right.

    Args:
        plans: `runs_of_parts` of each batch, by the title of its panel.
        run_cost: tiles that starting and writing a run is worth in the plan; drawn in front of each.
    """
    figure, all_axes = open_figure(9, 5.4, 1, len(plans))
    figure.subplots_adjust(left=0.055, right=0.99, top=0.845, bottom=0.185, wspace=0.2)
    for axes, (title, parts) in zip(all_axes, plans.items(), strict=True):
        _draw_plan(axes, parts, run_cost)
        counts = runs_a_request(parts)
        loads = [sum(run.tiles + run_cost for run in runs) for runs in parts]
        divided = sum(count > 1 for count in counts.values())
        lines = (
            title,
            f"{divided} of {len(counts)} requests divided",
            f"{sum(map(bool, parts))} of {len(parts)} parts used",
            f"longest {max(loads)}, mean {sum(loads) / len(loads):.1f}",
        )
        axes.set_title("\n".join(lines), color=DARK, fontsize=8.5, linespacing=1.3)
    all_axes[0].set_ylabel("part of the plan: a CTA of one block of heads")
    names = ["whole request", "divided request"]
    if run_cost:
        names.append(f"start and end of a run, worth {run_cost} tiles")
    looks = [
        {"facecolor": to_rgba(SKY, 0.4)},
        {"facecolor": SKY, "edgecolor": "white", "hatch": "////", "linewidth": 0},
        {"facecolor": RUN_COST_COLOUR},
    ]
    handles = [Patch(**look) for look in looks[: len(names)]]
    figure.legend(
        handles, names, loc="lower center", bbox_to_anchor=(0.5, 0.045), ncols=len(names), frameon=False, fontsize=8.5
    )
    _foot(figure, "Counted from the plan, not measured. Neighbouring requests differ in colour; colours repeat.")
    return figure


def runs_a_request(parts: Sequence[Sequence[Run]]) -> dict[int, int]:
    """In how many runs each request is walked."""
    counts: dict[int, int] = {}
    for run in (run for runs in parts for run in runs):
        counts[run.request] = counts.get(run.request, 0) + 1
    return counts


def _draw_plan(axes: Axes, parts: Sequence[Sequence[Run]], run_cost: int) -> None:
    counts = runs_a_request(parts)
    longest = 0
    for part, runs in enumerate(parts):
        start = 0
        for run in runs:
            if run_cost:
                axes.add_patch(Rectangle((start, part - 0.5), run_cost, 1, facecolor=RUN_COST_COLOUR, linewidth=0))
            start += run_cost
            colour = REQUEST_COLOURS[run.request % len(REQUEST_COLOURS)]
            is_divided = counts[run.request] > 1
            look = {"hatch": "////", "edgecolor": "white"} if is_divided else {}
            axes.add_patch(
                Rectangle(
                    (start, part - 0.5), run.tiles, 1, facecolor=to_rgba(colour, 1 if is_divided else 0.4),
                    linewidth=0, label=f"request {run.request}", **look,
                )
            )  # fmt: skip
            start += run.tiles
        longest = max(longest, start)
        axes.axhline(part - 0.5, color="white", linewidth=0.5)
    axes.set(xlim=(0, longest * 1.02), ylim=(len(parts) - 0.5, -0.5), xlabel="in tiles of 64 tokens")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)


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
        axes.annotate("", (29, low + 4), (15.5, low + 4), arrowprops=_ARROW)
        _small(axes, 22.2, low + 5.7, "once", ha="center")
        _block(axes, 65.5, sm_low, 33, 17, colour, "")
        _small(axes, 67, sm_low + 14.4, f"CTA of heads {heads}", weight="bold", fontsize=8.5)
        for place, step in enumerate(STEPS):
            _small(axes, 67, sm_low + 11 - 2.9 * place, step.format(tile), fontsize=8.5)
        axes.annotate("", (48, low + 4), (65.5, low + 4), arrowprops=_ARROW | {"linestyle": "--", "color": GREY})
        _small(axes, 57, low + 5.7, "asks, in halves", ha="center")
    for low, tile in ((37, "t"), (30, "t + 1")):
        _block(axes, 29, low, 19, 6, GREEN, f"tile {tile}, here already")
    for end in (42, 31):
        axes.annotate("", (65.5, end), (48, 36.5), arrowprops=_ARROW | {"linewidth": 2})
    _small(axes, 63.3, 36.5, "each CTA\nloads both", ha="right")
    _draw_ways(axes)
    _foot(
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
        _small(axes, 0, low + 4.4, f"{text}: {size:,} bytes a pair, {intensity:.0f} FLOP a byte", fontsize=8.5)


def _block(axes: Axes, left: float, low: float, width: float, height: float, colour: str, text: str) -> None:
    """A tile, a half of one, or a CTA."""
    axes.add_patch(
        Rectangle((left, low), width, height, facecolor=to_rgba(colour, 0.25), edgecolor=DARK, linewidth=0.8)
    )
    axes.text(left + width / 2, low + height / 2, text, fontsize=8.5, linespacing=1.25, **_CENTRED)


def _foot(figure: Figure, text: str) -> None:
    figure.text(0.01, 0.012, text, fontsize=7.5, color=GREY, va="bottom", linespacing=1.25)
