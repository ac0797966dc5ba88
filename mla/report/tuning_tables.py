"""What the sweep of the portable kernel found: the best configuration of each shape beside the first guess."""

import pandas as pd

from mla.report.text import markdown, number

FIRST_GUESS = {"block_h": 16, "block_n": 32, "num_warps": 4, "num_stages": 2, "loads": "pointer"}
CONFIG_COLUMNS = [*FIRST_GUESS, "num_splits"]
TUNE_SHAPE = ["batch_size", "context_len", "num_heads", "dtype", "page_size"]


def tuning_table(tune: pd.DataFrame) -> pd.DataFrame:
    """The fastest valid configuration of each swept shape.

    Returns:
        A row a shape: shape columns, configuration columns, `latency_us_p50`, `first_guess_us` (with the
        kernel's own split count; NaN where it gave no result) and `gain` (first guess over best).
    """
    valid = tune[tune["usable"]].sort_values("latency_us_p50", kind="stable")
    best = valid.groupby(TUNE_SHAPE, sort=True)[[*CONFIG_COLUMNS, "latency_us_p50"]].head(1).index
    best = valid.loc[best, [*TUNE_SHAPE, *CONFIG_COLUMNS, "latency_us_p50"]].sort_values(TUNE_SHAPE)
    is_first = (valid[list(FIRST_GUESS)] == pd.Series(FIRST_GUESS)).all(axis=1) & valid["num_splits"].isna()
    first = valid[is_first].groupby(TUNE_SHAPE)["latency_us_p50"].min().rename("first_guess_us")
    table = best.merge(first, how="left", left_on=TUNE_SHAPE, right_index=True)
    return table.assign(gain=table["first_guess_us"] / table["latency_us_p50"]).reset_index(drop=True)


def tuning_markdown(tune: pd.DataFrame) -> str:
    """`figures/tuning.md`: the winning configuration of each shape beside the first guess."""
    rows = [
        {
            "batch": row.batch_size,
            "context": row.context_len,
            "heads": row.num_heads,
            "dtype": row.dtype,
            "page": row.page_size,
            **{name: getattr(row, name) for name in FIRST_GUESS},
            "splits": number(row.num_splits, 0),
            "best, us": number(row.latency_us_p50, 1),
            "first guess, us": number(row.first_guess_us, 1),
            "gain": number(row.gain, 2),
        }
        for row in tuning_table(tune).itertuples()
    ]
    guess = ", ".join(f"{name} {value}" for name, value in FIRST_GUESS.items())
    return (
        f"# Tuning of the portable kernel\n\n{tune['gpu'].iloc[0]}, {tune['date'].iloc[0]}, CUDA graph, cold L2. "
        f"Made by `make figures`. First guess: {guess}, and the kernel's own number of splits, which a "
        f"dash under `splits` also means.\n\n{markdown(rows)}\n"
    )
