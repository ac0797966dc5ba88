"""Heads, long contexts, ragged batches, the staircase, the Hopper sweep, the first call: figures, tables, sentences."""

import matplotlib as mpl
import numpy as np
import pytest

from mla.measure import implementations
from mla.measure.cases import GROUPS, Case
from mla.report import data, figures, schema, studies, study_tables, tables, tuning_tables
from mla.report.first_call import first_call_sentence
from mla.report.style import LOOKS
from mla.tests.report.conftest import SHARES, study_row
from mla.tests.report.test_report_figures import marks, texts
from mla.tests.report.test_report_tables import parse_markdown


def test_the_report_knows_what_the_benchmark_measures():
    """It imports neither, since it runs without torch."""
    assert list(implementations.IMPLEMENTATIONS) == schema.IMPLEMENTATIONS
    assert list(implementations.STAIRCASE) == studies.STAIRCASE
    assert list(implementations.ABLATIONS) == schema.ABLATIONS
    heads = {(c.context_len, c.batch_size) for c in GROUPS["heads"]}
    assert heads == {(studies.HEADS_CONTEXT, b) for b in studies.HEADS_BATCHES}
    assert {c.batch_size for c in GROUPS["long"]} == set(studies.LONG_BATCHES)
    assert min(c.context_len for c in GROUPS["long"]) == studies.LONG_CONTEXT


def test_without_such_rows_there_is_nothing(folder):
    frame = folder.load()
    for study in (studies.heads, studies.long_contexts, studies.ragged, studies.staircase):
        assert study(frame).empty
    assert study_tables.studies_markdown(frame) is None


@pytest.mark.parametrize(
    ("group", "title"),
    [
        ("heads", "## Number of heads"),
        ("long", "## Few requests, long contexts"),
        ("ragged", "## Ragged batches"),
        ("staircase", "## Steps to the finished kernel"),
    ],
)
def test_each_study_has_a_section_of_its_own(folder, group, title):
    folder.add_studies(group)
    text = study_tables.studies_markdown(folder.load())
    assert [line for line in text.splitlines() if line.startswith("## ")] == [title]


def test_heads_table_reads_back(folder):
    folder.add_studies("heads")
    folder.put([study_row("flashmla", Case(32, 8192, num_heads=8), status="failed: heads", latency_us_p50=None)])
    frame = folder.load()
    table = parse_markdown(study_tables.heads(frame))
    assert len(table) == 14
    assert table["heads"].tolist() == [str(h) for h in (8, 12, 16, 24, 32, 64, 128)] * 2
    assert table["limit"].tolist() == (["read"] * 6 + ["matmul"]) * 2
    row = frame.set_index("row_id").loc["h200-2026-01-02/hopper/b128-n8192-h16/cuda_graph"]
    cells = table[(table["batch"] == "128") & (table["heads"] == "16")].iloc[0]
    assert float(cells["hopper, us"]) == pytest.approx(row["latency_us_p50"], abs=0.05)
    assert float(cells["hopper, TFLOPS"]) == pytest.approx(row["tflops"], abs=0.5)
    assert cells["hopper, of read"] == cells["hopper, of limit"] == f"{100 * row['share_of_read']:.0f} %"
    failed = table.iloc[0]
    assert [failed[f"flashmla, {name}"] for name in ("us", "TFLOPS", "of read", "of limit")] == ["-"] * 4
    assert failed["vs FlashMLA"] == "-"
    # at 128 heads arithmetic is the limit
    assert table.iloc[-1]["hopper, of limit"] > table.iloc[-1]["hopper, of read"]


def test_long_contexts_are_shares_of_the_lower_ceiling(folder):
    folder.add_studies("long")
    frame = folder.load()
    rows = studies.long_contexts(frame)
    assert set(zip(rows["batch_size"], rows["context_len"], strict=True)) == {
        (c.batch_size, c.context_len) for c in GROUPS["long"]
    }
    table = studies.side_by_side(rows, "hopper")
    case = Case(1, 131072)
    row = table.loc[(1, 131072, 128)]
    floor_us = max(case.flops / 800e6, case.bytes_moved / 4500e3)
    assert row["share_of_limit"] == pytest.approx(floor_us / row["latency_us"])
    assert row["share_of_limit_opponent"] == pytest.approx(floor_us / (6 + floor_us / SHARES["flashmla"]))
    assert row["ratio"] == pytest.approx(row["latency_us_opponent"] / row["latency_us"])
    assert set(table["limit"]) == {"matmul"}


def test_ragged_batches_stand_beside_their_even_ones(folder):
    folder.add_studies("ragged")
    log_uniform, even, one_long, short = GROUPS["ragged"]
    table = studies.ragged(folder.load()).set_index(["lengths", "implementation"])
    assert len(table) == 2 * 3
    for ragged, beside in ((log_uniform, even), (one_long, short)):
        row = table.loc[(ragged.lengths, "hopper")]
        assert (row["tokens"], row["even_tokens"]) == (ragged.total_tokens, beside.total_tokens)
        assert row["even_context_len"] == beside.context_len
        assert row["ratio"] == pytest.approx(1.05, abs=0.01)
    assert table.loc[("one-long", "portable"), "ratio"] == pytest.approx(3.0, abs=0.02)


def test_a_refusal_and_a_missing_even_batch_are_said(folder):
    folder.add_studies("ragged")
    ragged = GROUPS["ragged"][0]
    refused = study_row("portable", ragged, status="refused: ragged") | dict.fromkeys(
        ("latency_us_p20", "latency_us_p50", "latency_us_p80")
    )
    folder.put([refused])
    folder.decode = [row for row in folder.decode if (row["implementation"], row["context_len"]) != ("flashmla", 2048)]
    table = parse_markdown(study_tables.ragged(folder.load()))
    (row,) = table[table["status"] != "ok"].to_dict("records")
    assert (row["implementation"], row["ragged, us"], row["ragged / even"]) == ("`portable`", "-", "-")
    assert row["status"] == "refused: ragged"
    (row,) = table[table["even, us"] == "-"].to_dict("records")
    assert (row["implementation"], row["its tokens"], row["ragged / even"]) == ("`flashmla`", "-", "-")


def test_results_name_ragged_rows(folder):
    assert "lengths" not in tables.results(folder.load())
    folder.add_studies("ragged")
    table = tables.results(folder.load())
    assert table.columns.tolist().index("lengths") == table.columns.tolist().index("context_len") + 1
    assert table.set_index("row_id").loc[
        "h200-2026-01-02/hopper/b128-n131072-h128-one-long/cuda_graph", "lengths"
    ] == "one-long"  # fmt: skip


def test_heads_figure_draws_what_was_measured(folder):
    folder.add_studies("heads")
    folder.put([study_row("flashmla", Case(128, 8192, num_heads=128), passed=False)])
    figure = figures.heads(folder.load())
    assert len(marks(figure, "hopper")) == 2 * 14
    assert len(marks(figure, "flashmla")) == 2 * 13
    assert marks(figure, "portable") == []
    assert {"batch 32, context 8K", "batch 128, context 8K", "read, measured: 4.50 TB/s"} <= set(texts(figure))
    # the lower ceiling bends at the matmul rate, above every point
    grey = figure.axes[3].lines[0].get_ydata()
    assert grey.max() == pytest.approx(800)
    assert (np.diff(grey) >= -1e-9).all()
    assert grey[0] == pytest.approx(4.5 * Case(128, 8192, 8).flops / Case(128, 8192, 8).bytes_moved)


def test_heads_figure_without_ceilings_or_results(folder):
    folder.add_studies("heads")
    for row in folder.decode:
        if row["num_heads"] != 128:
            row |= {"matmul_tflops": None, "read_gbps": None, "status": "failed: launch", "passed": False}
            row |= dict.fromkeys(("latency_us_p20", "latency_us_p50", "latency_us_p80"))
    figures.heads(folder.load()).canvas.draw()


def test_staircase_figure_has_a_bar_a_step(folder):
    folder.add_studies("staircase")
    folder.put([study_row("gluon_simple", Case(8, 1024), passed=False)])
    figure = figures.staircase(folder.load())
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["8 x 1K", "32 x 4K", "64 x 16K", "128 x 32K"]
    frame = folder.load().set_index("row_id")
    for axes, shape in zip(figure.axes, ("b8-n1024", "b32-n4096", "b64-n16384", "b128-n32768"), strict=True):
        assert axes.get_xlim()[0] == 0
        widths = [bar.get_width() for bar in axes.patches]
        rates = [frame.loc[f"h200-2026-01-02/{n}/{shape}-h128/cuda_graph", "tflops"] for n in studies.STAIRCASE]
        assert widths == pytest.approx(rates, nan_ok=True)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [LOOKS[name].label for name in studies.STAIRCASE]
    assert texts(figure).count("matmul 800") == 4
    assert texts(figure).count("no result") == 1


def test_staircase_labels_are_inside_the_figure(folder):
    folder.add_studies("staircase")
    figure = figures.staircase(folder.load())
    figure.canvas.draw()
    words = [t for t in figure.findobj(mpl.text.Text) if t.get_text() and t.get_visible()]
    boxes = [t.get_window_extent() for t in words]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_staircase_table_reads_back(folder):
    folder.add_studies("staircase")
    table = parse_markdown(study_tables.staircase(folder.load()))
    assert table["kernel"].tolist() == [LOOKS[name].label for name in studies.STAIRCASE]
    case = Case(128, 32768)
    tflops = case.flops / (6 + case.flops / 800e6 / SHARES["hopper"]) / 1e6
    assert float(table.iloc[-1]["128 x 32K"]) == pytest.approx(tflops, abs=0.5)
    assert table.iloc[-1]["of matmul, 128 x 32K"] == "84 %"


def test_hopper_sweep_table(folder):
    folder.add_hopper_sweep()
    tune = data.load_tune(folder.write(), kernel="hopper")
    even, ragged = tuning_tables.hopper_table(tune).to_dict("records")
    assert (even["rule"], even["fastest"], even["loss"]) == ("equal_runs", "equal_runs, prefetch on", 1.0)
    assert (ragged["lengths"], ragged["rule"], ragged["fastest"]) == (
        "log-uniform", "whole", "even_shares, prefetch on",
    )  # fmt: skip
    assert (ragged["rule_us"], ragged["fastest_us"], ragged["loss"]) == (60.0, 50.0, 1.2)
    assert even["without_prefetch"] == pytest.approx(1.1)
    read = parse_markdown(tuning_tables.hopper_markdown(tune))
    assert read["rule / fastest"].tolist() == ["1.00", "1.20"]


def test_hopper_rows_do_not_enter_the_portable_tuning(folder):
    before = tuning_tables.tuning_markdown(folder.load_tune())
    folder.add_hopper_sweep()
    assert tuning_tables.tuning_markdown(folder.load_tune()) == before


def test_a_failed_hopper_sweep_has_dashes(folder):
    folder.add_hopper_sweep()
    for row in folder.tune:
        if row["kernel"] == "hopper" and row["lengths"] == "even":
            row |= {"status": "failed: launch", "latency_us_p50": None}
    read = parse_markdown(tuning_tables.hopper_markdown(data.load_tune(folder.write(), kernel="hopper")))
    assert read.iloc[0][["rule", "rule, us", "fastest", "fastest, us", "rule / fastest"]].tolist() == [
        "equal_runs", "-", "-", "-", "-",
    ]  # fmt: skip


def test_first_call_sentence(folder):
    assert first_call_sentence(folder.path, "h200") == ""
    folder.write_first_call(date="2026-01-03")
    folder.write_first_call(date="2026-01-02", dirty=True)
    text = first_call_sentence(folder.path, "h200")
    assert "`portable` 4.2 s (0.52 s where Triton's cache is filled), `hopper` 9.3 s (0.72 s" in text
    assert "8 x 1K, 128 heads, compilation and work plan included (NVIDIA H200, 2026-01-03). Later" in text
    assert "`portable` 101.0 us, `hopper` 50.2 us, `hopper_planned` 20.0 us;" in text
    assert first_call_sentence(folder.path, "h100") == ""
    folder.write_first_call(date="2026-01-04", dirty=True)
    assert "2026-01-04, not citable" in first_call_sentence(folder.path, "h200")
    (folder.path / "first_call_h200_2026-01-05.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="expected the keys gpu, case, seconds, host_us in first_call_h200_2026-01-05"):
        first_call_sentence(folder.path, "h200")
