"""Where a measurement comes from: the machine, the versions, the commit."""

import datetime
import hashlib
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_SMI_FIELDS = ("driver_version", "power.limit", "clocks.max.sm", "clocks.sm", "clocks.mem", "temperature.gpu")


def _output_of(*command: str, folder: Path | None = None) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def source_digest() -> str:
    """SHA-256 over what is measured: the package's Python files without its report and tests, by name and content."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] not in ("report", "tests"):
            digest.update(name.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def source_state() -> dict[str, object]:
    """Commit, dirty flag and digest of the measured source.

    A copy whose history is missing or older takes the commit from MLA_COMMIT and is clean if its digest is
    MLA_SOURCE_SHA256, the one that `python -m mla.measure.provenance` printed in the checkout; without it the dirty
    flag is None.
    """
    package, digest = Path(__file__).resolve().parents[1], source_digest()
    if commit := os.environ.get("MLA_COMMIT"):
        expected = os.environ.get("MLA_SOURCE_SHA256")
        return {"commit": commit, "dirty": None if expected is None else digest != expected, "source_sha256": digest}
    commit = _output_of("git", "rev-parse", "HEAD", folder=package)
    status = _output_of("git", "status", "--porcelain", "--", ".", ":!report", ":!tests", folder=package)
    return {"commit": commit, "dirty": None if commit is None else status != "", "source_sha256": digest}


def gpu_name(device_name: str) -> str:
    """The short name that data files carry: "NVIDIA H200" -> "h200", "NVIDIA H100 80GB HBM3" -> "h100"."""
    model = re.sub(r"^(nvidia|amd)\s+(geforce\s+|instinct\s+)?", "", device_name.lower())
    return re.sub(r"[^a-z0-9]+", "-", re.split(r"\s+\d+gb|\s+hbm|\s+pcie|\s+sxm", model)[0]).strip("-")


def machine() -> dict[str, object]:
    """GPU, driver and versions; no host or user names."""
    smi = _query_gpu(_SMI_FIELDS)
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": smi.get("driver_version"),
        "cuda": torch.version.cuda,
        "power_limit_w": smi.get("power.limit"),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "numpy", "transformers")},
    }


def clocks() -> dict[str, object]:
    """Clocks in MHz and temperature in degrees Celsius, as found now."""
    return _query_gpu(_SMI_FIELDS[2:])


def _query_gpu(fields: tuple[str, ...]) -> dict[str, str]:
    """What nvidia-smi says of torch's current GPU; empty where it is not there."""
    gpu = f"GPU-{torch.cuda.get_device_properties('cuda').uuid}" if torch.cuda.is_available() else "0"
    answer = _output_of("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", gpu)
    return dict(zip(fields, answer.split(", "), strict=True)) if answer else {}


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    state = source_state()
    if state["dirty"] is not False:
        raise SystemExit("expected a clean checkout with history; commit first")
    print(f"MLA_COMMIT={state['commit']} MLA_SOURCE_SHA256={state['source_sha256']}")
