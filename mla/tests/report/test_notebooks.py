"""The notebooks: their form, and that a fresh run prints what is committed."""

import json
import re
from pathlib import Path

import pytest

from mla.report.display import show, show_source, show_text
from mla.report.notebooks import differences

nbformat = pytest.importorskip("nbformat", reason="the notebooks extra is not installed")
ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
IDS = [path.stem for path in NOTEBOOKS]


def _write(path, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_a_fresh_run_prints_the_same(path):
    assert differences(path) == ""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_form(path):
    cells = json.loads(path.read_text())["cells"]
    code = [c for c in cells if c["cell_type"] == "code"]
    sources = ["".join(c["source"]) for c in code]
    outputs = [o for c in code for o in c["outputs"]]
    assert 25 <= len(cells) <= 40
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    assert max(s.count("\n") + 1 for s in sources) <= 25
    for source in sources:
        assert not re.search(
            r"^\s*[%!]|sys\.path|@triton\.jit|@gluon\.jit|(?<![\w.])/(home|root|work|tmp)/", source, re.M
        )
    assert any("mla" in s for s in sources)
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert path.stat().st_size < 400_000


def test_a_changed_output_is_found(tmp_path):
    path = tmp_path / "one.ipynb"
    _write(path, "print(1)")
    assert "+1" in differences(path)


def test_source_and_figures_have_a_text_form():
    from matplotlib.figure import Figure

    assert repr(show_source(_write)).startswith("def _write(path, *sources):")
    bundle, metadata = show(Figure(figsize=(1, 1)), "nothing drawn")._repr_mimebundle_()
    assert bundle["text/plain"] == "Figure: nothing drawn"
    assert metadata["image/png"]["alt"] == "nothing drawn"
    table = show_text("| a |\n|---|\n| 1 |")
    assert repr(table) == table._repr_markdown_() == "| a |\n|---|\n| 1 |"
