"""Whole models: the file's schema, the figure, and the claims that it decides."""

import matplotlib as mpl
import pytest

from mla.report import figures, pipeline
from mla.report.claims import NOT_HERE, NOT_YET, claims
from mla.report.pipeline_figure import MODEL_LOOKS
from mla.tests.report.conftest import pipeline_row
from mla.tests.report.test_report_figures import texts


def judged(folder, published, claim):
    table = claims(folder.load(), published, None, folder.load_pipeline()).set_index("id")
    return tuple(table.loc[claim, ["ours", "verdict"]])


def points(axes, model):
    look = MODEL_LOOKS[model]
    (line,) = [line for line in axes.lines if (line.get_color(), line.get_marker()) == (look.colour, look.marker)]
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_the_report_knows_what_the_benchmark_measures():
    from mla.measure.pipeline_worker import MODELS

    assert list(MODELS) == pipeline.MODELS == list(MODEL_LOOKS)


def test_without_a_file_there_is_nothing(folder, published):
    assert folder.load_pipeline() is None
    assert judged(folder, published, "tutorial-speedup") == ("", NOT_YET)
    assert judged(folder, published, "tutorial-latency-4096") == ("", NOT_YET)
    assert judged(folder, published, "tutorial-accuracy") == ("", NOT_HERE)
    assert "measured here" not in judged(folder, published, "tutorial-8192-oom")[0]


def test_a_wrong_file_is_refused(folder):
    folder.add_pipeline()
    folder.pipeline[0]["model"] = "mqa"
    with pytest.raises(ValueError, match=r"expected model in pipeline_h200_2026-01-02\.csv to be one of mla_patched"):
        folder.load_pipeline()


def test_the_largest_lead_decides_the_speed_up(folder, published):
    folder.add_pipeline(mla_unpatched=65536)
    assert judged(folder, published, "tutorial-speedup") == (
        "17.0 over MHA at 128K; 9.0 over transformers' own MLA at 32K",
        "holds on an NVIDIA H200",
    )
    for row in folder.pipeline:
        if row["model"] == "mha":
            row["latency_us_p50"] /= 2
    assert judged(folder, published, "tutorial-speedup")[1] == (
        "differs on an NVIDIA H200 (batch 8, contexts up to 128K)"
    )


def test_a_sharp_drop_begins_at_its_context(folder, published):
    folder.add_pipeline()
    ours, verdict = judged(folder, published, "tutorial-latency-4096")
    assert ours.startswith("lead over MHA 1.5 at 4K, 2.0 at 8K, 3.0 at 16K")
    assert verdict == "holds on an NVIDIA H200"
    folder.pipeline = [pipeline_row("mha", 4096, latency_us_p50=9e3)] + [
        row for row in folder.pipeline if (row["model"], row["context_len"]) != ("mha", 4096)
    ]
    assert judged(folder, published, "tutorial-latency-4096")[1] == (
        "differs on an NVIDIA H200 (we read sharply as 2 times as fast from there on, and not before)"
    )


def test_arithmetic_stands_beside_what_was_measured(folder, published):
    folder.add_pipeline()
    ours, verdict = judged(folder, published, "tutorial-cache-saving")
    assert ours == f"0.9407; measured here at 128K: {1 - 576 / 8192:.4f}"
    assert verdict == "reproduced by arithmetic"
    peak = (2e9 + 2 * 8 * 4 * 2 * 576 * (8192 + 33)) / 2**30
    assert judged(folder, published, "tutorial-8192-oom")[0].endswith(
        f"; measured here at 8K, batch 8, 4 layers: fits, peak {peak:.1f} GiB with the prefill"
    )
    folder.pipeline = [row for row in folder.pipeline if row["context_len"] < 131072]
    folder.pipeline.append(pipeline_row("mla_patched", 131072, status="out_of_memory"))
    assert judged(folder, published, "tutorial-mla-context")[0].endswith("4 layers: out of memory")


def test_figure_draws_what_was_measured(folder):
    folder.add_pipeline(mla_unpatched=65536, mha=131072)
    folder.pipeline[-1] |= {"status": "failed: hang"}
    frame = folder.load_pipeline()
    figure = figures.pipeline(frame)
    left, right = figure.axes
    assert points(left, "mla_patched") == {n: pytest.approx(1 + n / 128e3) for n in (2**k for k in range(10, 18))}
    assert max(points(left, "mla_unpatched")) == 32768
    assert max(points(right, "mha")) == 65536
    peak = frame.set_index(["model", "context_len"]).loc[("mha", 8192), "decode_peak_bytes"] / 2**30
    assert points(right, "mha")[8192] == pytest.approx(peak)
    # 2 x for MHA at 8K, 3 x for transformers' own
    assert {"2.0×", "3.0×"} <= set(texts(figure))
    assert texts(figure).count("out of memory") == 2
    assert any("Failed, not drawn: 1 cases" in text for text in texts(figure))
    assert left.get_xticks().tolist() == [2**k for k in range(10, 18)]
    assert right.get_ylim()[0] == 0


def test_labels_are_inside_the_figure(folder):
    folder.add_pipeline(mla_unpatched=65536)
    figure = figures.pipeline(folder.load_pipeline())
    figure.canvas.draw()
    words = [t for t in figure.findobj(mpl.text.Text) if t.get_text() and t.get_visible()]
    boxes = [t.get_window_extent() for t in words]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_other_batches_and_compiled_rows_are_not_mixed_in(folder):
    folder.add_pipeline()
    folder.pipeline += [pipeline_row("mha", 1024, batch_size=1, latency_us_p50=1.0)]
    folder.pipeline += [pipeline_row("mha", 1024, compiled=True, latency_us_p50=1.0)]
    rows = pipeline.main_rows(folder.load_pipeline())
    assert len(rows) == 24
    assert pipeline.leads(rows, "mha")[1024] == pytest.approx(1.125)


def test_figure_of_failures_alone_is_drawn(folder):
    folder.add_pipeline(mla_patched=1, mla_unpatched=1, mha=1)
    figures.pipeline(folder.load_pipeline()).canvas.draw()


def test_summary_has_a_line_a_context(folder):
    folder.add_pipeline(mla_unpatched=65536)
    table = pipeline.summary(pipeline.main_rows(folder.load_pipeline()))
    assert list(table.index) == [2**k for k in range(10, 18)]
    assert table.loc[8192, ("ms a step", "mla_patched")] == pytest.approx(1 + 8192 / 128e3)
    assert table.loc[8192, ("times as fast as", "mha")] == pytest.approx(2.0)
    assert table.loc[[65536, 131072], ("times as fast as", "mla_unpatched")].isna().all()
    assert table.loc[8192, ("peak GiB", "mla_patched")] < table.loc[8192, ("peak GiB", "mha")]


def test_a_lead_within_the_spread_is_not_clear(folder):
    folder.add_pipeline(mla_unpatched=65536)
    rows = pipeline.main_rows(folder.load_pipeline())
    ours, theirs = rows["model"] == "mla_patched", rows["model"] == "mha"
    rows.loc[ours, "latency_us_p80"] = 1.01 * rows.loc[ours, "latency_us_p50"]
    rows.loc[theirs, "latency_us_p20"] = 0.99 * rows.loc[theirs, "latency_us_p50"]
    assert pipeline.faster_from(rows, "mha") == 1024
    at_8k = ours & (rows["context_len"] == 8192)
    rows.loc[at_8k, "latency_us_p80"] = 2 * rows.loc[at_8k, "latency_us_p50"]
    assert pipeline.faster_from(rows, "mha") == 16384
    assert pipeline.lead_sentence(rows, "mha", "MHA") == (
        "The patched model is 1.1 to 17.0 times as fast as MHA by the median, the most at 128K; from 16K on it "
        "is faster beyond the spread of the steps."
    )
    rows.loc[ours, "latency_us_p80"] = 1e9
    assert pipeline.faster_from(rows, "mha") is None
    assert "at no context up to the longest" in pipeline.lead_sentence(rows, "mha", "MHA")
    rows = rows[~theirs]
    assert pipeline.faster_from(rows, "mha") is None
    assert pipeline.lead_sentence(rows, "mha", "MHA").startswith("No context has a result")


def test_numbers_stand_under_all_points(folder):
    folder.add_pipeline()
    for row in folder.pipeline:
        if row["model"] == "mla_unpatched":
            row["latency_us_p50"] = 500.0
    left = figures.pipeline(folder.load_pipeline()).axes[0]
    placed = [a.xy[1] for a in left.texts if a.get_text().endswith("×")]
    assert len(placed) == 16
    assert max(placed) == 0.5
