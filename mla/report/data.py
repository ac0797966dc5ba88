"""Load the measured data: pick a file, check its schema, derive the columns that figures and tables share."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from mla.report.schema import ALLOWED, DEFAULT_PAGE_SIZE, OF_KIND, PUBLISHED_COLUMNS, read_checked
from mla.schema import (
    DECODE_COLUMNS,
    INTERMEDIATE_COLUMNS,
    OPPONENT_COLUMNS,
    PIPELINE_COLUMNS,
    PREFILL_COLUMNS,
    RUN_COLUMNS,
    TUNE_COLUMNS,
)

DEFAULT_GPU = "h200"
# Studies of their own, and the columns of their files.
STUDIES = {
    "pipeline": PIPELINE_COLUMNS,
    "opponents": OPPONENT_COLUMNS,
    "intermediates": INTERMEDIATE_COLUMNS,
    "prefill": PREFILL_COLUMNS,
    "runs": RUN_COLUMNS,
}


class DataFile(NamedTuple):
    """One measured file: what it holds (such as `decode`), its GPU, its date and its path.

    A date is YYYY-MM-DD, with a letter where a file was begun beside an earlier one of that day.
    """

    kind: str
    gpu: str
    date: str
    path: Path


def list_files(directory: str | Path) -> list[DataFile]:
    """All measured files of a directory, sorted by kind, GPU and date."""
    if not Path(directory).is_dir():
        raise FileNotFoundError(f"expected a data directory, got {directory}; give one with --data")
    kinds = "|".join(("decode", "tune", *STUDIES))
    pattern = re.compile(rf"({kinds})_([a-z0-9-]+)_(\d{{4}}-\d{{2}}-\d{{2}}[a-z]?)\.csv")
    matches = [(pattern.fullmatch(path.name), path) for path in Path(directory).iterdir()]
    return sorted(DataFile(*match.groups(), path) for match, path in matches if match)


def find_file(directory: str | Path, kind: str, gpu: str, date: str | None = None) -> DataFile | None:
    """The file of one kind and GPU at `date`, or the newest; None if there is none."""
    files = [file for file in list_files(directory) if file.kind == kind and file.gpu == gpu]
    files = [file for file in files if date in (None, file.date)]
    return files[-1] if files else None


def load(directory: str | Path, gpu: str = DEFAULT_GPU, date: str | None = None) -> pd.DataFrame:
    """Load the decode measurements of one GPU, checked and with the derived columns.

    Args:
        directory: folder that holds `decode_<gpu>_<date>.csv` and its JSON sidecar.
        gpu: short name, as in the file name.
        date: YYYY-MM-DD; default the newest.

    Returns:
        The columns of the file and: `gpu` (full name), `date`, `row_id`, `usable` (ok and correct), `tflops`, `gbps`
        (both empty where not usable), `share_of_matmul`, `share_of_read` (of the ceilings of the same rounds),
        `intensity` (FLOP/byte), `citable` (the commit of the run was clean) and `notes` (the sidecar's, or empty).

    Raises:
        FileNotFoundError: no such file, or no sidecar.
        ValueError: the file breaks the schema.
    """
    file = find_file(directory, "decode", gpu, date)
    if file is None:
        known = ", ".join(f"{f.gpu} {f.date}" for f in list_files(directory) if f.kind == "decode") or "none"
        raise FileNotFoundError(
            f"expected decode_{gpu}_{date or '<date>'}.csv in {directory}, got {known}; "
            "choose one of these with --gpu, or measure one with `make measure`"
        )
    frame = read_checked(file.path, DECODE_COLUMNS)
    sidecar = load_sidecar(file.path)
    frame = frame.assign(
        gpu=sidecar["gpu"],
        date=file.date,
        citable=frame["run_id"].isin(_clean_runs(sidecar)),
        notes=sidecar.get("notes", ""),
    )
    return derive(frame, f"{file.gpu}-{file.date}")


def notes_markdown(directory: str | Path) -> str:
    """The notes block of data/README.md: a line for each file whose sidecar has notes."""
    noted = {file.path.name: load_sidecar(file.path).get("notes") for file in list_files(directory)}
    lines = [f"- `{name}`. Note: {notes}" for name, notes in noted.items() if notes]
    return "\n".join(lines) or "No file has notes."


def load_sidecar(path: str | Path) -> dict:
    """The provenance beside a data file: GPU, versions, runs."""
    path = Path(path).with_suffix(".json")
    if not path.is_file():
        raise FileNotFoundError(f"expected the provenance {path}, got no such file; `make measure` writes both")
    sidecar = json.loads(path.read_text(encoding="utf-8"))
    if missing := [key for key in ("gpu", "runs") if key not in sidecar]:
        raise ValueError(f"expected the keys gpu, runs in {path.name}, got no {', '.join(missing)}; measure again")
    return sidecar


def load_tune(
    directory: str | Path, gpu: str = DEFAULT_GPU, date: str | None = None, kernel: str = "portable"
) -> pd.DataFrame | None:
    """The newest sweep of one kernel on one GPU, or None where none was made.

    Args:
        directory, gpu, date: as in `load`.
        kernel: `portable` (its configurations) or `hopper` (the ways to divide its work).
    """
    files = [file for file in list_files(directory) if (file.kind, file.gpu) == ("tune", gpu)]
    for file in reversed([file for file in files if date in (None, file.date)]):
        frame = read_checked(file.path, TUNE_COLUMNS)
        frame = frame[frame["kernel"] == kernel].reset_index(drop=True)
        if frame.empty:
            continue
        # numbers that the other kernel's rows lack were read as fractions
        whole = ["block_h", "block_n", "num_warps", "num_stages"] if kernel == "portable" else []
        frame = frame.astype(dict.fromkeys(whole, int))
        return frame.assign(gpu=load_sidecar(file.path)["gpu"], date=file.date, usable=frame["status"] == "ok")
    return None


def load_study(
    directory: str | Path, kind: str, gpu: str = DEFAULT_GPU, date: str | None = None
) -> pd.DataFrame | None:
    """The newest file of a study on one GPU, or None where none was made.

    Args:
        directory, gpu, date: as in `load`.
        kind: a key of `STUDIES`.

    Returns:
        The columns of the file and `gpu` (full name), `date`, `usable` (ok) and `citable`.
    """
    file = find_file(directory, kind, gpu, date)
    if file is None:
        return None
    frame = read_checked(file.path, STUDIES[kind], {**ALLOWED, **OF_KIND.get(kind, {})})
    sidecar = load_sidecar(file.path)
    return frame.assign(
        gpu=sidecar["gpu"],
        date=file.date,
        usable=frame["status"] == "ok",
        citable=frame["run_id"].isin(_clean_runs(sidecar)),
    )


def _clean_runs(sidecar: dict) -> set[str]:
    """A run that does not say that its tree was clean is not citable."""
    return {run.get("run_id") for run in sidecar["runs"] if run.get("dirty") is False}


def load_published(directory: str | Path) -> pd.DataFrame:
    """Every figure that the sources state (`published.csv`), indexed by id."""
    path = Path(directory) / "published.csv"
    if not path.is_file():
        raise FileNotFoundError(f"expected {path}, got no such file; restore it with git")
    frame = read_checked(path, PUBLISHED_COLUMNS)
    if repeated := sorted(frame.loc[frame["id"].duplicated(), "id"]):
        raise ValueError(f"expected one row an id in {path.name}, got twice: {', '.join(repeated)}; rename one")
    return frame.set_index("id")


def derive(frame: pd.DataFrame, stem: str) -> pd.DataFrame:
    """Add the derived columns that `load` lists; `stem` opens every row id.

    Raises:
        ValueError: two rows have the same row id.
    """
    frame = frame.assign(row_id=[row_id(row, stem) for row in frame.itertuples()])
    if repeated := sorted(set(frame.loc[frame["row_id"].duplicated(), "row_id"])):
        raise ValueError(f"expected one measurement a row id, got {len(repeated)} twice, as {repeated[0]}; drop one")
    usable = (frame["status"] == "ok") & (frame["passed"].astype(str) == "True")
    latency_us = frame["latency_us_p50"].where(usable)
    tflops = frame["flops"] / latency_us / 1e6
    gbps = frame["bytes_moved"] / latency_us / 1e3
    return frame.assign(
        usable=usable,
        tflops=tflops,
        gbps=gbps,
        share_of_matmul=tflops / frame["matmul_tflops"],
        share_of_read=gbps / frame["read_gbps"],
        intensity=frame["flops"] / frame["bytes_moved"],
    )


def row_id(row: NamedTuple, stem: str) -> str:
    """The name by which a citation finds a row, such as `h200-2026-11-29/portable/b128-n32768-h128/cuda_graph`.

    What is not the usual case (even lengths, one query token, bf16, pages of 64) is added to the shape:
    `-log-uniform`, `-q2`, `-fp16`, `-p16`.
    """
    shape = f"b{row.batch_size}-n{row.context_len}-h{row.num_heads}"
    shape += f"-{row.lengths}" if row.lengths != "even" else ""
    shape += f"-q{row.q_len}" if row.q_len != 1 else ""
    shape += f"-{row.dtype}" if row.dtype != "bf16" else ""
    shape += f"-p{row.page_size:.0f}" if pd.notna(row.page_size) and row.page_size != DEFAULT_PAGE_SIZE else ""
    return f"{stem}/{row.implementation}/{shape}/{row.timer}"
