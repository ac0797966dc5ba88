"""What notebooks show: the package's own source, and figures with a text in their place."""

import base64
import inspect
import io

from matplotlib.figure import Figure
from PIL import Image


class Source:
    """Source code of a function, kernel or class, shown as a fenced block."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.text}\n```"


def show_source(thing) -> Source:
    """The source of a function, a Triton or Gluon kernel, or a class, as it stands in the package."""
    # a kernel wraps the function that it was made from
    return Source(inspect.getsource(getattr(thing, "fn", thing)).rstrip())


class Picture:
    """A figure as PNG, with its description as text for readers who do not see it."""

    def __init__(self, figure: Figure, alt: str, dpi: int = 110):
        drawn, palette = io.BytesIO(), io.BytesIO()
        figure.savefig(drawn, format="png", dpi=dpi, metadata={"Software": None})
        # line drawings need few colours: a third of the bytes
        Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(palette, "PNG", optimize=True)
        self._png, self._alt = palette.getvalue(), alt

    def __repr__(self) -> str:
        return f"Figure: {self._alt}"

    def _repr_mimebundle_(self, include=None, exclude=None):
        bundle = {"image/png": base64.b64encode(self._png).decode(), "text/plain": repr(self)}
        return bundle, {"image/png": {"alt": self._alt}}


def show(figure: Figure, alt: str) -> Picture:
    """A figure for the end of a cell; `alt` says what it shows, numbers included."""
    return Picture(figure, alt)


class Text:
    """Markdown that is shown as such, and compared as text."""

    def __init__(self, markdown: str):
        self._markdown = markdown

    def __repr__(self) -> str:
        return self._markdown

    def _repr_markdown_(self) -> str:
        return self._markdown


def show_text(markdown: str) -> Text:
    """Markdown that the package makes, such as a table, for the end of a cell."""
    return Text(markdown)
