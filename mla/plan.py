"""How a decode step is divided over the GPU."""


def choose_num_splits(batch_size: int, head_blocks: int, max_tiles: int, num_programs: int) -> int:
    """Parts that each request's tokens are cut into, so that all programs together fill about one wave.

    Args:
        batch_size: requests.
        head_blocks: programs that a part needs for its heads.
        max_tiles: upper bound of the tiles of a request; more parts than tiles would be empty.
        num_programs: programs that the GPU runs at a time (SMs times programs a SM).

    Returns:
        At least 1. Rounded down: a second, mostly empty wave would cost as much as the first.
    """
    return max(1, min(num_programs // (batch_size * head_blocks), max_tiles))
