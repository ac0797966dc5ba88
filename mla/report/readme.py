"""Replace the generated blocks of a Markdown file: the text between `<!-- name:begin -->` and `<!-- name:end -->`."""


def replace_block(text: str, name: str, body: str) -> str:
    """Replace one block; everything outside the markers stays byte for byte.

    Raises:
        ValueError: the pair of markers is not there exactly once, in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(
            f"expected one {begin} before one {end} in the README, got {text.count(begin)} and {text.count(end)}; "
            "put the pair where the block belongs"
        )
    head, rest = text.split(begin)
    return f"{head}{begin}\n{body}\n{end}{rest.split(end)[1]}"


def replace_blocks(text: str, blocks: dict[str, str]) -> str:
    """Replace several blocks, named by the keys."""
    for name, body in blocks.items():
        text = replace_block(text, name, body)
    return text
