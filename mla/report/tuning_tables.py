"""What the sweeps found: the portable kernel's best configurations, and how the Hopper kernel divides its work."""

import pandas as pd

from mla.report.text import markdown, number

FIRST_GUESS = {"block_h": 16, "block_n": 32, "num_warps": 4, "num_stages": 2, "loads": "pointer"}
CONFIG_COLUMNS = [*FIRST_GUESS, "num_splits"]
TUNE_SHAPE = ["batch_size", "context_len", "num_heads", "dtype", "page_size"]

HOPPER_SHAPE = ["batch_size", "context_len", "lengths", "num_heads", "dtype", "page_size"]


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


def hopper_table(tune: pd.DataFrame) -> pd.DataFrame:
    """What the Hopper kernel's rule chose at each shape of its sweep, beside the fastest way.

    Args:
        tune: what `data.load_tune` returns for `hopper`.

    Returns:
        A row a shape: its columns, `rule` (the mode), `rule_us`, `fastest` (mode and prefetch), `fastest_us`, `loss`
        (rule over fastest, 1 where the rule is right) and `without_prefetch` (the rule's mode without prefetch over the
        same with it); a dash or NaN where there is no valid result.
    """
    valid = tune[tune["usable"]].sort_values("latency_us_p50", kind="stable")
    rows = []
    for shape, variants in tune.groupby(HOPPER_SHAPE, sort=True):
        timed = valid.loc[valid.index.intersection(variants.index, sort=False)]
        by_rule = variants["by_rule"].astype(str) == "True"
        # Modes may come to the same plan, of which one name is enough.
        mode = variants.loc[by_rule, "mode"].iloc[0] if by_rule.any() else None
        times = timed[timed["mode"] == mode].set_index("prefetch")["latency_us_p50"]
        own = variants.loc[by_rule & (variants["mode"] == mode), "prefetch"]
        rule_us = times.get(own.iloc[0], float("nan")) if len(own) else float("nan")
        best = timed.iloc[0] if len(timed) else None
        rows.append(
            dict(zip(HOPPER_SHAPE, shape, strict=True))
            | {
                "rule": mode or "-",
                "rule_us": rule_us,
                "fastest": "-" if best is None else f"{best['mode']}, prefetch {best['prefetch']}",
                "fastest_us": float("nan") if best is None else best["latency_us_p50"],
                "without_prefetch": times.get("off", float("nan")) / times.get("on", float("nan")),
            }
        )
    table = pd.DataFrame(rows)
    return table.assign(loss=table["rule_us"] / table["fastest_us"])


def hopper_markdown(tune: pd.DataFrame) -> str:
    """`figures/tuning_hopper.md`: the rule's choice at each shape beside the fastest way to divide the work."""
    rows = [
        {
            "batch": str(row.batch_size),
            "context": str(row.context_len),
            "lengths": row.lengths,
            "heads": str(row.num_heads),
            "rule": row.rule,
            "rule, us": number(row.rule_us, 1),
            "fastest": row.fastest,
            "fastest, us": number(row.fastest_us, 1),
            "rule / fastest": number(row.loss, 2),
            "without / with prefetch": number(row.without_prefetch, 2),
        }
        for row in hopper_table(tune).itertuples()
    ]
    return (
        f"# How the Hopper kernel divides its work\n\n{tune['gpu'].iloc[0]}, {tune['date'].iloc[0]}, CUDA graph, cold "
        "L2. Made by `make figures`. The rule of the work plan chooses one of three ways: whole requests, each request "
        "in equal runs, even shares of all work. Each was forced, with and without L2 prefetch; `rule` is what the "
        "kernel does by itself, `without / with prefetch` a ratio of times in the rule's mode. Equal runs are left out "
        f"where a request has only one.\n\n{markdown(rows)}\n"
    )
