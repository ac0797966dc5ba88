"""What of the Hopper kernel can be tested without a GPU: that it refuses calls which it does not take."""

import pytest
import torch


def test_a_call_that_does_not_fit_is_refused():
    from mla.kernels.hopper_launch import mla_decode_hopper

    q, kv_cache = torch.zeros(1, 4, 576, dtype=torch.float16), torch.zeros(1, 7, 576, dtype=torch.float16)
    table, seq_lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    out, lse = q[..., :512].clone(), torch.zeros(1, 4)
    with pytest.raises(ValueError, match=r"expected a call for which hopper_fits holds, got q \(1, 4, 576\)"):
        mla_decode_hopper(q, kv_cache, table, seq_lens, out, lse, softmax_scale=1.0)
