import pytest

from mla.plan import choose_num_splits


@pytest.mark.parametrize(
    ("batch_size", "head_blocks", "max_tiles", "num_programs", "num_splits"),
    [
        (8, 2, 512, 132, 8),
        (32, 2, 512, 132, 2),
        (64, 2, 512, 132, 1),
        # more programs than fit: still one part
        (128, 2, 512, 132, 1),
        (1, 2, 2048, 132, 66),
        # no part without a tile
        (1, 2, 3, 132, 3),
        (1, 1, 1, 132, 1),
    ],
)
def test_about_one_wave(batch_size, head_blocks, max_tiles, num_programs, num_splits):
    assert choose_num_splits(batch_size, head_blocks, max_tiles, num_programs) == num_splits
