"""The verdicts: each kind, each check, and the published figures themselves."""

import pandas as pd
import pytest

from mla.report import cache_size as size
from mla.report import claims_tables, data
from mla.report.claims import (
    ARITHMETIC_CHECKS,
    DATA_CHECKS,
    KERNEL_CHECKS,
    NOT_HERE,
    NOT_YET,
    Finding,
    claims,
    verdict,
)
from mla.report.schema import PUBLISHED_COLUMNS

UNLIKE = "differs on an NVIDIA H200 (reason unknown)"


def verdicts(frame, published, tune=None, kernel="portable") -> dict[str, str]:
    """Verdict by claim, for one kernel."""
    table = claims(frame, published, tune)
    return table[table["kernel"].isin(["", kernel])].set_index("id")["verdict"].to_dict()


@pytest.mark.parametrize(
    ("finding", "hardware", "gpu", "expected"),
    [
        (Finding("", None), "NVIDIA H100", "NVIDIA H100", NOT_YET),
        (Finding("", True), "NVIDIA H100", "NVIDIA H100 80GB HBM3", "reproduced"),
        (Finding("", False), "NVIDIA H100", "NVIDIA H100 80GB HBM3", "differs (reason unknown)"),
        (Finding("", False, "why"), "any", "NVIDIA H200", "differs (why)"),
        (Finding("", True), "NVIDIA H100", "NVIDIA H200", "holds on an NVIDIA H200"),
        (Finding("", False), "NVIDIA H100", "NVIDIA H200", UNLIKE),
        (Finding("", False, "why"), "NVIDIA H100", "NVIDIA H200", "differs on an NVIDIA H200 (why)"),
    ],
)
def test_verdict_words(finding, hardware, gpu, expected):
    assert verdict(finding, hardware, gpu) == expected


def test_nothing_measured_on_other_hardware_is_called_reproduced(folder, published):
    table = claims(folder.load(), published, folder.load_tune())
    measured = table[table["id"].isin(KERNEL_CHECKS | DATA_CHECKS)]
    assert len(measured) == len(KERNEL_CHECKS) + len(DATA_CHECKS)
    assert not measured["verdict"].str.contains("reproduced").any()


def test_verdicts_follow_the_data(folder, published):
    found = verdicts(folder.load(), published, folder.load_tune())
    assert found["article-wins"] == "holds on an NVIDIA H200"
    assert found["article-largest-gap"] == UNLIKE
    assert found["article-loss"] == UNLIKE
    assert found["article-loss-reason"] == "holds on an NVIDIA H200"
    assert found["article-peak"] == "holds on an NVIDIA H200"
    assert found["article-growth"] == UNLIKE
    assert found["article-bandwidth-bound"].startswith("differs on an NVIDIA H200 (intensity 24")
    assert found["article-head-reuse"] == found["article-tuning"] == "holds on an NVIDIA H200"


def test_opposite_data_gives_the_opposite_verdicts(folder, published, make_row):
    latency_us = make_row("portable", 128, 32768)["latency_us_p50"]
    folder.change("torch_compile", (128, 32768), latency_us_p50=3.5 * latency_us)
    for shape in ((8, 1024), (8, 4096)):
        folder.change("torch_compile", shape, latency_us_p50=1.0)
    for row in folder.decode:
        row["read_gbps"] = 3000.0
        if row["timer"] == "eager" and row["implementation"] == "portable":
            row["latency_us_p50"] -= 28
    for row in folder.tune:
        row["latency_us_p50"] = 100.0 + row["block_h"] / 10
    found = verdicts(folder.load(), published, folder.load_tune())
    assert found["article-wins"] == UNLIKE
    assert found["article-largest-gap"] == found["article-loss"] == "holds on an NVIDIA H200"
    assert found["article-loss-reason"] == UNLIKE
    assert found["article-bandwidth-bound"] == "holds on an NVIDIA H200"
    assert found["article-head-reuse"] == found["article-tuning"] == UNLIKE


def test_slow_kernel_does_not_reach_the_peak(folder, published):
    folder.decode = [row for row in folder.decode if row["implementation"] != "portable"]
    folder.decode += [
        row | {"implementation": "portable"} for row in folder.decode if row["implementation"] == "absorbed"
    ]
    assert verdicts(folder.load(), published)["article-peak"] == UNLIKE


def test_like_hardware_can_reproduce(folder, published):
    frame = folder.load(gpu="h100", gpu_name="NVIDIA H100 80GB HBM3")
    found = verdicts(frame, published)
    assert found["article-wins"] == "reproduced"
    assert found["article-largest-gap"] == "differs (reason unknown)"


def test_open_shapes_leave_the_wins_open(folder, published):
    folder.change("torch_compile", (8, 1024), drop=True)
    assert verdicts(folder.load(), published)["article-wins"] == "holds on an NVIDIA H200"
    folder.change("torch_compile", (8, 4096), drop=True)
    assert verdicts(folder.load(), published)["article-wins"] == NOT_YET


def test_missing_measurements_are_not_tested_yet(folder, published, make_row):
    folder.decode = [make_row("absorbed", 8, 4096, matmul_tflops=None)]
    found = verdicts(folder.load(), published)
    for claim in KERNEL_CHECKS | DATA_CHECKS:
        assert found[claim] == NOT_YET, claim


def test_both_kernels_are_judged(folder, published, make_row):
    folder.decode += [
        make_row("hopper", row["batch_size"], row["context_len"], latency_us_p50=row["latency_us_p50"] / 4)
        for row in folder.decode
        if row["implementation"] == "portable" and row["timer"] == "cuda_graph"
    ]
    frame = folder.load()
    assert verdicts(frame, published, kernel="portable")["article-largest-gap"] == UNLIKE
    assert verdicts(frame, published, kernel="hopper")["article-largest-gap"] == "holds on an NVIDIA H200"
    short = claims_tables.claims_short(claims(frame, published), frame)
    assert "`portable`: 1.50; gathered: 2.50<br>`hopper`: 6.00; gathered: 10.00" in short


def test_later_and_untestable_rows(folder, published):
    found = verdicts(folder.load(), published)
    assert found["tutorial-speedup"] == NOT_YET
    assert found["glossary-v4-gain"] == NOT_HERE


def test_arithmetic_verdicts(folder, published):
    found = verdicts(folder.load(), published)
    reproduced = {claim for claim in ARITHMETIC_CHECKS if found[claim] == "reproduced by arithmetic"}
    assert reproduced == {
        "article-row-width",
        "article-heads",
        "tutorial-cache-saving",
        "tutorial-mla-context",
        "tutorial-8192-oom",
    }
    assert all(found[claim].startswith("differs (") for claim in set(ARITHMETIC_CHECKS) - reproduced)


def test_cache_arithmetic():
    assert size.cache_bytes_per_token(size.MHA_7B) == 32 * 32 * 128 * 2 * 2
    assert size.cache_bytes_per_token(size.MLA_LITE) == 27 * 576 * 2
    room = 24 * 2**30 - 2 * 6.74e9
    assert size.context_limit(size.MHA_7B, 24 * 2**30, 524288) == room // 524288
    assert size.context_limit(size.MLA_V3, 24 * 2**30, 70272) == 0


def test_testable_claim_without_a_check_is_an_error(folder, published):
    published.loc["new-claim"] = published.loc["article-peak"]
    with pytest.raises(ValueError, match="expected a check for the testable claim new-claim"):
        claims(folder.load(), published)


def test_every_check_has_its_published_row(published):
    checks = KERNEL_CHECKS | DATA_CHECKS | ARITHMETIC_CHECKS
    assert set(checks) == set(published.index[published["testable"] == "yes"])


def test_published_file_is_well_formed(published_file, published):
    raw = pd.read_csv(published_file)
    assert raw.columns.tolist() == PUBLISHED_COLUMNS
    assert raw["source"].unique().tolist() == [
        "triton-mla-article",
        "mla-tutorial",
        "inferencex-glossary",
        "nvidia-h100-datasheet",
    ]
    assert pd.api.types.is_numeric_dtype(raw["value"])
    assert raw[["id", "source", "place", "hardware", "metric", "quote_gist", "testable"]].notna().all().all()
    assert published.loc[["article-largest-gap", "article-peak"], "value"].tolist() == [3.6, 249]
    assert pd.isna(published.loc["article-loss", "value"])


def test_repeated_published_id_is_an_error(folder):
    path = folder.path / "published.csv"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines, lines[1]]), encoding="utf-8")
    with pytest.raises(ValueError, match="got twice: article-wins"):
        data.load_published(folder.path)


def test_full_table_lists_every_published_row(folder, published):
    frame = folder.load()
    text = claims_tables.claims_markdown(claims(frame, published), frame)
    assert all(f"`{claim}`" in text for claim in published.index)
    assert "from one NVIDIA H200 (2026-01-02), the article's from an NVIDIA H100" in text
