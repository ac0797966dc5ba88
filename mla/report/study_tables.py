"""`figures/studies.md`: heads, long contexts, ragged batches and the staircase, a section for each where measured."""

import pandas as pd

from mla.report import studies
from mla.report.compare import finished, shape_name, tokens_name
from mla.report.style import LOOKS
from mla.report.tables import OUTCOMES, citable_sentence
from mla.report.text import markdown, number, percent


def studies_markdown(frame: pd.DataFrame) -> str | None:
    """All sections, or None where none of these studies was measured."""
    sections = [section for make in (heads, long_contexts, ragged, staircase) if (section := make(frame))]
    if not sections:
        return None
    return (
        f"# Studies beside the sixteen shapes\n\n{frame['gpu'].iloc[0]}, {frame['date'].iloc[0]}, CUDA graph, cold L2, "
        "bf16; medians. Made by `make figures`; the rows in full are in results.csv. `of read` and `of matmul` are "
        "shares of the ceilings measured in the same rounds, `of limit` is the share of the lower one at that shape. A "
        f"dash means no valid result. {citable_sentence(frame)}\n\n" + "\n".join(sections)
    )


def heads(frame: pd.DataFrame) -> str:
    """The section on the number of heads, or an empty string."""
    rows = studies.heads(frame)
    if rows.empty:
        return ""
    return (
        "## Number of heads\n\nFew heads are bound by reading the cache, many by arithmetic: `limit` is the ceiling "
        f"that is met first.\n\n{markdown(_side_by_side(rows, finished(frame)))}\n"
    )


def long_contexts(frame: pd.DataFrame) -> str:
    """The section on few long requests, or an empty string."""
    rows = studies.long_contexts(frame)
    if rows.empty:
        return ""
    return (
        "## Few requests, long contexts\n\nWith 128 heads; a request is divided over the whole GPU and its parts are "
        f"merged.\n\n{markdown(_side_by_side(rows, finished(frame)))}\n"
    )


def _side_by_side(rows: pd.DataFrame, kernel: str) -> list[dict[str, str]]:
    cells = []
    for (batch_size, context_len, num_heads), row in studies.side_by_side(rows, kernel).iterrows():
        cell = {"batch": str(batch_size), "context": tokens_name(context_len), "heads": str(num_heads)}
        cell["limit"] = row["limit"]
        for name, suffix in ((kernel, ""), (studies.OPPONENT, "_opponent")):
            cell |= {
                f"{name}, us": number(row[f"latency_us{suffix}"], 1),
                f"{name}, TFLOPS": number(row[f"tflops{suffix}"], 0),
                f"{name}, of read": percent(row[f"share_of_read{suffix}"]),
                f"{name}, of limit": percent(row[f"share_of_limit{suffix}"]),
            }
        cells.append(cell | {f"vs {LOOKS[studies.OPPONENT].label}": number(row["ratio"], 2)})
    return cells


def ragged(frame: pd.DataFrame) -> str:
    """The section on ragged batches beside even ones, or an empty string."""
    table = studies.ragged(frame)
    if table.empty:
        return ""
    cells = [
        {
            "batch": str(row.batch_size),
            "lengths": f"{row.lengths}, to {tokens_name(row.context_len)}",
            "tokens": str(row.tokens),
            "even batch": f"{shape_name(row.batch_size, row.even_context_len)}",
            "its tokens": number(row.even_tokens, 0),
            "implementation": f"`{row.implementation}`",
            "ragged, us": number(row.latency_us, 1),
            "even, us": number(row.even_latency_us, 1),
            "ragged / even": number(row.ratio, 2),
            "status": OUTCOMES.get(row.status, row.status),
        }
        for row in table.itertuples()
    ]
    return (
        "## Ragged batches\n\nEach beside the even batch of the same total of tokens, as nearly as whole pages allow. "
        "A ratio of 1 means that the spread of the lengths costs nothing. `log-uniform` lengths go from 256 up, "
        f"`one-long` is one request of that length among others of 1K.\n\n{markdown(cells)}\n"
    )


def staircase(frame: pd.DataFrame) -> str:
    """The section on the steps to the finished kernel, or an empty string."""
    rows = studies.staircase(frame)
    if rows.empty:
        return ""
    shapes = sorted(set(zip(rows["batch_size"], rows["context_len"], strict=True)))
    rates = rows.set_index(["implementation", "batch_size", "context_len"])
    cells = []
    for name in studies.STAIRCASE:
        cell = {"kernel": LOOKS[name].label}
        for shape in shapes:
            row = rates.loc[(name, *shape)] if (name, *shape) in rates.index else None
            cell[shape_name(*shape)] = "-" if row is None else number(row["tflops"], 0)
            cell[f"of matmul, {shape_name(*shape)}"] = "-" if row is None else percent(row["share_of_matmul"])
        cells.append(cell)
    return (
        "## Steps to the finished kernel\n\nTFLOPS; the rows named `without` are the finished kernel with one idea "
        f"switched off.\n\n{markdown(cells)}\n"
    )
