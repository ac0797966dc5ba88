"""The attention of one prefill: the fused kernel beside torch's backends, as a table and a sentence."""

import pandas as pd

from mla.report.compare import tokens_name
from mla.report.text import markdown, number

CASE = ["num_heads", "batch_size", "q_len", "context_len"]
BACKENDS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math")


def prefill(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a case, in microseconds.

    Args:
        frame: what `data.load_study` returns for `prefill`.

    Returns:
        Index `CASE`; `fused` and its `config`, the fastest that was right; each of `BACKENDS` with what it takes to put
        keys together and pad values, NaN where it gave no result; `best` (a backend's name), `ratio` (the best
        backend's latency over the fused kernel's) and `tflops` and `share_of_matmul` of the fused kernel; `fused_new`
        and `sdpa_cudnn_new`, what the first call at a new length takes more, NaN where not measured.
    """
    measured = frame[frame["usable"] & (frame["assembly"] != "untimed")]
    rows = measured[measured["timer"] == "cuda_graph"]
    new = measured[measured["timer"] == "new_length"].pivot_table("latency_us_p50", CASE, "implementation")
    fastest = rows.loc[rows.groupby([*CASE, "implementation"])["latency_us_p50"].idxmin()]
    table = fastest.pivot_table("latency_us_p50", CASE, "implementation").reindex(columns=["fused", *BACKENDS])
    fused = fastest[fastest["implementation"] == "fused"].set_index(CASE)
    tflops = fused["flops"] / fused["latency_us_p50"] / 1e6
    backends = table[list(BACKENDS)]
    table = table.assign(
        config=fused["config"],
        best=backends.dropna(how="all").idxmin(axis=1),
        ratio=backends.min(axis=1) / table["fused"],
        tflops=tflops,
        share_of_matmul=tflops / fused["matmul_tflops"],
    )
    for name in ("fused", "sdpa_cudnn"):
        table[f"{name}_new"] = new.get(name, pd.Series(dtype=float)) - table[name]
    return table.sort_index(ascending=[False, True, True, True])


def prefill_sentence(table: pd.DataFrame) -> str:
    """Where the fused kernel is the fastest, and which backend is elsewhere.

    Args:
        table: what `prefill` returns.
    """
    ratio = table["ratio"].dropna()
    if ratio.empty:
        return "No case has a result of both sides."
    wins = int((ratio > 1).sum())
    stated = (
        f"The fused kernel is {ratio.min():.2f} to {ratio.max():.2f} times as fast as the fastest of torch's backends, "
        f"and ahead in {wins} of {len(ratio)} cases."
    )
    best = table.loc[ratio.index, "best"].value_counts()
    stated += f" That backend is {', '.join(f'`{name}` in {count}' for name, count in best.items())}."
    fused, cudnn = (table[f"{name}_new"].dropna() / 1e3 for name in ("fused", "sdpa_cudnn"))
    if not fused.empty and not cudnn.empty:
        stated += (
            f" The first call at a length that is new to the process takes {cudnn.min():.0f} to {cudnn.max():.0f} ms "
            f"more by cuDNN, which makes a plan ({cudnn.median():.0f} in the median), and at most {fused.max():.1f} ms "
            f"more by the fused kernel."
        )
    return stated


def prefill_markdown(frame: pd.DataFrame) -> str:
    """`figures/prefill.md`: a line a case, and what gave no result."""
    table = prefill(frame)
    cells = [
        {
            "heads": str(heads),
            "requests": str(batch_size),
            "query tokens": tokens_name(q_len),
            "keys": tokens_name(context_len),
            "fused, ms": number(row["fused"] / 1e3, 3),
            "TFLOPS": number(row["tflops"], 0),
            **{f"{name.removeprefix('sdpa_')}, ms": number(row[name] / 1e3, 3) for name in BACKENDS},
            "torch's best over fused": number(row["ratio"], 2),
        }
        for (heads, batch_size, q_len, context_len), row in table.iterrows()
    ]
    without = [
        f"{row.implementation}{'' if pd.isna(row.config) else ' ' + row.config} at {row.num_heads} heads, "
        f"{tokens_name(row.q_len)} of {tokens_name(row.context_len)}: {row.status}"
        for row in frame[~frame["usable"] & (frame["assembly"] != "untimed")].itertuples()
    ]
    citable = "All rows are citable." if frame["citable"].all() else "Not citable: made from uncommitted code."
    return (
        f"# Prefill\n\n{frame['gpu'].iloc[0]}, {frame['date'].iloc[0]}, CUDA graph, cold L2, bf16; medians. Made by "
        "`make figures`. Causal attention of one layer; keys of 192 and values of 128 a head were rebuilt before. The "
        "fused kernel reads both parts of a key where they are; torch's attention takes keys in one piece, and its "
        "flash backend values as wide as keys: making these is in its time. TFLOPS count the scores that causality "
        f"leaves. {citable}\n\n{prefill_sentence(table)}\n\n{markdown(cells)}\n"
        + (f"\nWithout a result: {'; '.join(without)}.\n" if without else "")
    )
