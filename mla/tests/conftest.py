"""Shared by all tests: the device (a GPU if there is one, else the interpreter), and the record of a run."""

import json
import time
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--record", type=Path, help="folder for a summary of the run with the machine's facts")
    parser.addoption("--run-breaks", action="store_true", help="break the package on purpose, in copies (minutes)")


def pytest_configure(config):
    config.stash[_BEGIN] = time.monotonic()


_BEGIN = pytest.StashKey[float]()


def pytest_collection_modifyitems(config, items):
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    folder = config.getoption("--record")
    if folder is None:
        return
    from mla.measure import provenance, records

    outcomes = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
    skipped = sorted({report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())})
    record = {
        **provenance.machine(),
        "command": "pytest " + " ".join(config.invocation_params.args),
        **provenance.source_state(),
        "date_utc": provenance.utc_now(),
        "exit_status": int(exitstatus),
        **outcomes,
        "reasons_for_skipping": skipped,
        "seconds": round(time.monotonic() - config.stash[_BEGIN], 1),
    }
    path = records.output_path(folder, "tests").with_suffix(".json")
    path.write_text(json.dumps(record, indent=2) + "\n")


@pytest.fixture(scope="session")
def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def kernel_dtypes() -> list:
    """Float dtypes that kernels can be tested with here: the interpreter cannot multiply bf16."""
    import torch

    return [torch.float16, torch.float32] + ([torch.bfloat16] if torch.cuda.is_available() else [])


def dtype_id(dtype) -> str:
    return {"float16": "fp16", "float32": "fp32", "float64": "fp64", "bfloat16": "bf16"}[str(dtype).split(".")[1]]
