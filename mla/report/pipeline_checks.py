"""The checks of what the tutorial says of whole models, against the measured pipeline."""

import pandas as pd

from mla.report.checks import REACHED, Evidence, Finding, check_dimension, check_mla_context, check_prefill_memory
from mla.report.compare import tokens_name
from mla.report.pipeline import GIB, by_context, leads, main_rows

# "Sharply" is a word without a number: we read it as at most half the time.
SHARP = 2.0
_NOTHING = Finding("", None)


def check_speedup(published: pd.Series, evidence: Evidence) -> Finding:
    """The largest lead of the patched model over one with MHA; the lead over the library's own MLA stands beside it."""
    rows = main_rows(evidence.pipeline)
    if rows is None or (lead := leads(rows, "mha")).empty:
        return _NOTHING
    ours = f"{lead.max():.1f} over MHA at {tokens_name(int(lead.idxmax()))}"
    own = leads(rows, "mla_unpatched")
    if len(own):
        ours += f"; {own.max():.1f} over transformers' own MLA at {tokens_name(int(own.idxmax()))}"
    reason = f"batch {rows['batch_size'].iloc[0]}, contexts up to {tokens_name(int(lead.index.max()))}"
    return Finding(ours, bool(lead.max() >= REACHED * published["value"]), reason)


def check_latency_drop(published: pd.Series, evidence: Evidence) -> Finding:
    """Past the named context a step takes at most half of MHA's time, and not yet at it or below."""
    rows = main_rows(evidence.pipeline)
    if rows is None:
        return _NOTHING
    lead, limit = leads(rows, "mha"), published["value"]
    below, beyond = lead[lead.index <= limit], lead[lead.index > limit]
    if below.empty or beyond.empty:
        return _NOTHING
    ours = f"lead over MHA {below.iloc[-1]:.1f} at {tokens_name(int(below.index[-1]))}, " + ", ".join(
        f"{value:.1f} at {tokens_name(int(n))}" for n, value in beyond.items()
    )
    reason = f"we read sharply as {SHARP:g} times as fast from there on, and not before"
    return Finding(ours, bool((beyond >= SHARP).all() and (below < SHARP).all()), reason)


def with_measured_memory(check, context_len: int | None):
    """An arithmetic check whose answer also says what the pipeline measured, where it did.

    Args:
        check: the check; its verdict stays.
        context_len: where the patched model's memory is of interest; None for the cache a token, at the longest.
    """

    def combined(published: pd.Series, evidence: Evidence) -> Finding:
        finding, rows = check(published, evidence), main_rows(evidence.pipeline)
        measured = "" if rows is None else _memory(rows, context_len)
        return finding._replace(ours=finding.ours + measured)

    return combined


def _memory(rows: pd.DataFrame, context_len: int | None) -> str:
    """`; measured here: ...`, or nothing where there is no such row."""
    caches = {model: by_context(rows, model)["cache_bytes"].dropna() for model in ("mla_patched", "mha")}
    if context_len is None:
        common = caches["mla_patched"].index.intersection(caches["mha"].index)
        if common.empty:
            return ""
        saving = 1 - caches["mla_patched"][common[-1]] / caches["mha"][common[-1]]
        return f"; measured here at {tokens_name(int(common[-1]))}: {saving:.4f}"
    ours = by_context(rows, "mla_patched")
    if context_len not in ours.index:
        return ""
    row = ours.loc[context_len]
    where = f"; measured here at {tokens_name(context_len)}, batch {row['batch_size']}, {row['num_layers']} layers: "
    if row["status"] != "ok":
        return where + row["status"].replace("_", " ")
    peak = max(row["fill_peak_bytes"], row["decode_peak_bytes"]) / GIB
    return where + f"fits, peak {peak:.1f} GiB" + (" with the prefill" if row["fill"] == "prefill" else "")


PIPELINE_CHECKS = {"tutorial-speedup": check_speedup, "tutorial-latency-4096": check_latency_drop}


def memory_checks(saving: float) -> dict:
    """The arithmetic checks that the pipeline has something to add to; `saving`: of the cache, by arithmetic."""
    return {
        "tutorial-cache-saving": with_measured_memory(check_dimension(saving, ""), None),
        "tutorial-mla-context": with_measured_memory(check_mla_context, 131072),
        "tutorial-8192-oom": with_measured_memory(check_prefill_memory, 8192),
    }
