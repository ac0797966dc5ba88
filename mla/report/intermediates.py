"""What one decode call launches and leaves between its kernels, as tables."""

import pandas as pd

from mla.report.compare import OPPONENTS, shape_name
from mla.report.studies import total_tokens
from mla.report.style import LOOKS
from mla.report.text import markdown, number

CALL = ["implementation", "batch_size", "context_len"]
# Two products with a softmax between: the second reads as values what the first has read as keys.
TWO_PRODUCTS = ("absorbed", *OPPONENTS)
# of a cached token: 512 numbers of 16 bits
VALUE_BYTES = 2 * 512


def calls(frame: pd.DataFrame) -> pd.DataFrame:
    """One row an implementation and shape.

    Args:
        frame: what `data.load_study` returns for `intermediates`.

    Returns:
        Indexed by implementation, batch_size, context_len: `kernels` (launched by a call, fills among them),
        `plan_kernels` (by its plan, made once a decode step), `gpu_us` (of the call's kernels together), `extra_bytes`
        (allocated beside the output, and scratch that is written), `inductor_written_bytes` (NaN where nothing is
        compiled), `between_bytes` (written beside the output: by the compiler's account where there is one, which
        counts a buffer as often as it is written, else `extra_bytes`), `total_bytes` (what a call moves: the least that
        it must, what it writes between its kernels once written and once read, and the values once more where a second
        product reads them), `bytes_moved` (the least) and `flops`.

    The compiler's account of what is read is not used: of an operand of a product it counts at most 1e9 numbers (a
    library's product) or as many as the product has results (a generated one), so it misses most of the cache.
    """
    rows = frame[frame["usable"]]
    is_call = rows["step"] == "call"
    groups, columns = rows[is_call].groupby(CALL, sort=False), ["allocated_bytes", "output_bytes", "scratch_bytes"]
    columns += ["num_heads", "inductor_written_bytes", "bytes_moved", "flops"]
    table = groups[columns].first().assign(kernels=groups.size(), gpu_us=groups["latency_us_p50"].sum())
    plans = rows[~is_call].groupby(CALL).size().reindex(table.index, fill_value=0)
    extra = table["allocated_bytes"] - table["output_bytes"] + table["scratch_bytes"]
    written = table["inductor_written_bytes"]
    between = (written - table["output_bytes"]).fillna(extra)
    reads_twice = table.index.get_level_values("implementation").isin(TWO_PRODUCTS)
    values = (total_tokens(table) * VALUE_BYTES).where(reads_twice, 0)
    total = table["bytes_moved"] + 2 * between + values
    return table.drop(columns=columns[:4]).assign(
        plan_kernels=plans, extra_bytes=extra, between_bytes=between, total_bytes=total
    )


def intermediates_markdown(frame: pd.DataFrame) -> str:
    """`figures/intermediates.md`: a line a call, then its kernels."""
    table = calls(frame)
    cells = [
        {
            "implementation": f"`{name}`",
            "shape": shape_name(batch_size, context_len),
            "kernels": str(row.kernels),
            "of the plan": str(row.plan_kernels),
            "GPU time, us": number(row.gpu_us, 1),
            "left between kernels, MB": number(row.extra_bytes / 1e6, 1),
            "written between, MB": number(row.between_bytes / 1e6, 1),
            "moved, MB": number(row.total_bytes / 1e6, 1),
            "the least, MB": number(row.bytes_moved / 1e6, 1),
        }
        for (name, batch_size, context_len), row in zip(table.index, table.itertuples(), strict=True)
    ]
    sections = []
    for (name, batch_size, context_len), rows in frame[frame["usable"]].groupby(CALL, sort=False):
        kernels = [
            {
                "step": row.step,
                "kernel": f"`{short_name(row.kernel_name)}`",
                "grid": row.grid if isinstance(row.grid, str) else "-",
                "GPU time, us": number(row.latency_us_p50, 1),
            }
            for row in rows.itertuples()
        ]
        sections.append(f"## {LOOKS[name].label}, {shape_name(batch_size, context_len)}\n\n{markdown(kernels)}\n")
    failed = frame[~frame["usable"]]
    without = [
        f"`{r.implementation}` at {shape_name(r.batch_size, r.context_len)}: {r.status}" for r in failed.itertuples()
    ]
    citable = "All rows are citable." if frame["citable"].all() else "Not citable: made from uncommitted code."
    return (
        f"# Kernels and bytes of one call\n\n{frame['gpu'].iloc[0]}, {frame['date'].iloc[0]}, 128 heads, bf16, by "
        "torch's profiler. Made by `make figures`. Left between kernels: what a call allocates beside its output, and "
        "writes of scratch that was there before; memory that is used twice counts once. Written between: the same, "
        "where torch.compile's compiler says that a kernel writes it, as often as it does. Moved: the least, what is "
        "written between once written and once read, and the cache once more, as values, where the two products are "
        "kernels of their own. These are counts; hardware counters were not read. The least: each cached row and query "
        "once, the output once. "
        f"{citable}\n\n{markdown(cells)}\n\n"
        + "\n".join(sections)
        + (f"\nWithout a result: {'; '.join(without)}.\n" if without else "")
    )


def short_name(kernel: str) -> str:
    """The name of a kernel without template arguments and return type, at most 60 characters."""
    name = kernel.split("<")[0].split("(")[0].removeprefix("void ").strip() or kernel
    return name if len(name) <= 60 else f"{name[:57]}..."
