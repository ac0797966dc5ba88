"""What a call of `mla_decode` or `mla_prefill` must be like, and what is said where it is not."""

import torch

from mla.kernels import ON_INTERPRETER

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_supported_width(n: int) -> bool:
    return n >= 16 and n & (n - 1) == 0


def check_call(q, kv_cache, block_table, seq_lens, kv_lora_rank, num_splits, out) -> None:
    """Raise what `mla_decode` says that it raises; `out` may be None."""
    tensors = {"q": q, "kv_cache": kv_cache, "block_table": block_table, "seq_lens": seq_lens}
    if out is not None:
        tensors["out"] = out

    dims = {"q": 3, "kv_cache": 3, "block_table": 2, "seq_lens": 1, "out": 3}
    for name, tensor in tensors.items():
        if tensor.ndim != dims[name]:
            raise ValueError(f"{name}: expected {dims[name]} dimensions, got shape {tuple(tensor.shape)}")
    batch_size, num_heads, width = q.shape
    if not (is_supported_width(kv_lora_rank) and is_supported_width(width - kv_lora_rank)):
        raise ValueError(
            f"q: expected a width of kv_lora_rank + qk_rope_head_dim, both powers of two from 16 up, got a width of "
            f"{width} with kv_lora_rank {kv_lora_rank}; pass kv_lora_rank, or pad the rope part with zeros"
        )
    if num_heads < 1:
        raise ValueError(f"q: expected at least 1 head, got shape {tuple(q.shape)}")
    if kv_cache.shape[2] != width or kv_cache.shape[1] < 1:
        raise ValueError(
            f"kv_cache: expected (num_pages, page_size, {width}) with page_size from 1 up, since q is {width} wide, "
            f"got {tuple(kv_cache.shape)}"
        )
    expected = {
        "block_table": (batch_size, max(block_table.shape[1], 1)),
        "seq_lens": (batch_size,),
        "out": (batch_size, num_heads, kv_lora_rank),
    }
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{name}: expected shape {shape} for q of shape {tuple(q.shape)}, got {tuple(tensors[name].shape)}"
            )
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits: expected a positive number or None, got {num_splits}")
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: expected a contiguous last dimension, got strides {tuple(tensor.stride())}; "
                f"call .contiguous()"
            )

    if out is not None and any(n > 1 and stride == 0 for n, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(
            f"out: expected memory of its own for every element, got an expanded tensor of strides "
            f"{tuple(out.stride())}; allocate it with torch.empty"
        )

    if q.dtype not in _DTYPES:
        raise TypeError(f"q: expected bfloat16, float16 or float32, got {q.dtype}; convert q and kv_cache")
    for name in ("kv_cache", "out"):
        if name in tensors and tensors[name].dtype != q.dtype:
            raise TypeError(f"{name}: expected q's dtype {q.dtype}, got {tensors[name].dtype}; convert one of them")
    for name in ("block_table", "seq_lens"):
        if tensors[name].dtype != torch.int32:
            raise TypeError(f"{name}: expected torch.int32, got {tensors[name].dtype}; call .int()")

    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise RuntimeError(
                f"{name}: expected q's device {q.device}, got {tensor.device}; move all tensors to one device"
            )
    _check_device(q)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()):
        raise RuntimeError(
            "mla_decode: expected inputs that need no gradient, since decoding has no backward pass, got one with "
            "requires_grad; call it under torch.no_grad() or detach the inputs"
        )


def _check_device(q: torch.Tensor) -> None:
    if q.device.type == "cuda":
        return
    if q.device.type != "cpu" or not ON_INTERPRETER:
        raise RuntimeError(
            f"q: expected a CUDA tensor, got one on {q.device}; move all tensors to the GPU, or set "
            f"TRITON_INTERPRET=1 before the first import to run on the CPU, slowly"
        )
    if q.dtype == torch.bfloat16:
        raise TypeError(
            "q: expected float16 or float32 on the CPU, since Triton's interpreter cannot multiply bfloat16, got "
            "torch.bfloat16; convert all of them"
        )


def check_step(seq_lens: torch.Tensor, num_heads: int) -> None:
    """Raise what `plan_decode` says that it raises."""
    if seq_lens.ndim != 1 or not seq_lens.is_contiguous() or num_heads < 1:
        raise ValueError(
            f"plan_decode: expected contiguous seq_lens of shape (batch_size,) and a positive num_heads, got "
            f"{tuple(seq_lens.shape)} with strides {tuple(seq_lens.stride())} and {num_heads}"
        )
    if seq_lens.dtype != torch.int32:
        raise TypeError(f"seq_lens: expected torch.int32, got {seq_lens.dtype}; call .int()")


def check_prefill(q, k_nope, k_pe, v, cached_lens, kv_lens) -> None:
    """Raise what `mla.mla_prefill` says that it raises; either kind of lengths may be None."""
    floats = {"q": q, "k_nope": k_nope, "k_pe": k_pe, "v": v}
    lengths = {n: x for n, x in (("cached_lens", cached_lens), ("kv_lens", kv_lens)) if x is not None}
    for name, tensor in floats.items():
        dims = 3 if name == "k_pe" else 4
        if tensor.ndim != dims or tensor.shape[-1] < 1:
            raise ValueError(f"{name}: expected {dims} dimensions, none of width 0, got shape {tuple(tensor.shape)}")
    (batch_size, _, num_heads, width), kv_len = q.shape, k_nope.shape[1]
    nope, rope = k_nope.shape[-1], k_pe.shape[-1]
    expected = {
        "k_nope": (batch_size, kv_len, num_heads, width - rope),
        "k_pe": (batch_size, kv_len, width - nope),
        "v": (batch_size, kv_len, num_heads, v.shape[-1]),
        **dict.fromkeys(lengths, (batch_size,)),
    }
    for name, shape in expected.items():
        if tuple((floats | lengths)[name].shape) != shape:
            raise ValueError(
                f"{name}: expected shape {shape} for q of shape {tuple(q.shape)}, k_nope of {tuple(k_nope.shape)} and "
                f"k_pe of {tuple(k_pe.shape)}, got {tuple((floats | lengths)[name].shape)}"
            )
    for name, tensor in (floats | lengths).items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: expected a contiguous last dimension, got strides {tuple(tensor.stride())}; "
                f"call .contiguous()"
            )
        if name in lengths and tensor.dtype != torch.int32:
            raise TypeError(f"{name}: expected torch.int32, got {tensor.dtype}; call .int()")
        if name in floats and (tensor.dtype != q.dtype or q.dtype not in _DTYPES):
            raise TypeError(
                f"{name}: expected bfloat16, float16 or float32, q's dtype, got {tensor.dtype} with q of {q.dtype}"
            )
        if tensor.device != q.device:
            raise RuntimeError(f"{name}: expected q's device {q.device}, got {tensor.device}; move all to one device")
    _check_device(q)
    if torch.is_grad_enabled() and any(x.requires_grad for x in floats.values()):
        raise RuntimeError(
            "mla_prefill: expected inputs that need no gradient, since the kernel has no backward pass, got one with "
            "requires_grad; call it under torch.no_grad() or detach the inputs"
        )
