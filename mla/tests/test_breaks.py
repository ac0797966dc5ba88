"""Each deliberate break of `breaks.py` makes a test fail, on a copy of the package (`make breaks`)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mla.tests.breaks import BREAKS
from mla.tests.kernel_cases import HAS_HOPPER

PACKAGE = Path(__file__).resolve().parents[1]
CAN_RUN = [name for name, b in BREAKS.items() if not b.needs or HAS_HOPPER]


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_still_fits_the_source(name):
    """Its old text occurs once, and the tests that it names exist."""
    b = BREAKS[name]
    assert (PACKAGE / b.file).read_text().count(b.old) == 1
    assert b.new != b.old
    for test in b.tests:
        path, _, function = test.partition("::")
        text = (PACKAGE / "tests" / path).read_text()
        assert f"def {function.partition('[')[0]}" in text if function else text


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "mla", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    return tmp_path


def _run(folder: Path, tests: list[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "200"]
    return subprocess.run(
        [*command, *(f"mla/tests/{test}" for test in tests)], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


@pytest.fixture
def on_demand(request):
    if not request.config.getoption("--run-breaks"):
        pytest.skip("minutes; run on demand: make breaks")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_unbroken_copies_pass(on_demand, copy):
    done = _run(copy, sorted({test for name in CAN_RUN for test in BREAKS[name].tests}))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_found(on_demand, name, copy):
    b = BREAKS[name]
    if name not in CAN_RUN:
        pytest.skip("needs a Hopper GPU")
    path = copy / "mla" / b.file
    path.write_text(path.read_text().replace(b.old, b.new))
    done = _run(copy, list(b.tests))
    # tests ran and some failed, or one led a kernel so far out of its memory that a signal ended the process; that
    # nothing could be run at all would be no proof
    assert done.returncode == 1 or done.returncode < 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.returncode < 0 or re.search(r"\d+ failed", done.stdout), done.stdout[-3000:]
