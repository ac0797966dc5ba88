"""The tables of results (Markdown, CSV, LaTeX) and the headline sentence, made from the data."""

import pandas as pd

from mla.report.compare import OPPONENTS, SHAPES, at_shapes, count_wins, finished, ratios, tokens_name
from mla.report.text import latex_escape, markdown, number, percent, spread_text

RIVALS = {"torch_compile": "torch.compile", "torch_compile_paged": "torch.compile, paged", "flashmla": "FlashMLA"}
OUTCOMES = {"out_of_memory": "out of memory"}
RESULT_COLUMNS = [
    "row_id",
    "implementation",
    "batch_size",
    "context_len",
    "num_heads",
    "q_len",
    "dtype",
    "page_size",
    "num_splits",
    "timer",
    "latency_us_p20",
    "latency_us_p50",
    "latency_us_p80",
    "repeats",
    "plan_us",
    "tflops",
    "gbps",
    "share_of_matmul",
    "share_of_read",
    "rel_err",
    "status",
    "run_id",
    "citable",
]


def results(frame: pd.DataFrame) -> pd.DataFrame:
    """Every row with its id and derived columns, numbers unrounded; no latency where the result was wrong."""
    latencies = ["latency_us_p20", "latency_us_p50", "latency_us_p80"]
    table = frame[RESULT_COLUMNS].copy()
    table[latencies] = table[latencies].where(frame["usable"])
    wrong = (frame["status"] == "ok") & ~frame["usable"]
    return table.assign(status=table["status"].mask(wrong, "failed: wrong result"))


def results_markdown(frame: pd.DataFrame) -> str:
    """`figures/results.md`: all implementations, all measured rows."""
    table = results(frame)
    rows = [
        {
            "row": f"`{row.row_id}`",
            "median, us": number(row.latency_us_p50, 2),
            "p20-p80, us": spread_text(row.latency_us_p20, row.latency_us_p80),
            "plan, us": number(row.plan_us, 1),
            "TFLOPS": number(row.tflops, 1),
            "GB/s": number(row.gbps, 0),
            "of matmul": percent(row.share_of_matmul),
            "of read": percent(row.share_of_read),
            "relative error": number(row.rel_err, 5),
            "status": OUTCOMES.get(row.status, row.status),
        }
        for row in table.itertuples()
    ]
    return (
        f"# Results\n\n{frame['gpu'].iloc[0]}, {frame['date'].iloc[0]}, cold L2. Made by `make figures`; the same rows "
        "in full are in results.csv. `plan` is the separate work plan of a decode step, not part of the latency; "
        "`of matmul` and `of read` are shares of the ceilings measured in the same rounds. Rows that failed are kept, "
        f"without a number. {citable_sentence(frame)}\n\n{markdown(rows)}\n"
    )


def summary(frame: pd.DataFrame, timer: str = "cuda_graph") -> pd.DataFrame:
    """The finished kernel at the sixteen shapes, numbers unrounded.

    Returns:
        A row a shape: `row_id`, `latency_us_p50`, `tflops`, `share_of_matmul`, and a ratio for each of torch_compile,
        torch_compile_paged and flashmla (over 1: the finished kernel is faster); NaN where there is no valid result.
    """
    kernel = finished(frame)
    rows = at_shapes(frame, kernel, timer)
    table = rows[["row_id", "tflops", "share_of_matmul"]].copy()
    table.insert(1, "latency_us_p50", rows["latency_us_p50"].where(rows["tflops"].notna()))
    for rival in RIVALS:
        table[rival] = ratios(frame, kernel, rival, timer)["ratio"]
    return table


def summary_cells(table: pd.DataFrame) -> list[dict[str, str]]:
    """The rounded cells of `summary`, for README and LaTeX."""
    return [
        {
            "batch": str(batch_size),
            "context": str(context_len),
            "median, us": number(row["latency_us_p50"], 1),
            "TFLOPS": number(row["tflops"], 0),
            "of matmul": percent(row["share_of_matmul"]),
            **{f"vs {label}": number(row[rival], 2) for rival, label in RIVALS.items()},
            "row": f"b{batch_size}-n{context_len}-h128",
        }
        for (batch_size, context_len), row in table.iterrows()
    ]


def summary_markdown(frame: pd.DataFrame) -> str:
    """The results block of the README."""
    kernel = finished(frame)
    return (
        f"{markdown(summary_cells(summary(frame)))}\n\n"
        f"`{kernel}` on one {frame['gpu'].iloc[0]}, {frame['date'].iloc[0]}: CUDA graph, cold L2, 128 heads, bf16. "
        "`vs` columns are ratios of medians, over 1 where ours is faster; `of matmul` is the share of the bf16 matmul "
        "rate measured in the same rounds; a dash means no valid result. "
        f"Cite a row as `{id_pattern(frame)}`, with the last column for `ROW`. {citable_sentence(frame)}"
    )


def id_pattern(frame: pd.DataFrame) -> str:
    """The row id of the finished kernel with ROW in the place of the shape."""
    stem = frame["row_id"].iloc[0].split("/")[0]
    return f"{stem}/{finished(frame)}/ROW/cuda_graph"


def summary_latex(frame: pd.DataFrame) -> str:
    """`figures/results.tex`: the sixteen shapes as a tabular that needs only booktabs."""
    cells = summary_cells(summary(frame))
    lines = [" & ".join(latex_escape(cell) for cell in row) + r" \\" for row in (row.values() for row in cells)]
    head = " & ".join(latex_escape(name) for name in cells[0]) + r" \\"
    return "\n".join(
        [
            f"% {frame['gpu'].iloc[0]}, {frame['date'].iloc[0]}, CUDA graph, cold L2; row ids: {id_pattern(frame)}",
            r"\begin{tabular}{" + "r" * (len(cells[0]) - 1) + "l}",
            r"\toprule",
            head,
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def headline(frame: pd.DataFrame) -> str:
    """One or two sentences: wins over both opponents, the highest rate, the GPU."""
    kernel, table = finished(frame), summary(frame)
    contiguous, paged = (count_wins(ratios(frame, kernel, opponent)) for opponent in OPPONENTS)
    missing = int(table["tflops"].isna().sum())
    sentence = (
        f"On one {frame['gpu'].iloc[0]} ({frame['date'].iloc[0]}, CUDA graph, cold L2, 128 heads, bf16) the `{kernel}` "
        f"kernel is faster than torch.compile gathering the same paged cache in {paged} shapes and than torch.compile "
        f"on a contiguous cache in {contiguous}."
    )
    if table["tflops"].notna().any():
        best = table.loc[table["tflops"].idxmax()]
        sentence += (
            f" It peaks at {best['tflops']:.0f} TFLOPS at batch {best.name[0]} and {tokens_name(best.name[1])} tokens, "
            f"{percent(best['share_of_matmul'])} of the bf16 matmul rate measured in the same rounds."
        )
    return sentence + (f" {missing} of {len(SHAPES)} shapes have no valid result." if missing else "")


def citable_sentence(frame: pd.DataFrame) -> str:
    """Say which runs were made from an unclean tree; such rows are not citable."""
    dirty = sorted(set(frame.loc[~frame["citable"], "run_id"].astype(str)))
    return f"Not citable, made from uncommitted code: run {', '.join(dirty)}." if dirty else "All rows are citable."
