"""Execute notebooks in place, or compare them with a fresh run: `python -m mla.report.notebooks FOLDER [--check]`."""

import argparse
import difflib
import sys
from pathlib import Path

CELL_TIMEOUT_S = 120


def execute(path: Path):
    """Run one notebook from top to bottom, in its own folder.

    Returns:
        The notebook with fresh outputs, and with metadata that do not depend on the machine; not written.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=CELL_TIMEOUT_S, record_timing=False, coalesce_streams=True).execute(
        cwd=str(path.parent)
    )
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02}"
        cell.metadata = {}
    return notebook


def text_outputs(notebook) -> list[str]:
    """The text of every output, in order: what is printed and the plain form of what is shown."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            texts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return texts


def differences(path: Path) -> str:
    """How a fresh run's text outputs differ from the committed ones; empty if they do not."""
    import nbformat

    committed, fresh = (text_outputs(n) for n in (nbformat.read(path, as_version=4), execute(path)))
    lines = ("\n".join(texts).splitlines() for texts in (committed, fresh))
    return "\n".join(difflib.unified_diff(*lines, "committed", "fresh", lineterm=""))


def main(arguments: list[str] | None = None) -> int:
    """Write fresh outputs, or with --check only compare; returns the exit code."""
    import nbformat

    parser = argparse.ArgumentParser(prog="python -m mla.report.notebooks", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with a fresh run and write nothing")
    options = parser.parse_args(arguments)
    paths = sorted(options.folder.glob("*.ipynb"))
    if not paths:
        print(f"no notebooks in {options.folder}")
    failed = False
    for path in paths:
        if options.check:
            found = differences(path)
            failed |= bool(found)
            print(found or f"{path} is up to date")
        else:
            nbformat.write(execute(path), path)
            print(f"executed {path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
