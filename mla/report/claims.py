"""Every published figure beside ours, with a verdict that is computed from the data."""

import pandas as pd

from mla.report import cache_size as size
from mla.report.checks import (
    Evidence,
    Finding,
    check_bandwidth_bound,
    check_dimension,
    check_growth,
    check_head_reuse,
    check_loss,
    check_loss_reason,
    check_peak,
    check_ratio,
    check_tuning,
    check_wins,
)
from mla.report.compare import finished
from mla.report.pipeline_checks import PIPELINE_CHECKS, memory_checks

NOT_YET = "not tested yet"
NOT_HERE = "not testable here"
CONSTANT = "a constant, not a claim"


def verdict(finding: Finding, hardware: str, gpu: str) -> str:
    """Word a finding: `hardware` is the source's, `gpu` ours; `any` and arithmetic claims need no like hardware."""
    if finding.holds is None:
        return NOT_YET
    if hardware == "any" or gpu.startswith(hardware):
        return "reproduced" if finding.holds else f"differs ({finding.reason or 'reason unknown'})"
    if finding.holds:
        return f"holds on an {gpu}"
    return f"differs on an {gpu} ({finding.reason or 'reason unknown'})"


SAVING = 1 - size.cache_bytes_per_token(size.MLA_LITE) / size.cache_bytes_per_token(size.MHA_7B)
MHA_LIMIT = size.context_limit(size.MHA_7B, size.RTX_4090_BYTES, size.cache_bytes_per_token(size.MHA_7B))
KERNEL_CHECKS = {
    "article-wins": check_wins,
    "article-largest-gap": check_ratio,
    "article-loss": check_loss,
    "article-loss-reason": check_loss_reason,
    "article-growth": check_growth,
    "article-peak": check_peak,
}
DATA_CHECKS = {
    "article-bandwidth-bound": check_bandwidth_bound,
    "article-head-reuse": check_head_reuse,
    "article-tuning": check_tuning,
    **PIPELINE_CHECKS,
}
# These follow from dimensions: they hold or not on any GPU.
ARITHMETIC_CHECKS = {
    "article-row-width": check_dimension(size.MLA_V3.cached_values, ""),
    "article-heads": check_dimension(size.MLA_V3.num_heads, ""),
    "tutorial-mha-limit": check_dimension(MHA_LIMIT, "weights and cache alone fill the card earlier"),
    "tutorial-mqa-cost": check_dimension(
        size.MLA_V3.cached_values / size.mqa_cached_values(), "a row is 576 values, not 256"
    ),
    "tutorial-latent-width": check_dimension(size.MLA_V3.cached_values, "the rope key is cached too: 512 + 64"),
    "tutorial-scale": check_dimension(
        size.MLA_V3.qk_head_dim**-0.5, "192 ** -0.5, as DeepSeek's query heads are 192 wide"
    ),
    **memory_checks(SAVING),
}


def claims(
    frame: pd.DataFrame,
    published: pd.DataFrame,
    tune: pd.DataFrame | None = None,
    pipeline: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Judge every published row.

    Args:
        frame, published, tune, pipeline: what `data.load`, `load_published`, `load_tune` and `load_study` return.

    Returns:
        The published columns, and `kernel` (empty where no kernel is in question), `ours` and `verdict`; a claim about
        a kernel has a row for the portable one, like the source's a Triton kernel, and one for the finished one.
    """
    kernels = dict.fromkeys(["portable", finished(frame)])
    rows = []
    for claim_id, row in published.iterrows():
        for kernel in kernels if claim_id in KERNEL_CHECKS else [""]:
            ours, text = judge(claim_id, row, Evidence(frame, tune, kernel, pipeline))
            rows.append({"id": claim_id, **row, "kernel": kernel, "ours": ours, "verdict": text})
    return pd.DataFrame(rows)


def judge(claim_id: str, row: pd.Series, evidence: Evidence) -> tuple[str, str]:
    """Our figure and the verdict for one published row."""
    untested = {"no": NOT_HERE, "later": NOT_YET, "constant": CONSTANT}
    if row["testable"] in untested:
        return "", untested[row["testable"]]
    checks = KERNEL_CHECKS | DATA_CHECKS | ARITHMETIC_CHECKS
    if claim_id not in checks:
        raise ValueError(
            f"expected a check for the testable claim {claim_id}, got none; add one to mla/report/claims.py or set "
            "testable to later or no in published.csv"
        )
    finding = checks[claim_id](row, evidence)
    if claim_id in ARITHMETIC_CHECKS:
        return finding.ours, verdict(finding, "any", "").replace("reproduced", "reproduced by arithmetic")
    gpu = evidence.frame["gpu"].iloc[0]
    if isinstance(finding, dict):
        ours = {label: part.ours for label, part in finding.items()}
        verdicts = {label: verdict(part, row["hardware"], gpu) for label, part in finding.items()}
        return join_parts(ours), join_parts(verdicts)
    return finding.ours, verdict(finding, row["hardware"], gpu)


def join_parts(parts: dict[str, str]) -> str:
    """One text for all opponents where they agree, else `label: text` for each."""
    if len(set(parts.values())) == 1:
        return next(iter(parts.values()))
    return "; ".join(f"{label}: {text}" for label, text in parts.items())
