"""The pictures of notebook 05: requests, block table and pool in colours, and two requests that share a prefix."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mla.report.style import DARK, GREEN, GREY, ORANGE, PINK, SKY, open_figure, styled

REQUEST_COLOURS = (SKY, ORANGE, PINK)
SHARED_COLOUR = GREEN
UNUSED = "#eeeeee"
CELL = 2.0
GAP = 0.9
Owners = dict[tuple[int, int], list[tuple[int, int]]]


def owners(tables: Sequence[Sequence[int]], seq_lens: Sequence[int], page_size: int) -> Owners:
    """Which (request, token) live in each (page, slot) that is used; a shared slot has several."""
    found: Owners = {}
    for request, (table, seq_len) in enumerate(zip(tables, seq_lens, strict=True)):
        for token in range(seq_len):
            place = (table[token // page_size], token % page_size)
            found.setdefault(place, []).append((request, token))
    return found


@styled
def pool(
    tables: Sequence[Sequence[int]], seq_lens: Sequence[int], page_size: int, num_pages: int, example: tuple[int, int]
) -> Figure:
    """Draw requests, their block table and the pool, a colour a request, and outline one token in all three.

    Args:
        tables: page ids of each of up to three requests, without unused entries.
        seq_lens: tokens of each request.
        page_size: slots of a page.
        num_pages: pages of the pool.
        example: request and token to outline.
    """
    request, token = example
    index, slot = divmod(token, page_size)
    page = tables[request][index]
    columns = max(map(len, tables))
    table_left = 18 + max(seq_lens) * CELL + columns * GAP
    figure, axes = _canvas(height=3.6, right=max(table_left + 5 * columns, _pool_width(page_size, num_pages)), top=34)
    axes.text(0, 33, "what a request sees: its tokens in order", color=GREY, weight="bold", va="center")
    axes.text(table_left, 33, "block_table", color=GREY, weight="bold", va="center")
    for row, (table, seq_len) in enumerate(zip(tables, seq_lens, strict=True)):
        low, colour = 27.5 - 4.6 * row, REQUEST_COLOURS[row]
        axes.text(0, low + 1.4, f"request {row}", va="center", color=DARK)
        for t in range(seq_len):
            left = 13 + t * CELL + t // page_size * GAP
            _cell(axes, left, low, colour, t, outlined=(row, t) == example)
        for entry in range(columns):
            used = entry < len(table)
            text, face = (table[entry], colour) if used else ("-", UNUSED)
            _cell(axes, table_left + 5 * entry, low, face, text, width=5, outlined=(row, entry) == (request, index))
    axes.text(0, 14.3, "where the rows are: the pool", color=GREY, weight="bold", va="center")
    _draw_pool(axes, 5.5, owners(tables, seq_lens, page_size), page_size, num_pages, outlined=(page, slot))
    axes.text(
        0,
        1.5,
        f"Outlined: token {token} of request {request}. "
        f"Entry {token} // {page_size} = {index} of its row is page {page}; slot {token} % {page_size} = {slot}.",
        color=DARK,
        va="center",
    )
    return figure


@styled
def shared_prefix(
    steps: dict[str, tuple[Sequence[Sequence[int]], Sequence[int]]], page_size: int, num_pages: int
) -> Figure:
    """Draw two requests that share pages, a band a step, with the number of requests that use each page.

    Args:
        steps: for each title the tables of both requests and their lengths.
        page_size: slots of a page.
        num_pages: pages of the pool.
    """
    height = 15
    pool_left = 32
    right = pool_left + _pool_width(page_size, num_pages)
    figure, axes = _canvas(height=1.5 * len(steps), right=right, top=height * len(steps) + 1)
    for step, (title, (tables, seq_lens)) in enumerate(steps.items()):
        low = height * (len(steps) - 1 - step)
        axes.text(0, low + 14, title, weight="bold", color=DARK, va="center")
        for row, table in enumerate(tables):
            bottom = low + 8 - 4 * row
            axes.text(0, bottom + 1.4, f"request {'AB'[row]}", va="center", color=DARK)
            for entry, page in enumerate(table):
                is_shared = page in tables[1 - row]
                face = SHARED_COLOUR if is_shared else REQUEST_COLOURS[row]
                _cell(axes, 11 + 4 * entry, bottom, face, page, width=4)
        _draw_pool(axes, low + 5, owners(tables, seq_lens, page_size), page_size, num_pages, left=pool_left)
        for page in range(num_pages):
            users = sum(page in table for table in tables)
            text = f"used by {users}" if users else "free"
            centre = pool_left + (page + 0.5) * page_size * CELL + page * 2 * GAP
            axes.text(centre, low + 3.4, text, ha="center", va="center", color=DARK, fontsize=8)
    return figure


def _pool_width(page_size: int, num_pages: int) -> float:
    """Units that the pages take side by side."""
    return num_pages * (page_size * CELL + 2 * GAP)


def _canvas(height: float, right: float, top: float) -> tuple[Figure, Axes]:
    """A figure without axes lines, from just left of 0 to `right`."""
    figure, (axes,) = open_figure(8.6, height)
    figure.subplots_adjust(left=0.005, right=0.995, top=0.99, bottom=0.01)
    axes.set(xlim=(-0.5, right), ylim=(0, top))
    axes.axis("off")
    return figure, axes


def _draw_pool(
    axes: Axes,
    low: float,
    owned: Owners,
    page_size: int,
    num_pages: int,
    left: float = 0,
    outlined: tuple[int, int] | None = None,
) -> None:
    """The pages side by side; a slot has the colour of its request and the number of its token."""
    for page in range(num_pages):
        start = left + page * (page_size * CELL + 2 * GAP)
        axes.text(start + page_size * CELL / 2, low + 4.3, f"page {page}", ha="center", va="center", color=DARK)
        for slot in range(page_size):
            users = owned.get((page, slot), [])
            face = UNUSED if not users else SHARED_COLOUR if len(users) > 1 else REQUEST_COLOURS[users[0][0]]
            text = users[0][1] if users else ""
            _cell(axes, start + slot * CELL, low, face, text, outlined=(page, slot) == outlined)
    for page in range(num_pages):
        start = left + page * (page_size * CELL + 2 * GAP)
        axes.add_patch(Rectangle((start, low), page_size * CELL, 2.8, fill=False, edgecolor=DARK, linewidth=1.1))


def _cell(axes: Axes, left: float, low: float, face: str, text, width: float = CELL, outlined: bool = False) -> None:
    """One token, slot or table entry."""
    line = {"edgecolor": "black", "linewidth": 2.4, "zorder": 5} if outlined else {"edgecolor": "white", "linewidth": 1}
    axes.add_patch(Rectangle((left, low), width, 2.8, facecolor=face, **line))
    options = {"ha": "center", "va": "center", "fontsize": 8, "color": "black", "zorder": 6}
    axes.text(left + width / 2, low + 1.35, str(text), **options)
