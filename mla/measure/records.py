"""Data files: rows appended to a CSV, the run recorded in the JSON sidecar of the same stem."""

import csv
import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Alone while a file and its sidecar are changed: runs on several GPUs write to the same one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".change.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _hold(path: Path, part: str) -> None:
    """Keep others from writing a file until this process ends: all, or where `part` is given, the same part."""

    def lock(suffix: str, kind: int) -> None:
        file = path.with_suffix(suffix).open("w")
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{path}: expected to be the only run that writes it, got another one at work") from error
        _LOCKS.append(file)

    path.parent.mkdir(parents=True, exist_ok=True)
    lock(".lock", fcntl.LOCK_SH if part else fcntl.LOCK_EX)
    if part:
        lock(f".{part.replace('/', '-of-')}.lock", fcntl.LOCK_EX)


def start_run(path: Path, command: list[str], seed: int, part: str = "") -> str:
    """Add this run to the sidecar, written anew if it is the first; returns the run's id.

    Args:
        path: the CSV file.
        command: arguments of triton-mla-bench.
        seed: of the inputs.
        part: "I/N" where N runs share the cases, "" for a run alone.

    Raises:
        ValueError: another process is writing the same file, or the same part of it.
    """
    _hold(path, part)
    with _changing(path):
        return _add_run(path.with_suffix(".json"), command, seed)


def _add_run(sidecar: Path, command: list[str], seed: int) -> str:
    content = (
        json.loads(sidecar.read_text()) if sidecar.exists() else {**provenance.machine(), "seed": seed, "runs": []}
    )
    run_id = f"{sidecar.stem}-{len(content['runs']) + 1}"
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
    with _changing(path):
        rows = read_rows(path)
        replaced = [row for row in rows if is_replaced(row)]
        if not replaced:
            return
        _append(path.with_suffix(".replaced.csv"), columns, replaced)
        kept = path.with_suffix(".kept.csv")
        kept.unlink(missing_ok=True)
        _append(kept, columns, [row for row in rows if not is_replaced(row)])
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
    with _changing(path):
        _append(path, columns, rows)


def _append(path: Path, columns: list[str], rows: list[dict[str, object]]) -> None:
    check_columns(path, columns)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
