"""The prefill kernel beside torch's backends: the table, its sentence, its file, and the choices that rest on it."""

import math

import pytest
import torch

from mla.kernels.prefill import CONFIGS
from mla.measure.prefill import config_name
from mla.prefill import prompt_backends
from mla.report import data, prefill
from mla.report.__main__ import main
from mla.tests.report.conftest import prefill_row, write_study
from mla.tests.report.test_report_tables import parse_markdown

SHORT = {"q_len": 1024, "context_len": 1024, "flops": 4e10}
ROWS = [
    prefill_row("fused", 2000.0, config="m128-n64-w8-s3"),
    prefill_row("fused", 1600.0, config="m128-n128-w8-s2"),
    prefill_row("fused", None, config="m64-n64-w4-s2", status="failed: OutOfResources: shared memory"),
    prefill_row("sdpa_flash", 2400.0),
    prefill_row("sdpa_flash", 1200.0, assembly="untimed"),
    prefill_row("sdpa_cudnn", 2000.0),
    prefill_row("sdpa_math", None, status="out_of_memory"),
    prefill_row("fused", 300.0, config="m128-n64-w8-s3", **SHORT),
    prefill_row("sdpa_flash", 150.0, **SHORT),
    prefill_row("fused", 900.0, num_heads=16, config="m128-n64-w8-s3"),
    prefill_row("fused", 1800.0, timer="new_length", l2_state=None),
    prefill_row("sdpa_cudnn", 40000.0, timer="new_length", l2_state=None),
]


@pytest.fixture
def study(folder):
    folder.write()
    write_study(folder.path, "prefill", ROWS)
    return folder


@pytest.fixture
def table(study):
    return prefill.prefill(data.load_study(study.path, "prefill"))


def test_the_fastest_right_configuration_beside_each_backend(table):
    assert table.index.tolist() == [(128, 1, 1024, 1024), (128, 1, 4096, 4096), (16, 1, 4096, 4096)]
    row = table.loc[(128, 1, 4096, 4096)]
    assert (row["fused"], row["config"], row["best"], row["ratio"]) == (1600.0, "m128-n128-w8-s2", "sdpa_cudnn", 1.25)
    assert row["sdpa_flash"] == 2400.0
    assert (row["fused_new"], row["sdpa_cudnn_new"]) == (200.0, 38000.0)
    assert math.isnan(row["sdpa_math"])
    assert row["tflops"] == pytest.approx(375)
    assert row["share_of_matmul"] == pytest.approx(0.5)
    assert math.isnan(table.loc[(16, 1, 4096, 4096), "ratio"])


def test_sentence(table):
    assert prefill.prefill_sentence(table) == (
        "The fused kernel is 0.50 to 1.25 times as fast as the fastest of torch's backends, and ahead in 1 of 2 cases. "
        "That backend is `sdpa_flash` in 1, `sdpa_cudnn` in 1. The first call at a length that is new to the process "
        "takes 38 to 38 ms more by cuDNN, which makes a plan (38 in the median), and at most 0.2 ms more by the fused "
        "kernel."
    )
    assert prefill.prefill_sentence(table.iloc[2:]) == "No case has a result of both sides."


def test_the_file_is_written_where_it_was_measured(study, tmp_path):
    assert main(["--data", str(study.path), "--output", str(tmp_path / "figures")]) == 0
    text = (tmp_path / "figures" / "prefill.md").read_text()
    row = parse_markdown(text).set_index(["heads", "keys"]).loc[("128", "4K")]
    assert row[["fused, ms", "flash, ms", "math, ms"]].tolist() == ["1.600", "2.400", "-"]
    assert row[["TFLOPS", "torch's best over fused"]].tolist() == ["375", "1.25"]
    assert "fused m64-n64-w4-s2 at 128 heads, 4K of 4K: failed: OutOfResources: shared memory" in text
    assert "sdpa_math at 128 heads, 4K of 4K: out_of_memory" in text


RULE = dict(widths=(192, 128), dtype=torch.bfloat16, capability=(9, 0))


@pytest.fixture
def measured(request):
    """The newest measurements of a prefill on an H200, of this repository."""
    frame = data.load_study(request.config.rootpath / "data", "prefill")
    assert frame is not None
    return frame


def test_what_attends_is_measured_to_be_fast(measured):
    """At a new length a prompt of DeepSeek-V3's 61 layers is never more than a twentieth slower than by the other."""
    table = prefill.prefill(measured)
    assert len(table) >= 16
    for (num_heads, batch_size, q_len, context_len), times in table.iterrows():
        chosen = prompt_backends(q_len, context_len, heads=batch_size * num_heads, **RULE)[0]
        fused, cudnn = (61 * times[name] + (times[f"{name}_new"] if q_len == context_len else 0)
                        for name in ("fused", "sdpa_cudnn"))  # fmt: skip
        assert min(fused, cudnn) > 0
        assert (fused if chosen == "fused" else cudnn) <= 1.05 * min(fused, cudnn), (num_heads, q_len, context_len)
        assert times[["fused", "sdpa_cudnn"]].min() <= times[["sdpa_flash", "sdpa_efficient"]].min()


def test_the_configuration_is_measured_to_be_fast(measured):
    """The one that an H200 takes is in no measured case more than a twentieth behind the fastest."""
    rows = measured[measured["usable"] & (measured["implementation"] == "fused") & (measured["timer"] == "cuda_graph")]
    cases = rows.pivot_table("latency_us_p50", ["num_heads", "q_len", "context_len"], "config")
    assert len(cases) >= 16
    assert (cases[config_name(CONFIGS[0])] <= 1.05 * cases.min(axis=1)).all()
