"""The studies of opponents and of intermediates, and the projection to an H100: arithmetic, tables, figure."""

import pytest

from mla.measure.opponent import CHOICES
from mla.measure.opponent import GRAPH_MODES as MEASURED_GRAPH_MODES
from mla.report import data, intermediates, opponents, projection, schema
from mla.report.__main__ import main
from mla.tests.report.conftest import decode_row, kernel_row, opponent_row, write_study
from mla.tests.report.test_report_figures import texts
from mla.tests.report.test_report_tables import parse_markdown

OPPONENTS = [
    opponent_row("max-autotune-no-cudagraphs", 3600.0),
    opponent_row("max-autotune-no-cudagraphs", 3700.0, timer="eager", portable_us_p50=4100.0),
    opponent_row("max-autotune", 6000.0, timer="eager"),
    opponent_row("eager", 14000.0, cache="gathered"),
    opponent_row("eager", 99.0, batch_size=8, context_len=1024),
    opponent_row("default", None, precision="fp32", status="failed: RuntimeError: too large"),
]
KERNELS = [
    *kernel_row("torch_compile", {"void bmm<float>(int)": 2000.0, "softmax": 500.0, "bmm2": 900.0},
                allocated_bytes=2_000_000_100, inductor_read_bytes=10e9, inductor_written_bytes=2e9),
    *kernel_row("portable", {"decode": 3900.0, "merge": 50.0}),
    *kernel_row("hopper", {"plan": 5.0}, step="plan", allocated_bytes=100, scratch_bytes=7),
    *kernel_row("hopper", {"hopper": 1950.0}, allocated_bytes=100, scratch_bytes=7),
    *kernel_row("torch_compile_paged", {None: None}, grid=None, status="failed: no answer within 180 s"),
]  # fmt: skip


@pytest.fixture
def study(folder):
    """Both studies written beside a decode file."""
    folder.put([decode_row("hopper", 128, 32768)])
    folder.change("hopper", (128, 32768), latency_us_p50=2000.0)
    folder.change("portable", (128, 32768), latency_us_p50=4000.0)
    folder.change("torch_compile", (128, 32768), latency_us_p50=3500.0)
    folder.write()
    write_study(folder.path, "opponents", OPPONENTS)
    write_study(folder.path, "intermediates", KERNELS)
    return folder


def test_the_report_knows_what_the_study_measures():
    for name, choices in CHOICES.items():
        assert set(schema.ALLOWED[name]) == set(choices)
    assert opponents.GRAPH_MODES == MEASURED_GRAPH_MODES
    assert set(opponents.PRECISIONS) == set(CHOICES["precision"])


def test_without_a_file_there_is_nothing(folder):
    assert data.load_study(folder.write(), "opponents") is None


def test_an_opponent_is_read_from_a_graph_where_it_can_be(study, published):
    rows = opponents.opponents(data.load_study(study.path, "opponents"))
    large = rows[rows["batch_size"] == 128]
    assert large["compile_mode"].tolist() == ["eager", "max-autotune", "max-autotune-no-cudagraphs"]
    assert large["timer"].tolist() == ["cuda_graph", "eager", "cuda_graph"]
    assert large["ratio_portable"].tolist() == [3.5, 1.5, 0.9]
    assert large["ratio_hopper"].tolist() == [7.0, 3.0, 1.8]
    assert large["tflops"].iloc[0] == pytest.approx(2 * 1088 * 128 * 128 * 32768 / 14000e6)
    nearest = opponents.like_the_source(rows, published)
    assert nearest["ratio_portable"].tolist() == [3.5, 1.5, 0.9]
    assert nearest["is_like"].tolist() == [True, False, False]


def test_the_sentence_names_what_gives_the_sources_lead(study, published):
    rows = opponents.opponents(data.load_study(study.path, "opponents"))
    assert "Within 10 % of it: eager torch, gathered (3.50 times, 83 TFLOPS)." in opponents.opponents_sentence(
        rows, published
    )
    # the Hopper kernel's leads are others
    sentence = opponents.opponents_sentence(rows, published, "hopper")
    assert "None is within 10 % of it; the nearest: max-autotune (3.00 times, 195 TFLOPS)." in sentence
    assert "over 69 TFLOPS if its peak of 249 was there" in sentence
    empty = rows[rows["batch_size"] == 8]
    assert opponents.opponents_sentence(empty, published) == "No opponent was measured at 128 x 32K."


def test_opponents_table_reads_back(study, published):
    text = opponents.opponents_markdown(data.load_study(study.path, "opponents"), published)
    table = parse_markdown(text)
    assert table["lead of portable"].tolist() == ["3.50", "1.50", "0.90", "0.02"]
    assert table["timer"].tolist() == ["CUDA graph", "eager", "CUDA graph", "CUDA graph"]
    assert "Without a result: default, converted to fp32 at 128 x 32K, cuda_graph: failed: RuntimeError" in text
    assert "All rows are citable." in text
    write_study(study.path, "opponents", OPPONENTS, dirty=True)
    frame = data.load_study(study.path, "opponents")
    assert "Not citable" in opponents.opponents_markdown(frame, published)


def test_calls_are_counted(study):
    table = intermediates.calls(data.load_study(study.path, "intermediates"))
    table = table.droplevel(["batch_size", "context_len"])
    assert table.index.tolist() == ["torch_compile", "portable", "hopper"]
    assert table["kernels"].tolist() == [3, 2, 1]
    assert table["plan_kernels"].tolist() == [0, 0, 1]
    assert table["gpu_us"].tolist() == [3400.0, 3950.0, 1950.0]
    assert table["extra_bytes"].tolist() == [2_000_000_000, 50, 7]
    least, values, between = 128 * 32768 * 1152, 128 * 32768 * 1024, 2e9 - 100
    assert table["between_bytes"].tolist() == [between, 50, 7]
    # each between kernels written and read; two products read the cache twice
    assert table["total_bytes"].tolist() == [least + 2 * between + values, least + 100, least + 14]


def test_what_the_compiler_says_of_reads_is_not_used(study):
    counted = data.load_study(study.path, "intermediates")
    fewer = counted.assign(inductor_read_bytes=1.0)
    assert intermediates.calls(counted).equals(intermediates.calls(fewer))


def test_intermediates_table_reads_back(study):
    text = intermediates.intermediates_markdown(data.load_study(study.path, "intermediates"))
    table = parse_markdown(text.split("## ")[0])
    assert table["implementation"].tolist() == ["`torch_compile`", "`portable`", "`hopper`"]
    assert table["left between kernels, MB"].tolist() == ["2000.0", "0.0", "0.0"]
    assert table["written between, MB"].tolist() == ["2000.0", "0.0", "0.0"]
    assert table["moved, MB"].tolist()[0] == "13126.8"
    kernels = parse_markdown(text.split("## torch.compile, 128 x 32K")[1].split("## ")[0])
    assert kernels["kernel"].tolist() == ["`bmm`", "`softmax`", "`bmm2`"]
    assert "Without a result: `torch_compile_paged` at 128 x 32K: failed: no answer within 180 s." in text


def test_ceilings_of_the_other_card_are_scaled_by_the_data_sheets(study, published):
    here, there = projection.ceilings(data.load(study.path), published)
    assert here == (800.0, 4500.0)
    assert there == pytest.approx((800.0, 4500.0 * 3.35 / 4.8))


def test_projected_times():
    here, there = projection.Ceilings(800, 4000), projection.Ceilings(800, 2000)
    # 4 GB take 1000 us here and 2000 there: hidden behind 5000 us of arithmetic, or added to them
    assert projection.projected_us(5000, 4e12, 4e9, here, there) == (5000, 6000)
    # bound by reading: at least what reading takes
    assert projection.projected_us(1200, 0, 4e9, here, there) == (2000, 2200)
    # half the arithmetic rate: 4 TFLOP take 10,000 us instead of 5000
    slower = projection.Ceilings(400, 4000)
    assert projection.projected_us(6000, 4e12, 4e9, here, slower) == (11000, 11000)
    # nothing is promised of a faster card
    assert projection.projected_us(5000, 4e12, 4e9, there, here) == (5000, 5000)


def test_projection_and_leads(study, published):
    frame, counted = data.load(study.path), data.load_study(study.path, "intermediates")
    table = projection.projection(frame, counted, published)
    # the gathering opponent was not counted
    assert table.index.tolist() == ["torch_compile", "portable", "hopper"]
    moved = table.loc["torch_compile", "bytes"]
    read_us, added_us = moved / 4500e3 * 4.8 / 3.35, moved / 4500e3 * (4.8 / 3.35 - 1)
    assert table.loc["torch_compile", ["least_us", "most_us"]].tolist() == pytest.approx([read_us, 3500 + added_us])
    lead = projection.leads(table).loc[("portable", "torch_compile")]
    assert lead["measured"] == 3500 / 4000
    ours, theirs = table.loc["portable"], table.loc["torch_compile"]
    assert lead["least"] == theirs["least_us"] / ours["most_us"]
    assert lead["most"] == theirs["most_us"] / ours["least_us"]
    assert lead["least"] < lead["most"]
    with pytest.raises(ValueError, match="expected measurements from an NVIDIA H200 to project"):
        projection.projection(frame.assign(gpu="NVIDIA H100"), counted, published)


def test_the_projection_is_drawn_and_named_as_one(study, published):
    frame, counted = data.load(study.path), data.load_study(study.path, "intermediates")
    figure = projection.projection_figure(frame, counted, published)
    words = " ".join(texts(figure))
    for part in ("a projection to an H100, not measured", "source: 3.6", "source: 249", "Dots: measured here"):
        assert part in words
    table = projection.projection(frame, counted, published)
    bars = figure.axes[0].patches
    assert [bar.get_x() for bar in bars] == table["least_tflops"].tolist()
    assert [bar.get_x() + bar.get_width() for bar in bars] == pytest.approx(table["most_tflops"].tolist())
    dots = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert dots == table["tflops"].tolist()
    figure.draw_without_rendering()


def test_the_command_writes_them_where_they_were_measured(study, tmp_path):
    output = tmp_path / "figures"
    assert main(["--data", str(study.path), "--output", str(output)]) == 0
    assert {"opponents.md", "intermediates.md", "projection.svg", "projection.png"} <= {
        p.name for p in output.iterdir()
    }
