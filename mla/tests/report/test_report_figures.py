"""The figures: what is drawn is what was measured, and what was not is said."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import font_manager

from mla.report import data, figures, style
from mla.report.__main__ import draw
from mla.report.compare import SHAPES
from mla.report.roofline_figure import h100_ridge
from mla.report.schema import ABLATIONS, IMPLEMENTATIONS
from mla.report.style import LOOKS, spread
from mla.tests.report.conftest import kernel_row, write_study


def texts(figure) -> list[str]:
    """All texts of a figure and its panels."""
    return [text.get_text() for text in figure.findobj(mpl.text.Text) if text.get_text()]


def marks(figure, name: str) -> list[tuple[float, float]]:
    """The points of one implementation, or of the source's star, over all panels; holes left out."""
    look = ("white", "*") if name == "*" else (LOOKS[name].colour, LOOKS[name].marker)
    lines = [line for axes in figure.axes for line in axes.lines if (line.get_color(), line.get_marker()) == look]
    points = [point for line in lines for point in zip(line.get_xdata(), line.get_ydata(), strict=True)]
    return [point for point in points if np.isfinite(point[1])]


def test_every_implementation_has_a_look_of_its_own():
    assert sorted(LOOKS) == sorted(IMPLEMENTATIONS)
    assert len({look.label for look in LOOKS.values()}) == len(LOOKS)
    assert len({look[1:] for look in LOOKS.values()}) == len(LOOKS)


def test_the_font_is_matplotlibs_own(monkeypatch):
    """Also where the system has it: another version numbers its glyphs otherwise, and every SVG would differ."""
    manager = font_manager.fontManager
    (own,) = {e.fname for e in manager.ttflist if (e.name, e.style, e.weight) == ("DejaVu Sans", "normal", 400)}
    installed = font_manager.FontEntry("system/DejaVuSans.ttf", name="DejaVu Sans", weight=400, size="scalable")
    monkeypatch.setattr(manager, "ttflist", [installed, *manager.ttflist])
    style.use_bundled_font()
    assert manager.findfont("DejaVu Sans") == own
    assert Path(own).is_relative_to(mpl.get_data_path())


def test_every_figure_has_an_alt_text_and_leaves_the_style_alone(folder, published):
    before = dict(mpl.rcParams)
    drawn = draw(folder.load(), published, folder.load_tune())
    assert set(drawn) == {"speedup", "tflops", "roofline", "tuning"}
    folder.add_studies()
    folder.add_pipeline()
    write_study(folder.path, "intermediates", kernel_row("portable", {"decode": 3900.0}))
    counted = data.load_study(folder.path, "intermediates")
    drawn = draw(folder.load(), published, folder.load_tune(), folder.load_pipeline(), counted)
    assert set(drawn) == set(figures.ALT)
    assert dict(mpl.rcParams) == before


def test_ragged_rows_and_ablations_change_no_figure_of_the_sixteen_shapes(folder, published, make_row):
    """What they would be taken for: a shape of the sixteen, and a contestant."""
    folder.decode += [make_row("hopper", *shape) for shape in SHAPES]

    def points():
        frame = folder.load()
        drawn = [figures.speedup(frame), figures.tflops(frame), figures.roofline(frame, published)]
        return [[marks(figure, name) for name in LOOKS] for figure in drawn]

    before = points()
    folder.decode += [make_row("hopper", 128, 32768, latency_us_p50=1.0, lengths="log-uniform")]
    folder.decode += [make_row(name, 128, 32768, latency_us_p50=1.0) for name in ABLATIONS]
    assert points() == before


def test_speedup_writes_every_ratio_and_counts_the_wins(folder):
    folder.change("torch_compile", (8, 1024), latency_us_p50=1.0)
    words = texts(figures.speedup(folder.load()))
    assert words.count("1.50") == 15
    assert words.count("2.50") == 16
    assert "portable (Triton): faster than torch.compile on a contiguous cache in 15 of 16 shapes" in words
    assert "portable (Triton): faster than torch.compile gathering a paged cache in 16 of 16 shapes" in words


def test_speedup_says_what_is_missing(folder):
    folder.change("torch_compile", (8, 1024), status="out_of_memory")
    folder.change("portable", (64, 4096), drop=True)
    figure = figures.speedup(folder.load())
    words = texts(figure)
    assert words.count("torch compile\nout of memory") == 1
    assert words.count("portable\nnot measured") == 2
    assert words.count("1.50") == 14


def test_speedup_marks_the_source_only_with_its_values(folder, published):
    frame = folder.load()
    assert marks(figures.speedup(frame), "*") == []
    drawn = marks(figures.speedup(frame, published=published), "*")
    assert drawn == [(32768, 3.6)] * 2


def test_the_loss_of_the_source_is_named_below_the_scale(folder, published):
    figure = figures.speedup(folder.load(), published=published)
    notes = [text for text in figure.findobj(mpl.text.Annotation) if text.get_text().endswith("article: loss")]
    assert len(notes) == 2
    figure.canvas.draw()
    axes = figure.axes[0]
    lowest = min(axes.transData.transform([(1024, tick) for tick in axes.get_yticks()])[:, 1])
    assert notes[0].get_window_extent().y1 < lowest


def test_speedup_shows_a_stage_beside_the_finished_kernel(folder, make_row):
    folder.decode.append(make_row("split_kv", 8, 1024, page_size=None))
    figure = figures.speedup(folder.load(), "split_kv", beside="portable")
    assert len(marks(figure, "portable")) == 32
    assert len(marks(figure, "split_kv")) == 2
    assert any(text.startswith("split KV: faster than") and "1 of 1" in text for text in texts(figure))


def test_hollow_mark_where_the_spreads_overlap(folder, make_row):
    latency_us = make_row("portable", 8, 1024)["latency_us_p50"]
    folder.change("torch_compile", (8, 1024), **{f"latency_us_p{q}": latency_us * 1.005 for q in (20, 50, 80)})
    panel = figures.speedup(folder.load()).axes[0]
    faces = [line.get_markerfacecolor() for line in panel.lines if line.get_marker() == LOOKS["portable"].marker]
    assert faces.count("white") == 1
    assert any("Hollow" in text for text in texts(figures.speedup(folder.load())))


def test_caption_explains_only_what_is_drawn(folder):
    assert not any("Hollow" in text or "†" in text for text in texts(figures.speedup(folder.load())))


def test_tflops_draws_no_failed_or_wrong_row_as_a_result(folder):
    folder.change("flashmla", (8, 1024), passed=False, latency_us_p50=123.0)
    folder.change("flashmla", (8, 4096), status="failed: launch")
    figure = figures.tflops(folder.load())
    panel = figure.axes[0]
    (line,) = [line for line in panel.lines if line.get_marker() == LOOKS["flashmla"].marker]
    assert np.isnan(line.get_ydata()[:2].astype(float)).all()
    assert line.get_ydata()[2] == pytest.approx(500 / 0.8)
    assert any("Failed, not drawn: FlashMLA at 8 x 1K, 8 x 4K; the reasons" in text for text in texts(figure))


def test_tflops_draws_out_of_memory_below_the_axis(folder):
    folder.change("absorbed", (128, 32768), status="out_of_memory")
    figure = figures.tflops(folder.load())
    (cross,) = [line for line in figure.axes[3].lines if line.get_color() == LOOKS["absorbed"].colour][1:]
    assert cross.get_xdata()[0] == 32768
    assert cross.get_ydata()[0] < 0
    assert texts(figure).count("out of memory") == 3
    assert "out of memory: absorbed, eager" in texts(figure)
    assert "absorbed, eager (to 16K)" in texts(figure)


def test_negligible_rates_are_named_and_not_drawn(folder, make_row, published):
    latency_us = make_row("portable", 128, 1024)["latency_us_p50"]
    folder.decode.append(make_row("naive", 128, 1024, latency_us_p50=400 * latency_us))
    folder.decode.append(make_row("naive", 128, 4096, status="out_of_memory"))
    frame = folder.load()
    for figure in (figures.tflops(frame), figures.roofline(frame, published)):
        assert [point for point in marks(figure, "naive") if point[1] > 0] == []
        assert any("naive, eager: at most 1.2 TFLOPS, not drawn" in text for text in texts(figure))
    assert figures.roofline(frame, published).axes[0].get_ylim()[0] == 50
    # The shape that ran out of memory is still drawn as that.
    assert "out of memory: naive, eager" in texts(figures.tflops(frame))


def test_tflops_without_out_of_memory_starts_at_zero(folder):
    figure = figures.tflops(folder.load())
    assert figure.axes[0].get_ylim()[0] == 0
    assert "out of memory" not in texts(figure)


def test_figures_of_partial_data_are_drawn(folder, make_row, published):
    folder.decode = [make_row("portable", 8, 1024)]
    frame = folder.load()
    assert "torch compile\nnot measured" in texts(figures.speedup(frame, published=published))
    assert marks(figures.tflops(frame), "portable") == [(1024, pytest.approx(500))]


def test_figures_of_failed_data_alone_draw_no_result(folder, make_row, published):
    folder.decode = [make_row("portable", 8, 1024, status="failed: launch", matmul_tflops=None, read_gbps=None)]
    frame = folder.load()
    for figure in (figures.speedup(frame, published=published), figures.tflops(frame), figures.roofline(frame)):
        figure.canvas.draw()
        assert marks(figure, "portable") == []


def test_roofline_points_and_roof(folder, make_row, published):
    folder.decode.append(make_row("portable", 128, 8192, num_heads=16, flops=2 * 1088 * 16 * 128 * 8192))
    figure = figures.roofline(folder.load(), published)
    points = marks(figure, "portable")
    assert len(points) == 2
    assert points[1][1] == pytest.approx(500)
    assert f"ridge {800 / 4.5:.0f} FLOP/byte" in texts(figure)
    assert "bf16 matmul, measured: 800 TFLOPS" in texts(figure)
    assert any("16\nheads" in text.replace(" ", "\n") for text in texts(figure))
    assert h100_ridge(published).endswith("ridge 295")


def test_roofline_labels_stay_below_the_roof(folder, make_row, published):
    for name in ("flashinfer_fa3", "hopper", "gluon_simple"):
        folder.decode.append(
            make_row(name, 128, 32768, latency_us_p50=make_row(name, 128, 32768)["latency_us_p50"] / 1.5)
        )
    axes = figures.roofline(folder.load(), published).axes[0]
    low, high = np.log2(axes.get_ylim())
    roof = (np.log2(800) - low) / (high - low)
    labels = [text for text in axes.texts if text.get_text().endswith(" 750")]
    assert len(labels) == 3
    assert all(label.xyann[1] < roof for label in labels)


def test_tuning_bars_start_at_zero_and_show_gaps(folder):
    folder.tune = [row for row in folder.tune if row["batch_size"] != 8]
    figure = figures.tuning(folder.load_tune())
    assert figure.axes[0].get_ylim()[0] == 0
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert np.isnan(heights[0]).all()
    assert heights[1] == pytest.approx([2.0] * 4)
    assert texts(figure).count("no result") == 4


@pytest.mark.parametrize("wanted", [[5, 5, 5], [0, 0, 9], [10, 9.9, 1], [3], []])
def test_spread_labels_do_not_touch_and_keep_their_order(wanted):
    placed = spread(wanted, 1, 0, 10)
    gaps = np.diff(sorted(placed))
    assert (gaps >= 1 - 1e-9).all()
    assert all(-1e-9 <= place <= 10 + 1e-9 for place in placed)
    assert np.argsort(placed, kind="stable").tolist() == np.argsort(wanted, kind="stable").tolist()
