"""Numbers, ranges and tables as text."""

import re

import pandas as pd
from tabulate import tabulate

NUMERIC = re.compile(r"-|[-\d.]+( %|†)?")


def markdown(rows: list[dict]) -> str:
    """A Markdown table of cells; columns of numbers are set flush right."""
    if not rows:
        return "No rows."
    cells = [{name: str(cell).replace("|", "\\|").replace("\n", " ") for name, cell in row.items()} for row in rows]
    align = ["right" if all(NUMERIC.fullmatch(row[name]) for row in cells) else "left" for name in cells[0]]
    return tabulate(cells, headers="keys", tablefmt="pipe", colalign=align, disable_numparse=True)


def number(value: float, digits: int) -> str:
    """A rounded number, or a dash where there is none."""
    return "-" if pd.isna(value) else f"{value:.{digits}f}"


def significant(value: float) -> str:
    """A number rounded to two significant digits, never in powers of ten, or a dash."""
    return "-" if pd.isna(value) else f"{float(f'{value:.2g}'):.12g}"


def spread_text(low: float, high: float) -> str:
    """The range between two quantiles, or a dash."""
    return "-" if pd.isna(low) else f"{low:.2f}-{high:.2f}"


def percent(share: float) -> str:
    """A share as whole per cent, or a dash."""
    return "-" if pd.isna(share) else f"{100 * share:.0f} %"


def latex_escape(text: str) -> str:
    """Escape what LaTeX reads as commands."""
    for character in "&%$#_{}":
        text = text.replace(character, "\\" + character)
    return text.replace("†", r"\dag{}")
