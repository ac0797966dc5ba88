import torch

from mla.kernels.read import read_once


def test_every_element_is_read(device):
    """The parity of all programs together is that of the whole tensor."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(2**31 - 1, (3 * 4096,), dtype=torch.int32, generator=generator)
    out = torch.empty(2, dtype=torch.int32, device=device)
    read_once(x.to(device), out)
    expected = 0
    for value in x.tolist():
        expected ^= value
    first, second = out.tolist()
    assert first ^ second == expected
