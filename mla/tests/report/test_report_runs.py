"""Ratios of several runs: the table, its sentence, its file."""

import pytest

from mla.report import data, runs
from mla.report.__main__ import main
from mla.schema import RUN_COLUMNS
from mla.tests.report.conftest import write_study
from mla.tests.report.test_report_tables import parse_markdown

# us of FlashMLA beside 100 of ours: shape -> a run each
FLASHMLA = {(8, 1024): (130.0, 140.0), (64, 4096): (101.0, 99.0), (128, 32768): (104.0, None)}


def _row(run, shape, implementation, us):
    return dict.fromkeys(RUN_COLUMNS) | {
        "run": run, "implementation": implementation, "batch_size": shape[0], "context_len": shape[1],
        "lengths": "even", "num_heads": 128, "dtype": "bfloat16", "page_size": 64, "timer": "cuda_graph",
        "l2_state": "cold", "latency_us_p50": us, "flops": 6e10, "matmul_tflops": 800.0 if run == 1 else 750.0,
        "status": "failed: x" if us is None else "ok", "run_id": "r1",
    }  # fmt: skip


@pytest.fixture
def study(folder):
    folder.write()
    rows = [
        _row(i + 1, shape, name, us)
        for shape, times in FLASHMLA.items()
        for i, time in enumerate(times)
        for name, us in (("hopper", 100.0), ("flashmla", time))
    ]
    write_study(folder.path, "runs", rows)
    return folder


def test_a_column_a_run(study):
    table = runs.ratios(data.load_study(study.path, "runs"))
    assert table.columns.tolist() == [1, 2]
    assert table.loc[(8, 1024)].tolist() == [1.3, 1.4]
    assert table.isna().sum().sum() == 1
    assert runs.runs_sentence(table) == (
        "run 1: faster at 3 of 3 shapes, least 1.010, geometric mean 1.109; run 2: faster at 1 of 2 shapes, least "
        "0.990, geometric mean 1.177. The ratio of a shape differs between runs by 0.020 in the median and by 0.100 at "
        "most, at 8 x 1K."
    )


def test_the_file_is_written_where_it_was_measured(study, tmp_path):
    assert main(["--data", str(study.path), "--output", str(tmp_path / "figures")]) == 0
    rows = parse_markdown((tmp_path / "figures" / "runs.md").read_text()).set_index(["batch", "context"])
    assert rows.loc[("64", "4K")].tolist() == ["1.010", "0.990", "0.990", "75 to 80 %"]
    assert rows.loc[("128", "32K")].tolist() == ["1.040", "-", "1.040", "75 to 80 %"]
