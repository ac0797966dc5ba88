"""The claims as Markdown: the full table and the short one of the README."""

import pandas as pd

from mla.report.cache_size import models_markdown
from mla.report.checks import REACHED
from mla.report.claims import CONSTANT, NOT_HERE
from mla.report.compare import shape_name
from mla.report.text import markdown


def said(row: pd.Series) -> str:
    """What the source states, with unit and shape: `3.6 times, 128 x 32K`."""
    value = "no value" if pd.isna(row["value"]) else " ".join([f"{row['value']:g}", *row[["unit"]].dropna()])
    known = pd.notna(row["batch_size"]) and pd.notna(row["context_len"])
    return f"{value}, {shape_name(row['batch_size'], row['context_len'])}" if known else value


def hardware_sentence(frame: pd.DataFrame) -> str:
    """Whose hardware the verdicts compare, and what the words mean."""
    return (
        f"Our measurements are from {frame['gpu'].iloc[0]} ({frame['date'].iloc[0]}), the article's from an NVIDIA "
        "H100: where the two meet, a claim can hold or differ, but only like hardware or arithmetic can reproduce it. "
        f"A figure is reached from {100 * REACHED:.0f} % of it on. `gathered` is against torch.compile on the gathered "
        "paged cache; the verdict is against torch.compile on a contiguous cache, the stronger opponent."
    )


def claims_markdown(table: pd.DataFrame, frame: pd.DataFrame) -> str:
    """`figures/claims.md`: every published row, and the model dimensions behind the arithmetic."""
    rows = [
        {
            "id": f"`{row['id']}`",
            "source": row["source"],
            "place": row["place"],
            "hardware": row["hardware"],
            "claim, in our words": row["quote_gist"],
            "published": said(row),
            "kernel": row["kernel"],
            "ours": row["ours"],
            "verdict": row["verdict"],
        }
        for _, row in table.iterrows()
    ]
    return (
        f"# Claims\n\n{hardware_sentence(frame)} Made by `make figures` from published.csv and the measured data.\n\n"
        f"{markdown(rows)}\n\n## Model dimensions behind the arithmetic\n\n"
        f"All in 16-bit types, one sequence, no activations.\n\n{markdown(models_markdown())}\n"
    )


def claims_short(table: pd.DataFrame, frame: pd.DataFrame, full: str = "figures/claims.md") -> str:
    """The claims block of the README: a row a claim that can be tested, kernels side by side; `full`: all of them."""
    tested = table[~table["verdict"].isin([NOT_HERE, CONSTANT])]
    rows = [
        {
            "claim": group["quote_gist"].iloc[0],
            "source": group["source"].iloc[0],
            "published": said(group.iloc[0]),
            "ours": by_kernel(group, "ours"),
            "verdict": by_kernel(group, "verdict"),
        }
        for _, group in tested.groupby("id", sort=False)
    ]
    return (
        f"{hardware_sentence(frame)}\n\n{markdown(rows)}\n\n{(table['verdict'] == NOT_HERE).sum()} more published "
        f"figures cannot be tested here; all are listed in [{full}]({full})."
    )


def by_kernel(group: pd.DataFrame, column: str) -> str:
    """One text where all kernels agree, else `kernel: text` for each."""
    if len(set(group[column])) == 1:
        return group[column].iloc[0]
    return "<br>".join(f"`{row['kernel']}`: {row[column]}" for _, row in group.iterrows())
