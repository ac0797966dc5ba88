"""Where a measurement comes from: the machine, the versions, the commit."""

import datetime
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

# What is measured; an unfinished data file beside it does not make a measurement less citable.
_MEASURED_PATHS = ("mla", "pyproject.toml", "Makefile", ":!mla/report", ":!mla/tests")
_SMI_FIELDS = ("driver_version", "power.limit", "clocks.max.sm", "clocks.sm", "clocks.mem", "temperature.gpu")


def _output_of(*command: str, folder: Path | None = None) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def git_state() -> dict[str, object]:
    """Commit and dirty flag of the checkout that holds this file.

    Where the checkout has no history (a copy), MLA_COMMIT gives the commit and dirty is None: nothing vouches for it.
    """
    root = Path(__file__).resolve().parents[2]
    commit = _output_of("git", "-c", f"safe.directory={root}", "rev-parse", "HEAD", folder=root)
    if commit is None:
        return {"commit": os.environ.get("MLA_COMMIT"), "dirty": None}
    status = _output_of(
        "git", "-c", f"safe.directory={root}", "status", "--porcelain", "--", *_MEASURED_PATHS, folder=root
    )
    return {"commit": commit, "dirty": status != ""}


def gpu_name(device_name: str) -> str:
    """The short name that data files carry: "NVIDIA H200" -> "h200", "NVIDIA H100 80GB HBM3" -> "h100"."""
    model = re.sub(r"^(nvidia|amd)\s+(geforce\s+|instinct\s+)?", "", device_name.lower())
    return re.sub(r"[^a-z0-9]+", "-", re.split(r"\s+\d+gb|\s+hbm|\s+pcie|\s+sxm", model)[0]).strip("-")


def machine() -> dict[str, object]:
    """GPU, driver and versions; no host or user names."""
    query = _output_of("nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits", "-i", "0")
    smi = dict(zip(_SMI_FIELDS, (query or "").split(", "), strict=False)) if query else {}
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": smi.get("driver_version"),
        "cuda": torch.version.cuda,
        "power_limit_w": smi.get("power.limit"),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "numpy")},
    }


def clocks() -> dict[str, object]:
    """Clocks in MHz and temperature in degrees Celsius, as found now."""
    fields = _SMI_FIELDS[2:]
    query = _output_of("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", "0")
    return dict(zip(fields, query.split(", "), strict=True)) if query else {}


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
