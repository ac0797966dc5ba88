"""What a call of `mla_decode` or `mla_prefill` must be like, and what is said where it is not."""

import torch

from mla.kernels import ON_INTERPRETER

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Tokens are counted in 32 bits, and parts begin at multiples of a part's length.
_MAX_SEQ_LEN = 2**30
_MAX_SPLITS = 2**16


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
    if num_splits is not None and not 1 <= num_splits <= _MAX_SPLITS:
        raise ValueError(f"num_splits: expected 1 to {_MAX_SPLITS} or None, got {num_splits}")
    if block_table.shape[1] * kv_cache.shape[1] > _MAX_SEQ_LEN:
        raise ValueError(
            f"block_table: expected room for at most {_MAX_SEQ_LEN} tokens a request, got {block_table.shape[1]} pages "
            f"of {kv_cache.shape[1]}; pass only the columns in use"
        )
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


def check_contents(kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Check lengths and page ids, which only the device knows, of a call that `check_call` let pass; synchronises once.

    Raises:
        ValueError: a length is negative or more than the table has room for, or a page that a request uses is not in
            the pool; the message names the first such request.
        RuntimeError: the current stream is being captured, which a synchronisation would break.
    """
    if seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "validate: expected a call outside a CUDA graph, since reading the lengths back synchronises, got one that "
            "is being captured; validate before the capture, and before a replay with other lengths"
        )
    if len(seq_lens) == 0:
        return
    num_pages, page_size, _ = kv_cache.shape
    max_pages = block_table.shape[1]
    lengths = seq_lens.long()
    is_used = torch.arange(max_pages, device=seq_lens.device) * page_size < lengths[:, None]
    is_wrong_page = is_used & ((block_table < 0) | (block_table >= num_pages))
    is_wrong_length = (lengths < 0) | (lengths > max_pages * page_size)
    is_wrong = is_wrong_length | is_wrong_page.any(dim=1)
    # an index on the device, used as such: indexing by it would read it back
    first = is_wrong.int().argmax(dim=0, keepdim=True)
    entries = is_wrong_page.int().argmax(dim=1)
    pages = block_table.gather(1, entries[:, None])[:, 0]
    facts = torch.stack([x.long() for x in (is_wrong, is_wrong_length, lengths, entries, pages)]).index_select(1, first)
    request, any_wrong, has_wrong_length, length, entry, page = torch.cat((first, facts[:, 0])).tolist()
    if not any_wrong:
        return
    if has_wrong_length:
        raise ValueError(
            f"seq_lens: expected 0 to {max_pages * page_size} tokens, the {max_pages} pages of {page_size} that a row "
            f"of block_table has, got {length} for request {request}; correct it or widen block_table"
        )
    raise ValueError(
        f"block_table: expected ids from 0 to {num_pages - 1}, the pages of kv_cache, got {page} as page {entry} of "
        f"request {request}, which uses {-(-length // page_size)}; correct the entry or the length"
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
