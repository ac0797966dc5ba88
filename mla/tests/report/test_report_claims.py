"""The verdicts: each kind, each check, and the published figures themselves."""

import pandas as pd
import pytest

from mla.report import cache_size as size
from mla.report import claims_tables, data
from mla.report.checks import Finding
from mla.report.claims import (
    ARITHMETIC_CHECKS,
    CONSTANT,
    DATA_CHECKS,
    KERNEL_CHECKS,
    NOT_HERE,
    NOT_YET,
    claims,
    verdict,
)
from mla.report.schema import PUBLISHED_COLUMNS

UNLIKE = "differs on an NVIDIA H200 (reason unknown)"
HOLDS = "holds on an NVIDIA H200"
COMPUTE_BOUND = (
    "differs on an NVIDIA H200 (compute bound here: intensity 240 FLOP/byte, ridge measured 178; "
    "a plain `tl.dot` kernel reaches 500 of 800 TFLOPS)"
)


def verdicts(frame, published, tune=None, kernel="portable") -> dict[str, str]:
    """Verdict by claim, for one kernel."""
    table = claims(frame, published, tune)
    return table[table["kernel"].isin(["", kernel])].set_index("id")["verdict"].to_dict()


def ours(frame, published, claim, tune=None) -> str:
    """Our figure beside one claim."""
    return claims(frame, published, tune).set_index("id").loc[claim, "ours"]


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
    assert found["article-largest-gap"] == COMPUTE_BOUND
    assert found["article-loss"] == "differs on an NVIDIA H200 (no loss there)"
    assert found["article-loss-reason"] == "differs on an NVIDIA H200 (no loss there to explain)"
    assert found["article-peak"] == "holds on an NVIDIA H200"
    assert found["article-growth"] == COMPUTE_BOUND
    assert found["article-bandwidth-bound"].startswith("differs on an NVIDIA H200 (intensity 24")
    assert found["article-head-reuse"] == found["article-tuning"] == "holds on an NVIDIA H200"


def test_opposite_data_gives_the_opposite_verdicts(folder, published, make_row):
    latency_us = make_row("portable", 128, 32768)["latency_us_p50"]
    folder.change("torch_compile", (128, 32768), latency_us_p50=3.5 * latency_us)
    for shape in ((8, 1024), (8, 4096)):
        folder.change("torch_compile", shape, latency_us_p50=1.0)
    for row in folder.decode:
        row["read_gbps"] = 3000.0
    for row in folder.tune:
        row["latency_us_p50"] = 100.0 + row["block_h"] / 10
    found = verdicts(folder.load(), published, folder.load_tune())
    assert found["article-wins"] == UNLIKE
    assert found["article-largest-gap"] == HOLDS
    assert found["article-loss"].startswith("contiguous: differs on an NVIDIA H200 (2 of 16 shapes are losses)")
    assert found["article-bandwidth-bound"] == HOLDS
    assert found["article-head-reuse"] == found["article-tuning"] == UNLIKE


def test_the_one_loss_is_judged_for_each_opponent(folder, published):
    folder.change("torch_compile", (8, 1024), latency_us_p50=1.0)
    folder.change("torch_compile_paged", (8, 1024), latency_us_p50=1.0)
    folder.change("torch_compile_paged", (64, 4096), latency_us_p50=1.0)
    frame = folder.load()
    assert verdicts(frame, published)["article-loss"] == (
        f"contiguous: {HOLDS}; gathered: differs on an NVIDIA H200 (2 of 16 shapes are losses)"
    )
    text = ours(frame, published, "article-loss")
    assert text.startswith("contiguous: 0.22, the only loss; gathered: 0.22, one of 2 losses")
    folder.change("torch_compile", (64, 4096), drop=True)
    assert verdicts(folder.load(), published)["article-loss"].startswith(f"contiguous: {NOT_YET}")


def test_launch_overhead_explains_a_loss_only_if_a_graph_removes_it(folder, published):
    folder.change("torch_compile", (8, 1024), latency_us_p50=1.0)
    frame = folder.load()
    assert "differs on an NVIDIA H200 (replay of a CUDA graph" in verdicts(frame, published)["article-loss-reason"]
    assert "in a CUDA graph, 0.22; gathered: 2.50; eager 0.03" in ours(frame, published, "article-loss-reason")
    for row in folder.decode:
        if (row["implementation"], row["batch_size"], row["context_len"]) == ("torch_compile", 8, 1024):
            row["latency_us_p50"] = 20.0
    assert verdicts(folder.load(), published)["article-loss-reason"] == HOLDS


def test_head_reuse_says_what_the_sweep_did_not_try(folder, published):
    frame = folder.load()
    assert ours(frame, published, "article-head-reuse", folder.load_tune()) == "64; not tested above"
    folder.tune.append(folder.tune[1] | {"block_h": 128, "latency_us_p50": 150.0})
    assert ours(frame, published, "article-head-reuse", folder.load_tune()) == "64"


def test_only_an_intensity_above_the_ridge_explains_a_smaller_lead(folder, published):
    for row in folder.decode:
        row["read_gbps"] = 3000.0
    assert verdicts(folder.load(), published)["article-largest-gap"] == UNLIKE


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
    assert found["article-largest-gap"] == COMPUTE_BOUND.replace(" on an NVIDIA H200", "")


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
    assert verdicts(frame, published, kernel="portable")["article-largest-gap"] == COMPUTE_BOUND
    assert verdicts(frame, published, kernel="hopper")["article-largest-gap"] == "holds on an NVIDIA H200"
    short = claims_tables.claims_short(claims(frame, published), frame)
    assert "`portable`: 1.50; gathered: 2.50<br>`hopper`: 6.00; gathered: 10.00" in short


def test_later_and_untestable_rows(folder, published):
    found = verdicts(folder.load(), published)
    assert found["tutorial-speedup"] == NOT_YET
    assert found["glossary-v4-gain"] == NOT_HERE
    assert found["h100-matmul"] == found["h100-read"] == CONSTANT


def test_constants_are_not_counted_as_claims(folder, published):
    frame = folder.load()
    short = claims_tables.claims_short(claims(frame, published), frame)
    count = (published["testable"] == "no").sum()
    assert f"\n\n{count} more published figures cannot be tested here" in short
    assert "datasheet" not in short


def test_arithmetic_verdicts(folder, published):
    found = verdicts(folder.load(), published)
    reproduced = {claim for claim in ARITHMETIC_CHECKS if found[claim] == "reproduced by arithmetic"}
    assert reproduced == {
        "article-row-width",
        "article-heads",
        "tutorial-cache-saving",
        "tutorial-8192-oom",
    }
    assert found["tutorial-mla-context"].startswith("differs (depends on the model: V2-Lite's bf16 weights, 29 GiB, do")
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
        "nvidia-h200-datasheet",
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
    assert "from NVIDIA H200 (2026-01-02), the article's from an NVIDIA H100" in text
