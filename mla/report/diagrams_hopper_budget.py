"""The drawing of a SM's budget: what fills its shared memory, and to whom its registers go."""

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mla.report.diagrams_hopper import CENTRED, RANK, ROLE_COLOURS, ROPE, TILE, foot, small
from mla.report.style import DARK, GREY, INDIGO, ORANGE, SKY, STRIP_COLOUR, open_figure, styled

CHUNK_BYTES = 64 * 64 * 2
SHARED_BYTES = 232_448
REGISTERS = 65_536
# Registers of a thread in each of three groups of four warps, together.
REGISTERS_OF_THREE = 504


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
    foot(
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
            small(axes, _chunk_left(chunk), low + 5.8, note, va="baseline")
        small(axes, 58.8, low + 2.5, f"{size:,}", ha="right")
    rest = sum(sizes[name] for name in ("shared_max", "sums", "moved", "bars"))
    left = SHARED_BYTES - sum(sizes.values())
    _chunk(axes, _chunk_left(0), 5, SKY, "P0")
    small(axes, _chunk_left(1) + 0.8, 7.5, f"{sizes['p_even']:,}")
    for start, size, colour, low, text in (
        (_chunk_left(4), rest, GREY, 8.8, f"{rest:,}: maxima, sums, barriers"),
        (_chunk_left(4) + _width(rest), left, "white", 6.2, f"{left:,}: left for the compiler"),
    ):
        axes.add_patch(Rectangle((start, 5), _width(size), 5, facecolor=colour, edgecolor=DARK, linewidth=0.8))
        small(axes, _chunk_left(4) + _width(rest + left) + 0.8, low, text)
    for place, colour, text in (
        (0, SKY, "the even consumer frees or writes it"),
        (5, ORANGE, "the odd consumer frees or writes it"),
    ):
        axes.add_patch(Rectangle((_chunk_left(place), 0.9), 1.8, 1.8, facecolor=to_rgba(colour, 0.6)))
        small(axes, _chunk_left(place) + 2.6, 1.8, text)


def _width(size: int) -> float:
    """Units of a chunk's height that so many bytes are wide."""
    return 5 * size / CHUNK_BYTES


def _chunk_left(chunk: int) -> float:
    """Where a chunk's square begins: the halves and the rotated part stand a little apart."""
    return 5.5 + 5 * chunk + (chunk >= 4) * 0.6 + (chunk >= 8) * 0.6


def _chunk(axes: Axes, left: float, low: float, colour: str, text: str) -> None:
    strength = 0.3 if colour == INDIGO else 0.6
    axes.add_patch(Rectangle((left, low), 5, 5, facecolor=to_rgba(colour, strength), edgecolor="white", linewidth=1.2))
    axes.text(left + 2.5, low + 2.5, text, fontsize=8.5, **CENTRED)


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
    axes.text(1, 44.3, f"registers of an SM: {REGISTERS:,}", weight="bold", color=DARK, va="center")
    groups = group_registers(consumer_registers)
    height, top = 31.5, 40.0
    for role, count in groups.items():
        part = height * 128 * count / REGISTERS
        axes.add_patch(
            Rectangle((1, top - part), 10.5, part, facecolor=to_rgba(ROLE_COLOURS[role], 0.6), edgecolor="white")
        )
        if role != "producer":
            small(axes, 6.25, top - part / 2, f"{role}\n128 threads\n× {count}\n= {128 * count:,}", ha="center")
        top -= part
    unused = REGISTERS - 128 * sum(groups.values())
    part = height * unused / REGISTERS
    axes.add_patch(Rectangle((1, top - part), 10.5, part, facecolor="white", edgecolor=GREY, linewidth=0.8))
    text = f"producer: 128 × {groups['producer']} = {128 * groups['producer']:,}\n(one warp works, three idle)"
    small(axes, 1, 4.2, f"{text}\nnot given out: {unused:,}")
    # a thread of `even`, drawn as high as all registers
    for high, other in ((40.0, 40.0), (40.0 - height * 128 * consumer_registers / REGISTERS, 40.0 - height)):
        axes.plot((11.5, 16.5), (high, other), color=GREY, linewidth=0.8)
    small(axes, 16.5, 41.5, f"one thread: {consumer_registers}")
    top = 40.0
    for place, (name, count) in enumerate(thread_registers(consumer_registers).items()):
        part = height * count / consumer_registers
        face = STRIP_COLOUR if name == "all else" else to_rgba(SKY, (0.6, 0.4)[place % 2])
        axes.add_patch(Rectangle((16.5, top - part), 13.5, part, facecolor=face, edgecolor="white"))
        small(axes, 23.25, top - part / 2, f"{name}: {count}", ha="center")
        top -= part
