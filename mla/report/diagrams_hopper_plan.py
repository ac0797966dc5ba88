"""The drawing of the work plan: which part walks which tiles of which requests."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from mla.report.diagrams_hopper import TILE, foot
from mla.report.style import DARK, GREEN, ORANGE, PINK, SKY, open_figure, styled


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
    foot(figure, "Counted from the plan, not measured. Neighbouring requests differ in colour; colours repeat.")
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
    axes.set(xlim=(0, longest * 1.02), ylim=(len(parts) - 0.5, -0.5), xlabel="tiles, starts included")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
