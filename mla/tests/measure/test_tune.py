"""The sweep: which variants a case has, which of them is the kernel's own choice, and what a run writes."""

import types
from functools import lru_cache

import pytest
import torch

from mla.kernels import hopper_launch, portable, work_plan
from mla.measure import records, timing, tune, tune_hopper
from mla.measure.cases import GROUPS, Case, draw_problems
from mla.measure.implementations import IMPLEMENTATIONS, Prepared
from mla.schema import TUNE_COLUMNS


def _inputs(case):
    """What the sweep looks at of a problem: lengths, and the layout of a query and a cache."""
    q = torch.empty(case.batch_size, case.num_heads, 576, dtype=torch.float16)
    return types.SimpleNamespace(
        q_absorbed=q, kv_cache=q.new_empty(2, 64, 576), block_table=torch.zeros(case.batch_size, 4, dtype=torch.int32),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32), config=case.config,
    )  # fmt: skip


@lru_cache
def _hopper_variants(case):
    """The columns of a case's variants; the plans are made on the interpreter for an H200."""
    return [columns for columns, _ in tune_hopper.variants(case, [_inputs(case)])]


# At 66 parts, which the plan has for 128 heads on an H200.
EQUAL, WHOLE, UNEVEN = Case(2, 4000), Case(66, 64), Case(8, 40_000, lengths="one-long")


def test_every_mode_with_and_without_prefetch():
    found = _hopper_variants(EQUAL)
    assert [(c["mode"], c["prefetch"]) for c in found] == [
        (mode, prefetch) for mode in ("whole", "equal_runs", "even_shares") for prefetch in ("on", "off")
    ]
    assert {c["kernel"] for c in found} == {"hopper"}


def test_more_requests_than_half_the_parts_have_no_equal_runs():
    assert {c["mode"] for c in _hopper_variants(WHOLE)} == {"whole", "even_shares"}


@pytest.mark.parametrize(
    ("case", "mode"),
    [(EQUAL, "equal_runs"), (WHOLE, "whole"), (UNEVEN, "even_shares")],
    ids=["equal-runs", "whole", "even-shares"],
)
def test_the_rules_choice_is_marked(case, mode):
    """As work_plan chooses, with the prefetch that a launch has by itself: two blocks of heads ask for it."""
    own = [(c["mode"], c["prefetch"]) for c in _hopper_variants(case) if c["by_rule"]]
    assert (mode, "on") in own
    assert {prefetch for _, prefetch in own} == {"on"}


def test_few_heads_have_no_prefetch_of_their_own():
    own = {c["prefetch"] for c in _hopper_variants(Case(1, 64, num_heads=16)) if c["by_rule"]}
    assert own == {"off"}


PLAN = work_plan.WorkPlan(torch.zeros(66, 8, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32))


def test_forced_modes_reach_the_kernel(monkeypatch):
    """Each variant prepares the kernel with its mode and prefetch."""
    asked = []
    monkeypatch.setattr(
        tune_hopper,
        "prepare_hopper",
        lambda problems, **options: asked.append(options) or Prepared([]),
    )
    monkeypatch.setattr(hopper_launch, "plan_hopper", lambda *_, **__: types.SimpleNamespace(work=PLAN))
    for _, make_calls in tune_hopper.variants(EQUAL, [_inputs(EQUAL)]):
        make_calls()
    assert asked == [{"mode": m, "prefetch": p} for m in range(3) for p in (True, False)]
    assert [work_plan.WHOLE.value, work_plan.EQUAL_RUNS.value, work_plan.EVEN_SHARES.value] == [0, 1, 2]


def test_the_hopper_sweep_covers_the_groups():
    assert set(tune_hopper.CASES) == {*GROUPS["sixteen"], *GROUPS["long"], *GROUPS["ragged"]}


def test_portable_variants_are_the_candidates_and_more_splits():
    case = Case(2, 300, num_heads=16)
    found = [columns for columns, _ in tune.portable_variants(case, [_inputs(case)])]
    own_splits = [c for c in found if c["num_splits"] is None]
    assert len(own_splits) == len(tune.CANDIDATES)
    assert {c["num_splits"] for c in found} > {None}
    assert {c["kernel"] for c in found} == {"portable"}


@pytest.fixture
def fake_sweep(monkeypatch):
    """A sweep without a GPU: two small cases, two variants a kernel, and times that are made up."""
    small = Case(1, 70, num_heads=4, page_size=16, dtype="float16", preset="tiny")
    monkeypatch.setattr(tune, "SIXTEEN_SHAPES", (small,))
    monkeypatch.setattr(tune, "MORE_CASES", ())
    monkeypatch.setattr(tune_hopper, "CASES", (small, Case(1, 300, 4, 16, "float16", "tiny", "log-uniform")))
    monkeypatch.setattr(tune, "draw_problems", lambda case, device, seed: draw_problems(case, "cpu", seed, at_most=1))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(timing, "graph_stretch", lambda calls, pool: timing.Stretch(lambda: None, 1, calls))
    monkeypatch.setattr(timing, "ceiling_stretches", lambda seed: {"matmul": None})
    monkeypatch.setattr(timing, "time_in_rounds", lambda stretches, rng, rounds: {n: [1.0, 2.0] for n in stretches})
    monkeypatch.setattr(records.provenance, "machine", lambda: {})
    columns = {
        "portable": [{"kernel": "portable", "block_h": 16, "num_splits": n} for n in (None, 2)],
        "hopper": [
            {"kernel": "hopper", "mode": "whole", "prefetch": "on", "by_rule": True},
            {"kernel": "hopper", "mode": "even_shares", "prefetch": "on", "by_rule": False},
        ],
    }

    def variants(kernel):
        def make(case, problems):
            def right():
                return [lambda: portable.decode(problems[0])]

            second = right if kernel == "portable" else _raise
            return list(zip(columns[kernel], (right, second), strict=True))

        return make

    monkeypatch.setattr(tune, "_variants_of", variants)


def _raise():
    raise RuntimeError("does not fit")


def test_a_sweep_writes_both_kernels_and_goes_on(fake_sweep, monkeypatch, tmp_path, capsys):
    path = tmp_path / "tune_h200_2026-01-01.csv"

    def run(*argv):
        records._LOCKS.clear()
        argv = ["--output", str(path), *argv]
        tune.sweep(tune._parser().parse_args(argv), argv)
        return records.read_rows(path)

    # a GPU of another kind sweeps the portable kernel only
    rows = run()
    assert [row["kernel"] for row in rows] == ["portable"] * 2
    assert list(rows[0]) == TUNE_COLUMNS
    assert (rows[0]["lengths"], rows[0]["mode"], rows[0]["by_rule"], rows[1]["num_splits"]) == ("even", "", "", "2")
    with pytest.raises(ValueError, match="--kernels: expected a GPU of compute capability"):
        run("--kernels", "hopper")
    monkeypatch.setattr(tune, "IMPLEMENTATIONS", {"hopper": IMPLEMENTATIONS["portable"]})
    rows = run()
    assert [row["kernel"] for row in rows] == ["portable"] * 2 + ["hopper"] * 4
    assert [row["lengths"] for row in rows[2:]] == ["even"] * 2 + ["log-uniform"] * 2
    assert [row["status"] for row in rows[2:4]] == ["ok", "failed: RuntimeError: does not fit"]
    assert rows[2]["latency_us_p50"] and not rows[3]["latency_us_p50"]
    assert run() == rows
    records._LOCKS.clear()
    assert "hopper b1-n300-h4-log-uniform: " in capsys.readouterr().out
