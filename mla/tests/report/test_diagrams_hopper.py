"""The pictures of notebook 06: what they say is what the kernel's source and the plan say."""

import ast
import math
import re
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import matplotlib as mpl
import pytest

from mla.report import diagrams_hopper
from mla.report import diagrams_hopper_budget as budget
from mla.report import diagrams_hopper_plan as plans
from mla.report import diagrams_hopper_timeline as timeline

KERNELS = Path(__file__).parents[2] / "kernels"
SOURCE = (KERNELS / "hopper.py").read_text()
FUNCTIONS = {node.name: node for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef)}
ROLES = {"even": "_consume_even", "odd": "_consume_odd", "producer": "_produce"}
# The first of two requests is divided, and a part has nothing to do.
FEW = [[plans.Run(0, 0, 4)], [plans.Run(0, 4, 2), plans.Run(1, 0, 3)], []]
MANY = [[plans.Run(part, 0, 64)] for part in range(66)]


def texts(figure) -> list[str]:
    """All texts of a figure."""
    return [text.get_text() for text in figure.findobj(mpl.text.Text)]


def placed(figure) -> list[mpl.text.Text]:
    """The texts that are drawn, but for the labels of ticks, which the axes lay out."""
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        found += axes.texts
        if axes.axison:
            found += [axes.title, axes.xaxis.label, axes.yaxis.label]
    return [text for text in found if text.get_text().strip()]


def barriers(function: str, operation: str) -> list[str]:
    """The barriers that a role of the kernel arrives at or waits for, in the order of its source."""
    source = ast.get_source_segment(SOURCE, FUNCTIONS[function])
    return re.findall(rf"mbarrier\.{operation}\(bars\[(\w+)\]", source)


def role_of(row: str) -> str:
    return "producer" if row.startswith("refills") else row.split()[0]


@pytest.mark.parametrize(
    "draw",
    [
        timeline.pair_timeline,
        lambda: budget.shared_memory_budget(240),
        lambda: budget.shared_memory_budget(232),
        lambda: plans.work_plan_chart({"two requests": FEW}, run_cost=4),
        lambda: plans.work_plan_chart(dict.fromkeys(("8 x 1K", "64 x 4K", "40 ragged", "32K among 20 x 1K"), MANY), 4),
        diagrams_hopper.l2_to_sm_paths,
    ],
    ids=["pair", "budget-240", "budget-232", "plan", "plans", "l2"],
)
def test_texts_are_large_enough_apart_and_inside(draw):
    before = dict(mpl.rcParams)
    figure = draw()
    assert dict(mpl.rcParams) == before
    figure.draw_without_rendering()
    shown = placed(figure)
    assert min(text.get_fontsize() for text in shown) >= 7.5
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    for text, box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, text
    for (one, box), (other, other_box) in combinations(boxes, 2):
        assert not box.overlaps(other_box), (one, other)


def test_signals_are_the_kernels_barriers_between_the_same_roles():
    for signal in timeline.SIGNALS:
        assert signal.name in barriers(ROLES[role_of(signal.sender)], "arrive")
        assert signal.name in barriers(ROLES[role_of(signal.receiver)], "wait")
        assert signal.arrived <= signal.waited
    names = [signal.name for signal in timeline.SIGNALS]
    for role in ("even", "odd"):
        # as in the loop over pairs: what follows it repeats a release
        arrivals = list(dict.fromkeys(name for name in barriers(ROLES[role], "arrive") if name in names))
        sent = sorted((s for s in timeline.SIGNALS if role_of(s.sender) == role), key=lambda s: s.arrived)
        assert [signal.name for signal in sent] == arrivals
    refills = [name for name in barriers("_produce", "wait") if name in names]
    assert refills == ["EVEN_LEFT_FREE", "EVEN_RIGHT_FREE", "ODD_LEFT_FREE", "ODD_RIGHT_FREE"]


def test_signals_leave_at_the_end_of_work_and_arrive_at_its_start():
    for signal in timeline.SIGNALS:
        assert signal.arrived in [work.end for work in timeline.PAIR if work.row == signal.sender]
        assert signal.waited in [work.start for work in timeline.PAIR if work.row == signal.receiver]


def test_products_are_as_long_as_their_flop_and_a_role_does_one_after_another():
    products = [work for work in timeline.PAIR if work.units]
    shares = timeline.tensor_shares(products)
    # the last product shares with some that are not drawn
    for product in products[:-1]:
        done = sum((end - start) * height for work, start, end, _, height in shares if work is product)
        assert done == product.units
        # a score takes all 576 columns of 64 tokens, an output 256
        assert product.units * 32 == (576 if product.text.startswith("S") else 256)
    for row in {work.row for work in timeline.PAIR}:
        own = [work for work in timeline.PAIR if work.row == row]
        assert all(one.end <= other.start for one, other in pairwise(own))


def test_the_tensor_cores_never_wait_and_the_next_pair_repeats_this_one():
    shares = timeline.tensor_shares([work for work in timeline.PAIR if work.units])
    full = Counter()
    for _, start, end, _, height in shares:
        full[start, end] += height
    assert all(height == 1 for height in full.values())
    spans = sorted(full)
    assert all(one[1] == other[0] for one, other in pairwise(spans))
    this = {(w.row, w.start + timeline.PAIR_UNITS, w.end + timeline.PAIR_UNITS) for w in timeline.PAIR}
    assert {(w.row, w.start, w.end) for w in timeline.PAIR if w.is_next} <= this
    assert sum(work.units for work in timeline.PAIR if not work.is_next) == timeline.PAIR_UNITS


def test_the_timeline_names_every_barrier_and_product():
    words = " ".join(texts(timeline.pair_timeline()))
    for name in (
        *(signal.name for signal in timeline.SIGNALS),
        "O_L += P0 V0_left",
        "O_R += P1 V1_right",
        "not measured",
    ):
        assert name in words


def test_shared_memory_is_what_the_kernel_allocates():
    kernel = FUNCTIONS["mla_decode_hopper_kernel"]
    sizes = {"bars": sum(isinstance(n, ast.Call) and ast.unparse(n) == "_barrier()" for n in ast.walk(kernel)) * 8}
    for node in ast.walk(kernel):
        if isinstance(node, ast.Assign) and "allocate_shared_memory" in ast.unparse(node.value):
            dtype, shape = ast.unparse(node.value.args[0]), ast.literal_eval(node.value.args[1])
            sizes[node.targets[0].id] = math.prod(shape) * {"q_desc.dtype": 2, "gl.float32": 4, "gl.int32": 4}[dtype]
    assert budget.shared_memory() == sizes
    assert sum(sizes.values()) < budget.SHARED_BYTES


def test_the_budget_writes_bytes_and_registers():
    figure = budget.shared_memory_budget(240)
    words = texts(figure)
    assert words.count("73,728") == 3 and "8,192" in words
    assert [words.count(str(chunk)) for chunk in range(9)] == [3] * 9
    assert "1,704: maxima, sums, barriers" in words and "1,368: left for the compiler" in words
    assert 3 * 73_728 + 8_192 + 1_704 + 1_368 == 232_448
    assert {"EVEN_LEFT_FREE", "EVEN_RIGHT_FREE", "ODD_LEFT_FREE", "ODD_RIGHT_FREE"} <= set(words)
    assert "output, fp32: 128" in words and "all else: 48" in words
    assert "producer: 128 × 24 = 3,072\n(one warp works, three idle)\nnot given out: 1,024" in words
    # a square a chunk of Q and of two tiles, and P0
    squares = [patch for patch in figure.axes[0].patches if (patch.get_width(), patch.get_height()) == (5, 5)]
    assert len(squares) == 28


def test_registers_follow_the_kernels_rule():
    assert f"{budget.REGISTERS_OF_THREE} - 2 * CONSUMER_REGISTERS" in SOURCE
    launcher = (KERNELS / "hopper_launch.py").read_text()
    by_rows = ast.literal_eval(re.search(r"^CONSUMER_REGISTERS = (\{.*\})$", launcher, re.MULTILINE)[1])
    for count in by_rows.values():
        groups = budget.group_registers(count)
        assert groups["producer"] >= 24
        assert 128 * sum(groups.values()) <= budget.REGISTERS
        assert sum(budget.thread_registers(count).values()) == count


@pytest.mark.parametrize(
    "lengths",
    [[1024] * 8, [4096] * 64, [1024] * 10 + [32_768] + [1024] * 10, [1, 0, 65, 700, 9000] * 8],
    ids=["8x1K", "64x4K", "one-long", "ragged"],
)
def test_every_tile_is_drawn_once(lengths):
    import torch

    from mla.kernels.work_plan import make_work_plan

    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = make_work_plan(torch.tensor(lengths, dtype=torch.int32, device=device), 66, head_blocks=2)
    parts = plans.runs_of_parts(plan, lengths)
    tiles = {r: max(-(-n // 64), 1) for r, n in enumerate(lengths)}
    walked = [(run.request, run.first_tile + i) for runs in parts for run in runs for i in range(run.tiles)]
    assert walked == [(r, tile) for r, count in tiles.items() for tile in range(count)]
    figure = plans.work_plan_chart({"batch": parts}, run_cost=4)
    drawn = Counter()
    for patch in figure.axes[0].patches:
        if patch.get_label().startswith("request "):
            drawn[int(patch.get_label().split()[1])] += round(patch.get_width())
    assert drawn == tiles


def test_the_chart_hatches_divided_requests_and_counts_them():
    figure = plans.work_plan_chart({"a batch": FEW}, run_cost=4)
    hatched = {p.get_label() for p in figure.axes[0].patches if p.get_hatch()}
    assert hatched == {"request 0"}
    assert figure.axes[0].get_title() == ("a batch\n1 of 2 requests divided\n2 of 3 parts used\nlongest 13, mean 7.0")
    assert "start and end of a run, worth 4 tiles" in [text.get_text() for text in figure.legends[0].get_texts()]
    words = plans.work_plan_chart({"a batch": FEW}).legends[0].get_texts()
    assert len(words) == 2


def test_l2_says_what_is_counted_once_and_twice():
    words = texts(diagrams_hopper.l2_to_sm_paths())
    assert "GPU memory to L2, each tile once: 147,456 bytes a pair, 242 FLOP a byte" in words
    assert "L2 to SMs, each tile twice: 294,912 bytes a pair, 121 FLOP a byte" in words
    # each head block asks for one tile of the next pair
    assert SOURCE.count("tile + 2 + head_block, 0,") == 2 and SOURCE.count("tile + 2 + head_block, 1,") == 1
    assert "2  prefetch rows 0..31 of tile t + 2" in words and "4  prefetch rows 32..63 of tile t + 3" in words


def test_the_producer_loads_and_prefetches_in_the_drawn_order():
    source = ast.get_source_segment(SOURCE, FUNCTIONS["_produce"])
    source = source[source.index("for i in range(num_pairs)") :]
    # behind the first pair: even loads, the first half, odd loads, the second half
    places = [source.index(text) for text in ("EVEN_FULL_3]", "(i > 0) & ", "ODD_ROPE_FULL]", "head_block, 1, ")]
    assert places == sorted(places)
