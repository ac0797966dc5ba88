"""How every implementation looks, the alt texts, and how a figure is opened, captioned, labelled and saved."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mla.report.compare import tokens_name

STYLE_FILE = Path(__file__).with_name("mla.mplstyle")
GREY = "#777777"
DARK = "#333333"
LOSS = "#b03a00"
LOSING_REGION = "#f6ece6"
# Below the scale of an axis: what has no value on it.
STRIP_COLOUR = "#f0f0f0"
BLUE, ORANGE, GREEN, VERMILLION, PINK, BROWN, _, MID_GREY, _, SKY = sns.color_palette("colorblind").as_hex()
# Far from the others in lightness, so that it is told from them in any kind of colour blindness.
INDIGO = "#332288"
# Bars of the steps before the finished kernel are paler than its own.
ALPHA_OF_STEPS = 0.55
# What stays below this share of the measured matmul rate would be points at zero: it is named in the caption instead.
NEGLIGIBLE = 0.01


# A thin line from a label's left end to its point.
LEADER = {"arrowstyle": "-", "linewidth": 0.8, "shrinkA": 1, "relpos": (0, 0.5)}


class Look(NamedTuple):
    """Label, colour, marker and dash of one implementation, the same in every figure."""

    label: str
    colour: str
    marker: str
    dash: str


# Kin share a colour and differ in marker and dash, so that the figures also read without colour.
LOOKS = {
    "naive": Look("naive, eager", MID_GREY, "x", ":"),
    "absorbed": Look("absorbed, eager", MID_GREY, "s", "--"),
    "torch_compile": Look("torch.compile", VERMILLION, "^", "--"),
    "torch_compile_paged": Look("torch.compile, paged", ORANGE, "v", "--"),
    "online_softmax": Look("online softmax", SKY, "<", ":"),
    "split_kv": Look("split KV", INDIGO, ">", "--"),
    "portable": Look("portable (Triton)", GREEN, "s", "-"),
    "gluon_simple": Look("Gluon, simple", BLUE, "h", ":"),
    "gluon_warp_specialised": Look("Gluon, warp-specialised", BLUE, "p", "--"),
    "hopper_without_prefetch": Look("hopper without prefetch", BLUE, "<", "-."),
    "hopper_without_pdl": Look("hopper without PDL", BLUE, ">", "-."),
    "hopper": Look("hopper (Gluon)", BLUE, "o", "-"),
    "flashmla": Look("FlashMLA", PINK, "D", "-."),
    "flashinfer_fa3": Look("FlashInfer fa3", BROWN, "P", "-."),
    "flashinfer_fa2": Look("FlashInfer fa2", BROWN, "X", ":"),
}
OPPONENT_NAMES = {
    "torch_compile": "torch.compile on a contiguous cache",
    "torch_compile_paged": "torch.compile gathering a paged cache",
}

ALT = {
    "pipeline": (
        "Two panels over the context length from 1K to 128K, a line a model: MLA after the patch, MLA as transformers "
        "decodes it, and plain multi-head attention of like size. Left the time of a decode step in milliseconds on a "
        "logarithmic axis, with numbers under the patched model's points: how many times as fast it is as the other "
        "two. Right the peak memory while decoding in GiB. Contexts that ran out of memory are crosses at the top."
    ),
    "speedup": (
        "Speed-up at each of the sixteen shapes over torch.compile, in two rows: above on a contiguous cache, below "
        "on the gathered paged cache. Four panels a row for batch size 8, 32, 64 and 128; context length from 1K to "
        "32K across. A mark above the line at 1 is a win, one in the shaded region below it a loss; the numbers are "
        "written on the marks. A star is the article's best ratio; its loss, which has no value, is named in a strip "
        "below the scale."
    ),
    "tflops": (
        "Arithmetic rate of every implementation in TFLOPS over context length, in four panels for batch size 8, 32, "
        "64 and 128, below a grey line: the bf16 matmul rate measured in the same rounds. Shapes that ran out of "
        "memory are crosses below the axis; what stays below 1 % of the matmul rate is named in the caption instead."
    ),
    "roofline": (
        "Roofline with the read bandwidth and the matmul rate measured on this GPU as the roof, and each "
        "implementation at its largest shape a head count. A dotted line marks the ridge, where the two ceilings "
        "meet; the rates at 128 heads are written at the right."
    ),
    "tuning": (
        "Bars, one a shape in groups by batch size: how many times as fast the best configuration of the portable "
        "kernel is as the first guess, which is the line at 1."
    ),
    "heads": (
        "The finished kernel beside FlashMLA over the number of heads, in two columns for batch size 32 and 128 at a "
        "context of 8K: above as a share of the read bandwidth measured in the same rounds, below as TFLOPS under a "
        "grey line, the lower of the two measured ceilings, which bends where decode turns from reading to arithmetic."
    ),
    "staircase": (
        "Horizontal bars in panels, one a shape: TFLOPS of the portable kernel, the two Gluon rungs, the finished "
        "kernel with one idea switched off and the finished kernel, beside a grey line: the bf16 matmul rate measured "
        "in the same rounds."
    ),
    "projection": (
        "Two panels of horizontal bars for the largest of the sixteen shapes: left TFLOPS of both torch.compile "
        "opponents and our kernels, right our leads over the opponents. A dot is what was measured on an H200, a bar "
        "the range projected to an H100, a dotted line the source's figure; the ranges are written beside the bars."
    ),
}


def use_bundled_font() -> None:
    """Take DejaVu Sans from matplotlib itself: a system that has the font too has another version of it."""
    manager = font_manager.fontManager
    manager.ttflist = [entry for entry in manager.ttflist if entry.name != "DejaVu Sans"]
    folder = Path(mpl.get_data_path(), "fonts", "ttf")
    for path in sorted([folder / "DejaVuSans.ttf", *folder.glob("DejaVuSans-*.ttf")]):
        manager.addfont(path)


use_bundled_font()


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorate a function that draws a figure: it runs in the project's style and leaves the caller's as it was."""

    @wraps(draw)
    def draw_in_style(*args, **kwargs) -> Figure:
        with plt.style.context(STYLE_FILE):
            return draw(*args, **kwargs)

    return draw_in_style


def open_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options) -> tuple[Figure, list[Axes]]:
    """A figure of that size in inches and its axes in reading order."""
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, **options)
    # A closed figure is shown once by a notebook, where it is the value of the cell, and not again as an open one.
    plt.close(figure)
    return figure, list(axes.flat)


def caption(figure: Figure, frame: pd.DataFrame, *notes: str, timer: str = "cuda_graph") -> None:
    """The small line at the foot: GPU, date, timer, state of the L2 cache, then the notes."""
    first = frame.iloc[0]
    parts = [first["gpu"], first["date"], {"cuda_graph": "CUDA graph", "eager": "eager launches"}[timer], "cold L2"]
    text = ". ".join([", ".join(parts), *(note for note in notes if note)]).replace(". \n", ".\n")
    figure.text(0.01, 0.012, text, fontsize=7.5, color=GREY, va="bottom")


def negligible_note(best: dict[str, float]) -> str:
    """`naive, eager: at most 1.3 TFLOPS, not drawn`, from the best rate of each implementation that is left out."""
    texts = [f"{LOOKS[name].label}: at most {rate:.1f} TFLOPS" for name, rate in best.items()]
    return f"{'; '.join(texts)}, not drawn" if texts else ""


def context_axis(axes: Axes, context_lens: list[int]) -> None:
    """A log2 axis of context lengths with a tick at each measured one."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(context_lens, [tokens_name(tokens) for tokens in context_lens])
    axes.minorticks_off()


def spread(positions: list[float], gap: float, low: float, high: float) -> list[float]:
    """Move label positions apart to at least `gap`, as little as possible, in their order, inside low..high."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    # Labels that would touch form a block; a block is centred on the mean of what its members want.
    blocks: list[list[float]] = []
    for index in order:
        blocks.append([positions[index]])
        while len(blocks) > 1 and _start(blocks[-2], gap) + len(blocks[-2]) * gap > _start(blocks[-1], gap):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    places = [_start(block, gap) + gap * step for block in blocks for step in range(len(block))]
    for step in range(len(places)):
        places[step] = max(places[step], low + gap * step)
    for step in range(len(places)):
        places[-1 - step] = min(places[-1 - step], high - gap * step)
    return [place for _, place in sorted(zip(order, places, strict=True))]


def _start(block: list[float], gap: float) -> float:
    """Where a block of labels begins when it is centred on its members' wishes."""
    return sum(block) / len(block) - gap * (len(block) - 1) / 2


def save(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write NAME.svg and NAME.png, byte for byte the same on a re-run."""
    paths = [directory / f"{name}.svg", directory / f"{name}.png"]
    with plt.style.context(STYLE_FILE):
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], metadata={"Software": None})
    return paths
