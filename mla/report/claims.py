"""Every published figure beside ours, with a verdict that is computed from the data."""

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd

from mla.report import cache_size as size
from mla.report.compare import OPPONENTS, at_shapes, count_wins, finished, growth_steps, ratios, shape_name, usual
from mla.report.tuning_tables import tuning_table

# A figure is reached if ours is at least this share of it; an equality holds within 1 minus this.
REACHED = 0.9
# Our reading of "launch overhead dominates".
DOMINATES = 0.5
NOT_YET = "not tested yet"
NOT_HERE = "not testable here"


class Finding(NamedTuple):
    """Our answer to a claim: the text, whether the claim holds (None: no data), and why it may differ."""

    ours: str
    holds: bool | None
    reason: str = ""


class Evidence(NamedTuple):
    """What a check may look at: the decode data, the sweep (or None) and the kernel in question."""

    frame: pd.DataFrame
    tune: pd.DataFrame | None
    kernel: str


NO_DATA = Finding("no valid measurement", None)


def verdict(finding: Finding, hardware: str, gpu: str) -> str:
    """Word a finding: `hardware` is the source's, `gpu` ours; `any` and arithmetic claims need no like hardware."""
    if finding.holds is None:
        return NOT_YET
    if hardware == "any" or gpu.startswith(hardware):
        return "reproduced" if finding.holds else f"differs ({finding.reason or 'reason unknown'})"
    if finding.holds:
        return f"holds on an {gpu}"
    return f"differs on an {gpu} ({finding.reason or 'reason unknown'})"


def check_wins(published: pd.Series, evidence: Evidence) -> Finding:
    """Shapes won; the contiguous opponent, the stronger, decides, and shapes without a result stay open."""
    contiguous, paged = (ratios(evidence.frame, evidence.kernel, opponent) for opponent in OPPONENTS)
    won, unknown = (contiguous["ratio"] > 1).sum(), contiguous["ratio"].isna().sum()
    holds = None if won < published["value"] <= won + unknown else bool(won >= published["value"])
    return Finding(f"{count_wins(contiguous)}; gathered: {count_wins(paged)}", holds)


def check_ratio(published: pd.Series, evidence: Evidence) -> Finding:
    """The ratio at one shape reaches the published one; without a published value: it is a loss."""
    shape = (published["batch_size"], published["context_len"])
    contiguous, paged = (ratios(evidence.frame, evidence.kernel, name).loc[shape, "ratio"] for name in OPPONENTS)
    if pd.isna(contiguous):
        return NO_DATA
    is_loss = pd.isna(published["value"])
    holds = contiguous < 1 if is_loss else contiguous >= REACHED * published["value"]
    gathered = "no result" if pd.isna(paged) else f"{paged:.2f}"
    return Finding(f"{contiguous:.2f}; gathered: {gathered}", bool(holds))


def check_launch_share(published: pd.Series, evidence: Evidence) -> Finding:
    """The share of the eager latency that vanishes in a CUDA graph is more than half."""
    shape = (published["batch_size"], published["context_len"])
    graph, eager = (at_shapes(evidence.frame, evidence.kernel, timer).loc[shape] for timer in ("cuda_graph", "eager"))
    if pd.isna(graph["tflops"]) or pd.isna(eager["tflops"]):
        return NO_DATA
    share = 1 - graph["latency_us_p50"] / eager["latency_us_p50"]
    return Finding(f"{100 * share:.0f} % of {eager['latency_us_p50']:.0f} us eager", bool(share > DOMINATES))


def check_growth(published: pd.Series, evidence: Evidence) -> Finding:
    """The ratio over the contiguous opponent grows with every step of batch size and of context."""
    grown, steps = growth_steps(ratios(evidence.frame, evidence.kernel, OPPONENTS[0])["ratio"])
    return Finding(f"{grown} of {steps} steps", grown == steps) if steps else NO_DATA


def check_peak(published: pd.Series, evidence: Evidence) -> Finding:
    """The highest rate over the sixteen shapes."""
    rates = at_shapes(evidence.frame, evidence.kernel)["tflops"].dropna()
    if rates.empty:
        return NO_DATA
    batch_size, context_len = rates.idxmax()
    return Finding(
        f"{rates.max():.0f} at {shape_name(batch_size, context_len)}", bool(rates.max() >= REACHED * published["value"])
    )


def check_bandwidth_bound(published: pd.Series, evidence: Evidence) -> Finding:
    """The measured ridge over the intensity at 128 heads: over 1 means that reading the cache is the limit."""
    rows = usual(evidence.frame)
    intensity = rows.loc[rows["num_heads"] == 128, "intensity"].max()
    ridge = 1000 * rows["matmul_tflops"].median() / rows["read_gbps"].median()
    if pd.isna(ridge / intensity):
        return NO_DATA
    reason = f"intensity {intensity:.0f} FLOP/byte, ridge measured here {ridge:.0f}"
    return Finding(f"ridge over intensity {ridge / intensity:.2f}", bool(ridge > intensity), reason)


def check_head_reuse(published: pd.Series, evidence: Evidence) -> Finding:
    """The largest block of heads among the winning configurations of the sweep."""
    if evidence.tune is None or (table := tuning_table(evidence.tune)).empty:
        return NO_DATA
    return Finding(f"{table['block_h'].max()}", bool(table["block_h"].max() == published["value"]))


def check_tuning(published: pd.Series, evidence: Evidence) -> Finding:
    """The largest share by which the best configuration is shorter than the first guess."""
    if evidence.tune is None or (gains := tuning_table(evidence.tune)["gain"].dropna()).empty:
        return NO_DATA
    return Finding(
        f"{1 - 1 / gains.max():.2f} from our own first guess", bool(1 - 1 / gains.max() > published["value"])
    )


def check_dimension(ours: float, reason: str) -> Callable[[pd.Series, Evidence], Finding]:
    """A check that the published figure is within the tolerance of one that follows from model dimensions."""
    text = f"{ours:.4g}" if ours < 1e4 else f"{ours:.0f}"
    return lambda published, _: Finding(text, abs(ours / published["value"] - 1) <= 1 - REACHED, reason)


def check_mla_context(published: pd.Series, _: Evidence) -> Finding:
    """With 7B of weights and the cache of DeepSeek-V2-Lite the published context fits in the card's memory."""
    limit = size.context_limit(size.MHA_7B, size.RTX_4090_BYTES, size.cache_bytes_per_token(size.MLA_LITE))
    lite = size.weight_bytes(size.MLA_LITE) / size.GIB
    text = f"{limit} (7B of weights, V2-Lite's cache; V2-Lite's own bf16 weights, {lite:.0f} GiB, do not fit)"
    return Finding(text, bool(limit >= published["value"]))


def check_prefill_memory(published: pd.Series, _: Evidence) -> Finding:
    """At the published context the weights and one layer's scores of a prefill exceed the card's memory."""
    scores = size.plain_attention_bytes(size.MHA_7B, int(published["value"]))
    needed = size.weight_bytes(size.MHA_7B) + scores
    card = size.RTX_4090_BYTES
    text = f"{needed / size.GIB:.1f} of {card / size.GIB:.0f} GiB in a prefill; a decode step holds no such matrix"
    return Finding(text, bool(needed > card))


SAVING = 1 - size.cache_bytes_per_token(size.MLA_LITE) / size.cache_bytes_per_token(size.MHA_7B)
MHA_LIMIT = size.context_limit(size.MHA_7B, size.RTX_4090_BYTES, size.cache_bytes_per_token(size.MHA_7B))
KERNEL_CHECKS = {
    "article-wins": check_wins,
    "article-largest-gap": check_ratio,
    "article-loss": check_ratio,
    "article-loss-reason": check_launch_share,
    "article-growth": check_growth,
    "article-peak": check_peak,
}
DATA_CHECKS = {
    "article-bandwidth-bound": check_bandwidth_bound,
    "article-head-reuse": check_head_reuse,
    "article-tuning": check_tuning,
}
# These follow from dimensions: they hold or not on any GPU.
ARITHMETIC_CHECKS = {
    "article-row-width": check_dimension(size.MLA_V3.cached_values, ""),
    "article-heads": check_dimension(size.MLA_V3.num_heads, ""),
    "tutorial-cache-saving": check_dimension(SAVING, ""),
    "tutorial-mha-limit": check_dimension(MHA_LIMIT, "weights and cache alone fill the card earlier"),
    "tutorial-mla-context": check_mla_context,
    "tutorial-8192-oom": check_prefill_memory,
    "tutorial-mqa-cost": check_dimension(
        size.MLA_V3.cached_values / size.mqa_cached_values(), "a row is 576 values, not 256"
    ),
    "tutorial-latent-width": check_dimension(size.MLA_V3.cached_values, "the rope key is cached too: 512 + 64"),
    "tutorial-scale": check_dimension(
        size.MLA_V3.qk_head_dim**-0.5, "192 ** -0.5, as DeepSeek's query heads are 192 wide"
    ),
}


def claims(frame: pd.DataFrame, published: pd.DataFrame, tune: pd.DataFrame | None = None) -> pd.DataFrame:
    """Judge every published row.

    Returns:
        The published columns, and `kernel` (empty where no kernel is in question), `ours` and `verdict`; a claim about
        a kernel has a row for the portable one, like the source's a Triton kernel, and one for the finished one.
    """
    kernels = dict.fromkeys(["portable", finished(frame)])
    rows = []
    for claim_id, row in published.iterrows():
        for kernel in kernels if claim_id in KERNEL_CHECKS else [""]:
            ours, text = judge(claim_id, row, Evidence(frame, tune, kernel))
            rows.append({"id": claim_id, **row, "kernel": kernel, "ours": ours, "verdict": text})
    return pd.DataFrame(rows)


def judge(claim_id: str, row: pd.Series, evidence: Evidence) -> tuple[str, str]:
    """Our figure and the verdict for one published row."""
    if row["testable"] == "no":
        return "", NOT_HERE
    if row["testable"] == "later":
        return "", NOT_YET
    checks = KERNEL_CHECKS | DATA_CHECKS | ARITHMETIC_CHECKS
    if claim_id not in checks:
        raise ValueError(
            f"expected a check for the testable claim {claim_id}, got none; add one to mla/report/claims.py or set "
            "testable to later or no in published.csv"
        )
    finding = checks[claim_id](row, evidence)
    if claim_id in ARITHMETIC_CHECKS:
        return finding.ours, verdict(finding, "any", "").replace("reproduced", "reproduced by arithmetic")
    return finding.ours, verdict(finding, row["hardware"], evidence.frame["gpu"].iloc[0])
