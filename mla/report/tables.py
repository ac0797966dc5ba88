"""The tables of results (Markdown, CSV, LaTeX) and the headline sentence, made from the data."""

import pandas as pd

from mla.report.checks import REACHED
from mla.report.compare import (
    OPPONENTS,
    OUTLIER,
    SHAPES,
    at_shapes,
    count_wins,
    finished,
    outlier_wins,
    outliers,
    ratios,
    shape_name,
    without_timer,
)
from mla.report.text import latex_escape, markdown, number, percent, significant, spread_text

RIVALS = {"torch_compile": "torch.compile", "torch_compile_paged": "torch.compile, paged", "flashmla": "FlashMLA"}
OUTCOMES = {"out_of_memory": "out of memory"}
OUTLIER_SENTENCE = (
    "†: looks like an accident of torch.compile's autotuning: its time a token is above that of both context "
    f"neighbours and over {OUTLIER:g} times their mean."
)
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
    """Every row with its id and derived columns, numbers unrounded; no latency where the result was wrong.

    `lengths` is among the columns where a batch is ragged.
    """
    latencies = ["latency_us_p20", "latency_us_p50", "latency_us_p80"]
    table = frame[RESULT_COLUMNS].copy()
    table[latencies] = table[latencies].where(frame["usable"])
    if (frame["lengths"] != "even").any():
        table.insert(RESULT_COLUMNS.index("context_len") + 1, "lengths", frame["lengths"])
    wrong = (frame["status"] == "ok") & ~frame["usable"]
    return table.assign(status=table["status"].mask(wrong, "failed: wrong result"))


def results_markdown(frame: pd.DataFrame, first_call: str = "") -> str:
    """`figures/results.md`: all implementations, all measured rows; `first_call` is a sentence to print beside them."""
    table, marked = results(frame), outliers(frame)
    rows = [
        {
            "row": f"`{row.row_id}`",
            "median, us": number(row.latency_us_p50, 2) + dagger(without_timer(row.row_id) in marked),
            "p20-p80, us": spread_text(row.latency_us_p20, row.latency_us_p80),
            "plan, us": significant(row.plan_us),
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
        f"without a number. {footnotes(frame, bool(marked), first_call)}\n\n{markdown(rows)}\n\n"
        f"{failures_markdown(table)}"
    )


def failures_markdown(table: pd.DataFrame) -> str:
    """The failed rows with their reasons, a line each; empty where none failed."""
    failed = table[table["status"].str.startswith("failed: ")]
    lines = [f"- `{row.row_id}`: {row.status.removeprefix('failed: ')}\n" for row in failed.itertuples()]
    return "## Failed\n\n" + "".join(lines) if lines else ""


def dagger(marked: bool) -> str:
    """The mark of an outlier."""
    return "†" if marked else ""


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


def summary_cells(frame: pd.DataFrame) -> list[dict[str, str]]:
    """The rounded cells of `summary`, for README and LaTeX; ratios to an outlier are marked."""
    table, kernel = summary(frame), finished(frame)
    marks = {rival: ratios(frame, kernel, rival)["outlier"].map(dagger) for rival in RIVALS}
    return [
        {
            "batch": str(batch_size),
            "context": str(context_len),
            "median, us": number(row["latency_us_p50"], 1),
            "TFLOPS": number(row["tflops"], 0),
            "of matmul": percent(row["share_of_matmul"]),
            **{f"vs {label}": number(row[rival], 2) + marks[rival][row.name] for rival, label in RIVALS.items()},
            "row": f"b{batch_size}-n{context_len}-h128",
        }
        for (batch_size, context_len), row in table.iterrows()
    ]


def summary_markdown(frame: pd.DataFrame, first_call: str = "") -> str:
    """The results block of the README; `first_call` is a sentence to print below it."""
    cells = summary_cells(frame)
    return (
        f"{markdown(cells)}\n\n"
        f"`{finished(frame)}` on {frame['gpu'].iloc[0]}, {frame['date'].iloc[0]}: CUDA graph, cold L2, 128 heads, "
        "bf16. `vs` columns are ratios of medians, over 1 where ours is faster; `of matmul` is the share of the bf16 "
        "matmul rate measured in the same rounds; a dash means no valid result. "
        f"Cite a row as `{id_pattern(frame)}`, with the last column for `ROW`. "
        f"{footnotes(frame, '†' in str(cells), first_call)}"
    )


def footnotes(frame: pd.DataFrame, has_outliers: bool, first_call: str) -> str:
    """What stands beside a table: the mark of outliers, citable runs, the first call, the notes of the data file."""
    notes = frame["notes"].iloc[0]
    outlier = OUTLIER_SENTENCE if has_outliers else ""
    parts = [outlier, citable_sentence(frame), first_call, f"Note: {notes}" if notes else ""]
    return " ".join(part for part in parts if part)


def id_pattern(frame: pd.DataFrame) -> str:
    """The row id of the finished kernel with ROW in the place of the shape."""
    stem = frame["row_id"].iloc[0].split("/")[0]
    return f"{stem}/{finished(frame)}/ROW/cuda_graph"


def summary_latex(frame: pd.DataFrame) -> str:
    """`figures/results.tex`: the sixteen shapes as a tabular that needs only booktabs."""
    cells = summary_cells(frame)
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


def headline(frame: pd.DataFrame, published: pd.DataFrame) -> str:
    """One paragraph: the source's wins, lead and rate beside ours over both opponents, and which of them we reach."""
    kernel, table = finished(frame), summary(frame)
    wins, lead, peak = (published.loc[name] for name in ("article-wins", "article-largest-gap", "article-peak"))
    shape = (int(lead["batch_size"]), int(lead["context_len"]))
    contiguous, paged = (ratios(frame, kernel, opponent) for opponent in OPPONENTS)
    best = table["tflops"].max()
    over_paged, over_contiguous = (number(rows.loc[shape, "ratio"], 2) for rows in (paged, contiguous))
    sentences = [
        f"On {frame['gpu'].iloc[0]} ({frame['date'].iloc[0]}, CUDA graph, cold L2, 128 heads, bf16) we repeat, with "
        f"the `{kernel}` kernel, an article's comparison of a Triton kernel with torch.compile on an "
        f"{wins['hardware']}.",
        f"Shapes won: {wins['value']:g} of {len(SHAPES)} in the article; here {count_wins(paged)} against "
        f"torch.compile gathering the same paged cache{outlier_wins(paged)}, and {count_wins(contiguous)} against "
        f"torch.compile on a contiguous cache{outlier_wins(contiguous)}.",
        f"Lead at {shape_name(*shape)}: {lead['value']:g} times in the article; here {over_paged} over the gathered "
        f"and {over_contiguous} over the contiguous cache.",
    ]
    if pd.notna(best):
        row = table.loc[table["tflops"].idxmax()]
        sentences.append(
            f"Highest rate: {peak['value']:g} TFLOPS in the article; here {best:.0f}, at {shape_name(*row.name)}, "
            f"{percent(row['share_of_matmul'])} of the bf16 matmul rate measured in the same rounds."
        )
    reached = {
        "the wins over the gathered cache": (paged["ratio"] > 1).sum() >= wins["value"],
        "the wins over the contiguous cache": (contiguous["ratio"] > 1).sum() >= wins["value"],
        "the lead over the gathered cache": paged.loc[shape, "ratio"] >= REACHED * lead["value"],
        "the lead over the contiguous cache": contiguous.loc[shape, "ratio"] >= REACHED * lead["value"],
        "the rate": best >= REACHED * peak["value"],
    }
    for word, wanted in (("Reached", True), ("Not reached", False)):
        if names := [name for name, is_reached in reached.items() if is_reached == wanted]:
            sentences.append(f"{word}: {', '.join(names)}.")
    if missing := int(table["tflops"].isna().sum()):
        sentences.append(f"{missing} of {len(SHAPES)} shapes have no valid result.")
    return " ".join(sentences)


def citable_sentence(frame: pd.DataFrame) -> str:
    """Say which runs were made from an unclean tree; such rows are not citable."""
    dirty = sorted(set(frame.loc[~frame["citable"], "run_id"].astype(str)))
    return f"Not citable, made from uncommitted code: run {', '.join(dirty)}." if dirty else "All rows are citable."
