"""Execute notebooks in place: `python -m mla.report.notebooks FOLDER`."""

import sys
from pathlib import Path

CELL_TIMEOUT_S = 120


def execute(path: Path) -> None:
    """Run one notebook from top to bottom and write it back with its outputs, without timing metadata.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, record_timing=False)
    client.execute(cwd=str(path.parent))
    nbformat.write(notebook, path)


def main(folder: Path) -> None:
    paths = sorted(folder.glob("*.ipynb"))
    for path in paths:
        execute(path)
        print(f"executed {path}")
    if not paths:
        print(f"no notebooks in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
