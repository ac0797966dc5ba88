"""The checks of the published figures: each looks at the measured data, or at model dimensions, and answers."""

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd

from mla.report import cache_size as size
from mla.report.compare import (
    OPPONENTS,
    SHAPES,
    at_shapes,
    count_wins,
    growth_steps,
    outlier_wins,
    ratios,
    shape_name,
    usual,
)
from mla.report.tuning_tables import tuning_table

# A figure is reached if ours is at least this share of it; an equality holds within 1 minus this.
REACHED = 0.9


class Finding(NamedTuple):
    """Our answer to a claim: the text, whether the claim holds (None: no data), and why it may differ."""

    ours: str
    holds: bool | None
    reason: str = ""


class Evidence(NamedTuple):
    """What a check may look at: the decode data, the sweep, the kernel in question, whole models (None: not there)."""

    frame: pd.DataFrame
    tune: pd.DataFrame | None
    kernel: str
    pipeline: pd.DataFrame | None = None


NO_DATA = Finding("no valid measurement", None)


def check_wins(published: pd.Series, evidence: Evidence) -> Finding:
    """Shapes won; the contiguous opponent, the stronger, decides, and shapes without a result stay open."""
    contiguous, paged = (ratios(evidence.frame, evidence.kernel, opponent) for opponent in OPPONENTS)
    won, unknown = (contiguous["ratio"] > 1).sum(), contiguous["ratio"].isna().sum()
    holds = None if won < published["value"] <= won + unknown else bool(won >= published["value"])
    ours = f"{count_wins(contiguous)}{outlier_wins(contiguous)}; gathered: {count_wins(paged)}{outlier_wins(paged)}"
    return Finding(ours, holds, compute_bound(evidence))


def compute_bound(evidence: Evidence) -> str:
    """Why a lead is smaller here, if decode is bound by arithmetic at 128 heads; empty if it is not."""
    intensity, ridge = intensity_and_ridge(evidence.frame)
    rates = at_shapes(evidence.frame, evidence.kernel)
    if not intensity > ridge or rates["tflops"].isna().all():
        return ""
    best = rates.loc[rates["tflops"].idxmax()]
    kernel = "a plain `tl.dot` kernel" if evidence.kernel == "portable" else "this kernel"
    return (
        f"compute bound here: intensity {intensity:.0f} FLOP/byte, ridge measured {ridge:.0f}; {kernel} reaches "
        f"{best['tflops']:.0f} of {best['matmul_tflops']:.0f} TFLOPS"
    )


def intensity_and_ridge(frame: pd.DataFrame) -> tuple[float, float]:
    """FLOP/byte of decode with 128 heads, and where the two measured ceilings meet; NaN where not measured."""
    rows = usual(frame)
    ridge = 1000 * rows["matmul_tflops"].median() / rows["read_gbps"].median()
    return rows.loc[rows["num_heads"] == 128, "intensity"].max(), ridge


def check_ratio(published: pd.Series, evidence: Evidence) -> Finding:
    """The ratio at one shape reaches the published one."""
    shape = (published["batch_size"], published["context_len"])
    contiguous, paged = (ratios(evidence.frame, evidence.kernel, name).loc[shape, "ratio"] for name in OPPONENTS)
    if pd.isna(contiguous):
        return NO_DATA
    holds = bool(contiguous >= REACHED * published["value"])
    return Finding(f"{contiguous:.2f}; gathered: {ratio_text(paged)}", holds, compute_bound(evidence))


def check_loss(published: pd.Series, evidence: Evidence) -> dict[str, Finding]:
    """The named shape is a loss and the only one, for each opponent."""
    shape = (published["batch_size"], published["context_len"])
    return {
        label: only_loss(ratios(evidence.frame, evidence.kernel, opponent)["ratio"], shape)
        for label, opponent in zip(("contiguous", "gathered"), OPPONENTS, strict=True)
    }


def only_loss(ratio: pd.Series, shape: tuple[int, int]) -> Finding:
    """Whether the shape is the only loss; shapes without a result leave it open."""
    if pd.isna(ratio[shape]):
        return NO_DATA
    losses = int((ratio < 1).sum())
    if ratio[shape] >= 1:
        return Finding(f"{ratio[shape]:.2f}", False, "no loss there")
    if losses == 1:
        return Finding(f"{ratio[shape]:.2f}, the only loss", None if ratio.isna().any() else True)
    return Finding(f"{ratio[shape]:.2f}, one of {losses} losses", False, f"{losses} of {len(SHAPES)} shapes are losses")


def check_loss_reason(published: pd.Series, evidence: Evidence) -> Finding:
    """The loss at the named shape is there with eager launches and gone in a CUDA graph, which has none."""
    shape = (published["batch_size"], published["context_len"])
    frame, kernel = evidence.frame, evidence.kernel
    graph, paged = (ratios(frame, kernel, opponent).loc[shape, "ratio"] for opponent in OPPONENTS)
    eager = ratios(frame, kernel, OPPONENTS[0], "eager").loc[shape, "ratio"]
    if pd.isna(graph) or pd.isna(eager):
        return NO_DATA
    latency_us = {
        timer: at_shapes(frame, kernel, timer).loc[shape, "latency_us_p50"] for timer in ("cuda_graph", "eager")
    }
    share = 1 - latency_us["cuda_graph"] / latency_us["eager"]
    ours = (
        f"without launches, in a CUDA graph, {graph:.2f}; gathered: {ratio_text(paged)}; eager {eager:.2f}, where "
        f"launching is {100 * share:.0f} % of {latency_us['eager']:.0f} us"
    )
    stays = (
        "replay of a CUDA graph removes launch overhead, and the kernel still loses; the eager share is mostly this "
        "package's own launch code"
    )
    return Finding(ours, bool(eager < 1 <= graph), stays if graph < 1 else "no loss there to explain")


def ratio_text(ratio: float) -> str:
    """A rounded ratio, or that there is none."""
    return "no result" if pd.isna(ratio) else f"{ratio:.2f}"


def check_growth(published: pd.Series, evidence: Evidence) -> Finding:
    """The ratio over the contiguous opponent grows with every step of batch size and of context."""
    grown, steps = growth_steps(ratios(evidence.frame, evidence.kernel, OPPONENTS[0])["ratio"])
    return Finding(f"{grown} of {steps} steps", grown == steps, compute_bound(evidence)) if steps else NO_DATA


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
    intensity, ridge = intensity_and_ridge(evidence.frame)
    if pd.isna(ridge / intensity):
        return NO_DATA
    reason = f"intensity {intensity:.0f} FLOP/byte, ridge measured here {ridge:.0f}"
    return Finding(f"ridge over intensity {ridge / intensity:.2f}", bool(ridge > intensity), reason)


def check_head_reuse(published: pd.Series, evidence: Evidence) -> Finding:
    """The largest block of heads among the winning configurations of the sweep, and whether it had larger ones."""
    if evidence.tune is None or (table := tuning_table(evidence.tune)).empty:
        return NO_DATA
    largest = table["block_h"].max()
    untested = "" if evidence.tune["block_h"].max() > largest else "; not tested above"
    return Finding(f"{largest}{untested}", bool(largest == published["value"]))


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
    """The published context fits in the card's memory beside the weights of a model that has this cache."""
    bytes_per_token = size.cache_bytes_per_token(size.MLA_LITE)
    limit = size.context_limit(size.MLA_LITE, size.RTX_4090_BYTES, bytes_per_token)
    hybrid = size.context_limit(size.MHA_7B, size.RTX_4090_BYTES, bytes_per_token)
    reason = (
        f"depends on the model: V2-Lite's bf16 weights, {size.weight_bytes(size.MLA_LITE) / size.GIB:.0f} GiB, do not "
        f"fit; {hybrid} tokens of its cache fit beside 7B of weights, but there is no such model"
    )
    return Finding(f"{limit} (DeepSeek-V2-Lite)", bool(limit >= published["value"]), reason)


def check_prefill_memory(published: pd.Series, _: Evidence) -> Finding:
    """At the published context the weights and one layer's scores of a prefill exceed the card's memory."""
    scores = size.plain_attention_bytes(size.MHA_7B, int(published["value"]))
    needed = size.weight_bytes(size.MHA_7B) + scores
    card = size.RTX_4090_BYTES
    text = f"{needed / size.GIB:.1f} of {card / size.GIB:.0f} GiB in a prefill; a decode step holds no such matrix"
    return Finding(text, bool(needed > card))
