"""The ladder, one short file a rung: naive, absorbed, online_softmax, split_kv (and `mla.kernels.portable`, paged).

From there to the Hopper kernel (`mla.kernels.hopper`) lead two more: gluon_simple and gluon_warp_specialised.

Every rung has `decode(problem) -> (out, lse)`. `naive` returns out per head, (batch_size, num_heads, v_head_dim); all
others return the attended latent, (batch_size, num_heads, kv_lora_rank), to which `mla.reference.project_values`
applies the values' up-projection. lse is (batch_size, num_heads), fp32, natural logarithm.
"""

# First of all, since it chooses Triton's interpreter where there is no GPU.
import mla.kernels  # noqa: F401
