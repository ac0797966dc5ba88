"""Data files: rows appended to a CSV, the run recorded in the JSON sidecar of the same stem."""

import csv
import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import torch

from mla.measure import provenance
from mla.measure.implementations import IMPLEMENTATIONS

_LOCKS = []


def output_path(given: Path, kind: str) -> Path:
    """The file itself if `given` ends in .csv, else `<given>/<kind>_<gpu>_<date>.csv` for this machine and day."""
    if given.suffix == ".csv":
        return given
    gpu = provenance.gpu_name(torch.cuda.get_device_name())
    return given / f"{kind}_{gpu}_{provenance.utc_now()[:10]}.csv"


def start_run(path: Path, command: list[str], seed: int) -> str:
    """Add this run to the sidecar, written anew if it is the first; returns the run's id.

    Raises:
        ValueError: another process is writing the same file.
    """
    sidecar = path.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_suffix(".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(f"{path}: expected to be the only run that writes it, got another one at work") from error
    # held, and thus locked, until this process ends
    _LOCKS.append(lock)
    content = (
        json.loads(sidecar.read_text()) if sidecar.exists() else {**provenance.machine(), "seed": seed, "runs": []}
    )
    run_id = f"{path.stem}-{len(content['runs']) + 1}"
    content["runs"].append(
        {
            "run_id": run_id,
            "command": " ".join(["triton-mla-bench", *command]),
            **provenance.source_state(),
            "date_utc": provenance.utc_now(),
            "clocks": provenance.clocks(),
            "peers": {name: i.version() for name, i in IMPLEMENTATIONS.items() if i.version()},
        }
    )
    sidecar.write_text(json.dumps(content, indent=2) + "\n")
    return run_id


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, none where it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def set_aside(path: Path, columns: list[str], is_replaced: Callable[[dict[str, str]], bool]) -> None:
    """Move rows that were measured again to `<stem>.replaced.csv`; the others stay as they are."""
    rows = read_rows(path)
    replaced = [row for row in rows if is_replaced(row)]
    if not replaced:
        return
    append_rows(path.with_suffix(".replaced.csv"), columns, replaced)
    kept = path.with_suffix(".kept.csv")
    kept.unlink(missing_ok=True)
    append_rows(kept, columns, [row for row in rows if not is_replaced(row)])
    kept.replace(path)


def check_columns(path: Path, columns: list[str]) -> None:
    """ValueError where a file has other columns, as one of another version of this package has."""
    if not path.exists():
        return
    with path.open(newline="") as file:
        header = next(csv.reader(file), [])
    if header != columns:
        differing = sorted(set(header) ^ set(columns)) or ["their order"]
        raise ValueError(
            f"{path}: expected the columns of this version, got a file that differs in {', '.join(differing)}; "
            f"name another file with --output"
        )


def append_rows(path: Path, columns: list[str], rows: list[dict[str, object]]) -> None:
    """Append rows; a new file gets its header first. A row with an unknown column is a ValueError."""
    check_columns(path, columns)
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
