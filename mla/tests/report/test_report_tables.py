"""The tables read back to the numbers they were made from."""

import io
import re

import pandas as pd
import pytest

from mla.report import readme, tables, tuning_tables
from mla.report.text import significant


def parse_markdown(text: str) -> pd.DataFrame:
    """The first table of a Markdown text, all cells as text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return pd.DataFrame(rows[2:], columns=rows[0])


def test_results_csv_reads_back_to_the_data(folder):
    frame = folder.load()
    read = pd.read_csv(io.StringIO(tables.results(frame).to_csv(index=False)))
    assert read["row_id"].tolist() == frame["row_id"].tolist()
    pd.testing.assert_series_equal(read["tflops"], frame["tflops"])
    pd.testing.assert_series_equal(read["latency_us_p50"], frame["latency_us_p50"])


def test_results_markdown_has_every_row_and_no_number_for_a_failed_one(folder):
    folder.change("flashmla", (8, 1024), status="failed: a|b")
    folder.change("absorbed", (8, 1024), passed=False)
    frame = folder.load()
    table = parse_markdown(tables.results_markdown(frame))
    assert len(table) == len(frame)
    assert table["row"].str.strip("`").tolist() == frame["row_id"].tolist()
    by_row = table.set_index(table["row"].str.strip("`"))
    failed = by_row.loc["h200-2026-01-02/flashmla/b8-n1024-h128/cuda_graph"]
    assert (failed["median, us"], failed["TFLOPS"], failed["status"]) == ("-", "-", r"failed: a\|b")
    wrong = by_row.loc["h200-2026-01-02/absorbed/b8-n1024-h128/cuda_graph"]
    assert (wrong["median, us"], wrong["status"]) == ("-", "failed: wrong result")
    good = by_row.loc["h200-2026-01-02/portable/b128-n32768-h128/cuda_graph"]
    expected = frame.set_index("row_id").loc[good.name, "latency_us_p50"]
    assert float(good["median, us"]) == pytest.approx(expected, abs=0.005)


def test_summary_reads_back_to_latency_rate_and_ratios(folder):
    folder.change("flashmla", (8, 4096), drop=True)
    frame = folder.load()
    table = parse_markdown(tables.summary_markdown(frame))
    assert len(table) == 16
    assert table["vs torch.compile"].tolist() == ["1.50"] * 16
    assert table["vs torch.compile, paged"].tolist() == ["2.50"] * 16
    assert table["vs FlashMLA"].tolist() == ["0.80", "-"] + ["0.80"] * 14
    assert table["of matmul"].unique().tolist() == ["62 %"]
    pattern = re.search(r"Cite a row as `(\S+)`", tables.summary_markdown(frame)).group(1)
    assert {pattern.replace("ROW", row) for row in table["row"]} <= set(frame["row_id"])


def test_latex_is_escaped_and_balanced(folder):
    text = tables.summary_latex(folder.load())
    lines = text.splitlines()
    columns = len(lines[1].removeprefix(r"\begin{tabular}{").removesuffix("}"))
    body = [line for line in lines if line.endswith(r"\\")]
    assert len(body) == 17
    assert {line.count(" & ") for line in body} == {columns - 1}
    assert not re.search(r"(?<!\\)[%_#$]", "\n".join(body))
    assert set(re.findall(r"\\([a-z]+)", text)) == {"begin", "toprule", "midrule", "bottomrule", "end"}


def test_latex_escape():
    assert tables.latex_escape("a_b 5 % & {c}") == r"a\_b 5 \% \& \{c\}"


def test_outlier_is_marked_and_explained(folder):
    slow = 1.3 * 1.5 * folder.decode[0]["latency_us_p50"] * 16
    folder.change("torch_compile", (8, 16384), latency_us_p50=slow)
    frame = folder.load()
    table = parse_markdown(tables.results_markdown(frame)).set_index("row")["median, us"]
    marked = [f"`h200-2026-01-02/torch_compile/b8-n16384-h128/{timer}`" for timer in ("cuda_graph", "eager")]
    assert table.index[table.str.endswith("†")].tolist() == marked
    for text in (tables.results_markdown(frame), tables.summary_markdown(frame)):
        assert "†: looks like an accident" in text
    assert parse_markdown(tables.summary_markdown(frame))["vs torch.compile"].tolist().count("1.95†") == 1
    assert r"1.95\dag{}" in tables.summary_latex(frame)


def test_without_an_outlier_nothing_is_marked(folder):
    frame = folder.load()
    assert "†" not in tables.results_markdown(frame) + tables.summary_markdown(frame)


def test_notes_are_printed_verbatim(folder):
    frame = folder.load(notes="Two cards, see there.")
    for text in (tables.results_markdown(frame), tables.summary_markdown(frame)):
        assert "Note: Two cards, see there." in text
    assert "Note:" not in tables.summary_markdown(folder.load())


def test_failures_are_listed_with_their_reason(folder):
    folder.change("flashmla", (8, 1024), status="failed: no such device")
    text = tables.results_markdown(folder.load())
    assert text.endswith("- `h200-2026-01-02/flashmla/b8-n1024-h128/eager`: no such device\n")


@pytest.mark.parametrize(
    ("value", "expected"), [(7989.8, "8000"), (12.815, "13"), (0.1234, "0.12"), (-1.26, "-1.3"), (None, "-")]
)
def test_two_significant_digits(value, expected):
    assert significant(value) == expected


def test_headline_counts_wins_and_names_the_peak(folder, published):
    folder.change("torch_compile", (8, 1024), latency_us_p50=1.0)
    folder.change("portable", (64, 4096), drop=True)
    folder.change("portable", (32, 16384), latency_us_p50=1.0)
    text = tables.headline(folder.load(), published)
    assert "15 of 16 in the article; here 15 of 15 against torch.compile gathering the same paged cache" in text
    assert "14 of 15 against torch.compile on a contiguous cache." in text
    assert "3.6 times in the article; here 2.50 over the gathered and 1.50 over the contiguous cache." in text
    assert "249 TFLOPS in the article" in text
    assert "at 32 x 16K" in text
    assert "Reached: the wins over the gathered cache, the rate." in text
    assert "1 of 16 shapes have no valid result" in text
    assert text.startswith("On NVIDIA H200 (2026-01-02")


def test_headline_says_that_a_win_is_an_outlier(folder, published):
    fast, slow = 0.5, 1.3
    for row in folder.decode:
        if row["implementation"] == "torch_compile":
            row["latency_us_p50"] *= slow / 1.5 if (row["batch_size"], row["context_len"]) == (8, 16384) else fast
    text = tables.headline(folder.load(), published)
    assert (
        "1 of 16 against torch.compile on a contiguous cache, where 8 x 16K is won against what looks like an outlier"
        in text
    )


def test_dirty_runs_are_said_not_to_be_citable(folder):
    assert "Not citable, made from uncommitted code: run r1." in tables.summary_markdown(folder.load(dirty=True))
    assert "All rows are citable." in tables.summary_markdown(folder.load())


def test_tuning_takes_the_fastest_valid_configuration(folder):
    shape = {"batch_size": 8, "context_len": 1024}
    folder.tune.append(folder.tune[1] | shape | {"latency_us_p50": None, "status": "failed: spills", "block_h": 128})
    folder.tune.append(folder.tune[0] | shape | {"latency_us_p50": 150.0, "num_splits": 4})
    small_pages = [row | {"page_size": 16} for row in folder.tune[:2]]
    folder.tune += small_pages
    table = tuning_tables.tuning_table(folder.load_tune())
    assert len(table) == 17
    assert table["block_h"].tolist() == [64] * 17
    # A first guess with other splits is no first guess, though it is the faster one.
    assert table["gain"].tolist() == pytest.approx([2.0] * 17)
    read = parse_markdown(tuning_tables.tuning_markdown(folder.load_tune()))
    assert read["gain"].tolist() == ["2.00"] * 17
    assert read["page"].tolist() == ["16"] + ["64"] * 16


def test_tuning_without_a_first_guess_has_no_gain(folder):
    folder.tune = [row for row in folder.tune if row["block_h"] == 64]
    assert tuning_tables.tuning_table(folder.load_tune())["gain"].isna().all()


def test_block_is_replaced_only_between_its_markers():
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n<!-- y:begin --><!-- y:end -->\n"
    once = readme.replace_block(text, "x", "new")
    assert once == "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb\n<!-- y:begin --><!-- y:end -->\n"
    assert readme.replace_block(once, "x", "new") == once


@pytest.mark.parametrize(
    "text",
    ["", "<!-- x:begin -->", "<!-- x:end --><!-- x:begin -->", "<!-- x:begin --><!-- x:end -->" * 2],
)
def test_wrong_markers_are_an_error(text):
    with pytest.raises(ValueError, match=r"expected one <!-- x:begin --> before one <!-- x:end -->"):
        readme.replace_block(text, "x", "new")
