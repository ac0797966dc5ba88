"""Links and paths in README and the other documents lead somewhere; nothing names a machine's paths."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [p for p in ROOT.glob("**/*.md") if ".venv" not in p.parts and "build" not in p.parts]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_exist(document):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    for link in links:
        if not re.match(r"https?://", link):
            assert (document.parent / link).exists(), link


def test_readmes_paths_exist():
    """`path/like/this` and `mla.module` in README."""
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"`((?:mla|data|figures|notebooks)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"`(mla(?:\.[a-z_]+)+)`", text):
        parts = module.split(".")
        assert (
            any((ROOT / "/".join(parts[:n])).with_suffix(".py").exists() for n in (len(parts), len(parts) - 1))
            or (ROOT / "/".join(parts)).is_dir()
        ), module


def test_readmes_python_runs():
    """The example in README, run as it stands on a machine without a GPU."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("README's example is run on the interpreter here; on a GPU the GPU tests cover the call")
    text = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    import sys

    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_tracked_files_hold_no_machine_paths():
    folders = ("work", "tmp", "root", "home", "opt")
    pattern = f"(^|[^a-zA-Z0-9_.])/({'|'.join(folders)})/[a-z]"
    done = subprocess.run(
        ["git", "grep", "-nIE", pattern, "--", ".", ":!mla/tests/test_documents.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1, done.stdout
