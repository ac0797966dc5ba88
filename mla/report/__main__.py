"""Redraw every figure and table from the data: `python -m mla.report`."""

import argparse
import sys
from pathlib import Path

import matplotlib
import pandas as pd

from mla.report import claims_tables, data, figures, readme, studies, study_tables, tables, tuning_tables
from mla.report.claims import claims
from mla.report.first_call import first_call_sentence
from mla.report.intermediates import intermediates_markdown
from mla.report.opponents import opponents_markdown
from mla.report.prefill import prefill_markdown
from mla.report.projection import FROM, projection, projection_figure
from mla.report.runs import runs_markdown

# --data and --output where they are not given; a README is only ours to rewrite beside them.
DEFAULT_FOLDERS = (Path("data"), Path("figures"))


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, write all files, print one line a file; a known error is one line and status 1."""
    options = parse(arguments)
    # No window system is needed, nor its fonts.
    matplotlib.use("Agg")
    try:
        if options.list:
            for file in data.list_files(options.data):
                print(f"{file.kind} {file.gpu} {file.date} {file.path}")
            return 0
        for path in redraw(options.data, options.output, options.readme, options.gpu):
            print(f"wrote {path}")
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, with the README decided: only the default GPU's results go there."""
    parser = argparse.ArgumentParser(prog="python -m mla.report", description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=DEFAULT_FOLDERS[0], help="folder of the measured data (default: data)"
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_FOLDERS[1], help="folder to write to (default: figures)")
    parser.add_argument(
        "--readme", type=Path, help="file whose blocks are replaced (default: README.md, with the default folders)"
    )
    parser.add_argument(
        "--gpu",
        default=data.DEFAULT_GPU,
        help=f"GPU whose newest data is drawn (default: {data.DEFAULT_GPU}); another one goes to OUTPUT/GPU",
    )
    parser.add_argument("--list", action="store_true", help="list the data files and stop")
    options = parser.parse_args(arguments)
    if options.gpu != data.DEFAULT_GPU:
        if options.readme is not None:
            parser.error(f"expected --readme only with --gpu {data.DEFAULT_GPU}, got {options.gpu}; drop one of them")
        options.output = options.output / options.gpu
    elif options.readme is None and Path("README.md").is_file() and (options.data, options.output) == DEFAULT_FOLDERS:
        options.readme = Path("README.md")
    return options


def redraw(data_dir: Path, output: Path, readme_path: Path | None, gpu: str) -> list[Path]:
    """Write all figures and tables of one GPU's newest data, and the README's blocks; returns the paths written."""
    frame, tune = data.load(data_dir, gpu), data.load_tune(data_dir, gpu)
    hopper_tune, first_call = data.load_tune(data_dir, gpu, kernel="hopper"), first_call_sentence(data_dir, gpu)
    measured = {kind: data.load_study(data_dir, kind, gpu) for kind in data.STUDIES}
    pipeline, intermediates = measured["pipeline"], measured["intermediates"]
    published = data.load_published(data_dir)
    table = claims(frame, published, tune, pipeline)
    readmes = {}
    if readme_path is not None:
        # A README without its markers is found before anything is written.
        readmes = updated_readmes(readme_path, data_dir, frame, published, table, output, first_call)
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in draw(frame, published, tune, pipeline, intermediates).items():
        paths += figures.save(figure, output, name)
    made = texts(frame, table, tune, hopper_tune, first_call) | study_texts(measured, published)
    paths += [write(output / name, text) for name, text in made.items()]
    return paths + [write(path, text) for path, text in readmes.items()]


def updated_readmes(
    path: Path,
    data_dir: Path,
    frame: pd.DataFrame,
    published: pd.DataFrame,
    table: pd.DataFrame,
    output: Path,
    first_call: str,
) -> dict[Path, str]:
    """The README's text, and the data dictionary's where there is one, with their blocks replaced.

    Args:
        table: what `claims` returns.
        first_call: what `first_call_sentence` returns.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected the file {path}, got none; create it with its markers or drop --readme")
    blocks = {
        "headline": tables.headline(frame, published),
        "results": tables.summary_markdown(frame, first_call),
        "claims": claims_tables.claims_short(table, frame, f"{output.as_posix()}/claims.md"),
    }
    texts = {path: readme.replace_blocks(path.read_text(encoding="utf-8"), blocks)}
    if (dictionary := data_dir / "README.md").is_file():
        notes = {"notes": data.notes_markdown(data_dir)}
        texts[dictionary] = readme.replace_blocks(dictionary.read_text(encoding="utf-8"), notes)
    return texts


def draw(
    frame: pd.DataFrame,
    published: pd.DataFrame,
    tune: pd.DataFrame | None,
    pipeline: pd.DataFrame | None = None,
    intermediates: pd.DataFrame | None = None,
) -> dict[str, figures.Figure]:
    """All figures by file name; tuning, heads, staircase, pipeline and projection only where they were measured."""
    drawn = {
        "speedup": figures.speedup(frame, published=published),
        "tflops": figures.tflops(frame),
        "roofline": figures.roofline(frame, published),
    }
    if tune is not None:
        drawn["tuning"] = figures.tuning(tune)
    if not studies.heads(frame).empty:
        drawn["heads"] = figures.heads(frame)
    if not studies.staircase(frame).empty:
        drawn["staircase"] = figures.staircase(frame)
    if pipeline is not None:
        drawn["pipeline"] = figures.pipeline(pipeline)
    is_h200 = frame["gpu"].iloc[0] == FROM
    if intermediates is not None and is_h200 and not projection(frame, intermediates, published).empty:
        drawn["projection"] = projection_figure(frame, intermediates, published)
    return drawn


def texts(
    frame: pd.DataFrame,
    table: pd.DataFrame,
    tune: pd.DataFrame | None,
    hopper_tune: pd.DataFrame | None,
    first_call: str,
) -> dict[str, str]:
    """All tables by file name; those of sweeps and studies only where they were measured.

    Args:
        table: what `claims` returns.
        tune, hopper_tune: what `data.load_tune` returns for either kernel.
        first_call: what `first_call_sentence` returns.
    """
    made = {
        "results.md": tables.results_markdown(frame, first_call),
        "results.csv": tables.results(frame).to_csv(index=False, lineterminator="\n"),
        "results.tex": tables.summary_latex(frame),
        "claims.md": claims_tables.claims_markdown(table, frame),
        "studies.md": study_tables.studies_markdown(frame),
        "tuning.md": None if tune is None else tuning_tables.tuning_markdown(tune),
        "tuning_hopper.md": None if hopper_tune is None else tuning_tables.hopper_markdown(hopper_tune),
    }
    return {name: text for name, text in made.items() if text is not None}


def study_texts(measured: dict[str, pd.DataFrame | None], published: pd.DataFrame) -> dict[str, str]:
    """The tables of the studies with files of their own, by file name; of those that were measured.

    Args:
        measured: kind -> what `data.load_study` returns.
        published: what `data.load_published` returns.
    """
    makers = {
        "opponents": lambda frame: opponents_markdown(frame, published),
        "intermediates": intermediates_markdown,
        "prefill": prefill_markdown,
        "runs": runs_markdown,
    }
    return {f"{kind}.md": make(measured[kind]) for kind, make in makers.items() if measured[kind] is not None}


def write(path: Path, text: str) -> Path:
    """Write a text with line feeds on every system."""
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
