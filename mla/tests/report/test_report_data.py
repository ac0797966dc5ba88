"""The schema check, the choice of a file, the derived columns and the comparisons."""

import numpy as np
import pandas as pd
import pytest

from mla.report import compare, data
from mla.schema import DECODE_COLUMNS


def test_missing_column_is_named(folder):
    folder.write(columns=[name for name in DECODE_COLUMNS if name != "read_gbps"])
    with pytest.raises(ValueError, match=r"expected the 24 columns.*got none named read_gbps; measure again"):
        data.load(folder.path)


def test_a_file_without_lengths_holds_even_batches(folder):
    folder.write(columns=[name for name in DECODE_COLUMNS if name != "lengths"])
    frame = data.load(folder.path)
    assert set(frame["lengths"]) == {"even"}
    assert len(compare.usual(frame)) == len(frame) / 2


def test_an_older_sweep_is_of_the_portable_kernel(folder):
    """Four columns of the tune files came later; any other that is missing is an error."""
    later = ("kernel", "lengths", "mode", "prefetch", "by_rule")
    path = next(folder.write().glob("tune_*.csv"))
    rows = pd.read_csv(path)
    rows.drop(columns=list(later)).to_csv(path, index=False)
    tune = data.load_tune(folder.path)
    assert len(tune) == len(rows)
    assert (set(tune["kernel"]), set(tune["lengths"])) == ({"portable"}, {"even"})
    assert tune[["mode", "prefetch", "by_rule"]].isna().all(axis=None)
    assert data.load_tune(folder.path, kernel="hopper") is None
    rows.drop(columns=[*later, "block_h"]).to_csv(path, index=False)
    with pytest.raises(ValueError, match="got none named block_h"):
        data.load_tune(folder.path)


def test_each_kernels_newest_sweep_is_taken(folder):
    """A sweep of the Hopper kernel alone leaves the portable kernel's older one in use."""
    portable = list(folder.tune)
    folder.write(date="2026-01-01")
    folder.tune = []
    folder.add_hopper_sweep()
    folder.write(date="2026-01-03")
    assert set(data.load_tune(folder.path)["date"]) == {"2026-01-01"}
    assert set(data.load_tune(folder.path, kernel="hopper")["date"]) == {"2026-01-03"}
    folder.tune += portable
    both = folder.load_tune()
    assert len(both) == len(portable)
    # not made fractions by the other kernel's empty cells
    assert all(both[name].dtype == int for name in ("block_h", "block_n", "num_warps", "num_stages"))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("implementation", "magic"),
        ("timer", "stopwatch"),
        ("l2_state", "warm"),
        ("status", "failed"),
        ("lengths", "odd"),
    ],
)
def test_unknown_word_says_expected_and_got(folder, column, value):
    folder.decode[3][column] = value
    with pytest.raises(ValueError, match=rf"expected {column} in decode_h200.*got '?{value}'?"):
        folder.load()


@pytest.mark.parametrize("latency", [None, -1.0, 0.0])
def test_ok_row_needs_a_latency(folder, latency):
    folder.decode[5]["latency_us_p50"] = latency
    with pytest.raises(ValueError, match=r"expected a positive latency_us_p50.*got row 6"):
        folder.load()


def test_a_refused_row_is_known_and_has_no_latency(folder):
    folder.change("absorbed", (8, 1024), status="refused: ragged")
    assert (folder.load()["status"] == "refused: ragged").sum() == 2


def test_failed_row_must_not_have_a_latency(folder):
    folder.decode[5]["status"] = "out_of_memory"
    with pytest.raises(ValueError, match=r"none elsewhere, got row 6 with .* and out_of_memory"):
        folder.load()


def test_duplicate_row_is_named(folder):
    folder.decode.append(dict(folder.decode[0], latency_us_p50=1.0))
    with pytest.raises(ValueError, match="got 1 twice, as h200-2026-01-02/portable/b8-n1024-h128/cuda_graph"):
        folder.load()


def test_header_alone_is_an_error(folder):
    folder.decode = []
    with pytest.raises(ValueError, match="got a header alone"):
        folder.load()


def test_unknown_gpu_lists_the_known(folder):
    folder.write()
    with pytest.raises(FileNotFoundError, match=r"expected decode_h100_<date>.csv .*got h200 2026-01-02; choose"):
        data.load(folder.path, "h100")


def test_missing_provenance_is_an_error(folder):
    (folder.write() / "decode_h200_2026-01-02.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected the provenance .*decode_h200_2026-01-02.json"):
        data.load(folder.path)


def test_newest_file_is_taken_unless_a_date_is_given(folder):
    folder.write(date="2026-01-02")
    folder.write(date="2025-12-31")
    assert data.load(folder.path)["date"].unique().tolist() == ["2026-01-02"]
    assert data.load(folder.path, date="2025-12-31")["date"].unique().tolist() == ["2025-12-31"]
    assert data.load_tune(folder.path, "h100") is None


def test_rates_and_shares(folder):
    row = folder.load().set_index("row_id").loc["h200-2026-01-02/portable/b128-n32768-h128/cuda_graph"]
    assert row["tflops"] == pytest.approx(500)
    assert row["share_of_matmul"] == pytest.approx(500 / 800)
    seconds = row["latency_us_p50"] * 1e-6
    assert row["gbps"] == pytest.approx(row["bytes_moved"] / seconds / 1e9)
    assert row["intensity"] == pytest.approx(241.7, abs=2.5)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, "b8-n1024-h128"),
        ({"q_len": 2}, "b8-n1024-h128-q2"),
        ({"lengths": "one-long"}, "b8-n1024-h128-one-long"),
        ({"dtype": "float16"}, "b8-n1024-h128-fp16"),
        ({"page_size": 16}, "b8-n1024-h128-p16"),
        ({"dtype": "bfloat16", "page_size": None}, "b8-n1024-h128"),
    ],
)
def test_row_id_names_what_is_unusual(folder, make_row, changes, shape):
    folder.decode = [make_row("portable", 8, 1024) | changes]
    assert folder.load()["row_id"].tolist() == [f"h200-2026-01-02/portable/{shape}/cuda_graph"]


def test_wrong_result_is_not_usable_and_has_no_rate(folder):
    folder.change("portable", (8, 1024), passed=False)
    wrong = folder.load().query("implementation == 'portable' and batch_size == 8 and context_len == 1024")
    assert not wrong["usable"].any()
    assert wrong["tflops"].isna().all()


@pytest.mark.parametrize("dirty", [True, False])
def test_dirty_run_is_not_citable(folder, dirty):
    assert folder.load(dirty=dirty)["citable"].unique().tolist() == [not dirty]


def test_finished_kernel_is_hopper_where_measured(folder, make_row):
    assert compare.finished(folder.load()) == "portable"
    folder.decode.append(make_row("hopper", 8, 1024))
    assert compare.finished(folder.load()) == "hopper"


def test_ratios_and_their_gaps(folder):
    folder.change("portable", (8, 1024), drop=True)
    folder.change("torch_compile", (8, 4096), status="out_of_memory")
    folder.change("portable", (32, 1024), status="failed: launch")
    folder.change("portable", (32, 4096), passed=False)
    table = compare.ratios(folder.load(), "portable", "torch_compile")
    assert len(table) == 16
    assert table["ratio"].dropna().to_list() == pytest.approx([1.5] * 12)
    assert table.loc[(8, 1024), "gap"] == "portable: not measured"
    assert table.loc[(8, 4096), "gap"] == "torch_compile: out of memory"
    assert table.loc[(32, 1024), "gap"] == table.loc[(32, 4096), "gap"] == "portable: failed"
    assert compare.count_wins(table) == "12 of 12"


def test_ratio_is_level_where_the_spreads_overlap(folder, make_row):
    latency_us = make_row("portable", 8, 1024)["latency_us_p50"]
    folder.change("torch_compile", (8, 1024), **{f"latency_us_p{q}": latency_us * 1.005 for q in (20, 50, 80)})
    table = compare.ratios(folder.load(), "portable", "torch_compile")
    assert table["level"].tolist() == [True] + [False] * 15


def test_other_cases_do_not_enter_the_sixteen_shapes(folder, make_row):
    folder.decode += [make_row("portable", 8, 1024, latency_us_p50=1.0) | {"q_len": 2}]
    folder.decode += [make_row("portable", 8, 1024, latency_us_p50=1.0) | {"page_size": 16}]
    folder.decode += [make_row("portable", 8, 1024, latency_us_p50=1.0) | {"num_heads": 16}]
    folder.decode += [make_row("portable", 8, 1024, latency_us_p50=1.0) | {"lengths": "one-long"}]
    assert compare.ratios(folder.load(), "portable", "torch_compile")["ratio"].to_list() == pytest.approx([1.5] * 16)


@pytest.mark.parametrize(
    ("shape", "factor", "found"),
    [((8, 16384), 1.3, True), ((8, 16384), 1.2, False), ((8, 1024), 3, False), ((8, 32768), 3, False)],
)
def test_outlier_is_over_its_neighbours(folder, shape, factor, found):
    (latency_us,) = [
        row["latency_us_p50"]
        for row in folder.decode
        if (row["implementation"], row["batch_size"], row["context_len"], row["timer"])
        == ("torch_compile", *shape, "cuda_graph")
    ]
    folder.change("torch_compile", shape, latency_us_p50=factor * latency_us)
    frame = folder.load()
    name = f"h200-2026-01-02/torch_compile/b{shape[0]}-n{shape[1]}-h128"
    assert compare.outliers(frame) == ({name} if found else set())
    table = compare.ratios(frame, "portable", "torch_compile")
    assert table.index[table["outlier"]].tolist() == ([shape] if found else [])


def test_a_fixed_cost_makes_no_outlier(folder):
    for row in folder.decode:
        row["latency_us_p50"] += 1000
    assert compare.outliers(folder.load()) == set()


def test_growth_counts_both_directions_and_skips_gaps():
    ratio = pd.Series(np.arange(16.0), index=compare.SHAPES, name="ratio")
    assert compare.growth_steps(ratio) == (24, 24)
    assert compare.growth_steps(-ratio) == (0, 24)
    ratio.loc[(8, 1024)] = np.nan
    assert compare.growth_steps(ratio) == (22, 22)
