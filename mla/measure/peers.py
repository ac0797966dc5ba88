"""Other people's kernels, called where they are installed (`pip install 'triton-mla[peers]'`).

FlashMLA: its last Hopper kernels, as the package sgl-flash-mla distributes them. FlashInfer: the MLA wrapper.
"""

import importlib.metadata
import importlib.util
from pathlib import Path

import torch

from mla.problem import Problem


def _version(distribution: str, module: str) -> str | None:
    """The version of a peer, None where it is not there; "unknown" for one unpacked without its metadata."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def flashmla_version() -> str | None:
    """Version of sgl-flash-mla, or None."""
    return _version("sgl-flash-mla", "flash_mla")


def flashinfer_version() -> str | None:
    """Version of flashinfer-python, or None."""
    return _version("flashinfer-python", "flashinfer")


def _flashmla_op():
    if not hasattr(torch.ops.flash_mla_legacy, "dense_decode_fwd"):
        # The library is loaded by itself: the package's import also wants kernels for other GPUs and a newer torch.
        spec = importlib.util.find_spec("flash_mla")
        torch.ops.load_library(str(Path(spec.origin).with_name("_C_legacy.abi3.so")))
    return torch.ops.flash_mla_legacy.dense_decode_fwd


def _flashmla_call(problem: Problem, metadata, num_splits):
    return _flashmla_op()(
        problem.q_absorbed[:, None],
        problem.kv_cache[:, :, None],
        problem.config.kv_lora_rank,
        problem.seq_lens,
        problem.block_table,
        problem.softmax_scale,
        False,
        metadata,
        num_splits,
    )


def flashmla_plan_and_decode(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The tile scheduler's plan (metadata, num_splits), made on the device by a first call and shared by a step."""
    return tuple(_flashmla_call(problem, None, None)[2:])


def flashmla_decode(problem: Problem, plan) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch_size, num_heads, kv_lora_rank); lse natural. FlashMLA gives lse +inf for empty requests."""
    out, lse, *_ = _flashmla_call(problem, *plan)
    return out[:, 0], lse[:, :, 0]


def flashinfer_wrapper(problem: Problem, backend: str):
    """A wrapper without a plan."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=problem.kv_cache.device)
    return BatchMLAPagedAttentionWrapper(workspace, backend=backend)


def flashinfer_metadata(problem: Problem):
    """The problem's lengths and pages as FlashInfer wants them, on the host, where its planner reads them."""
    from flashinfer.mla import MLAPlanMetadata

    page_size = problem.kv_cache.shape[1]
    lengths = problem.seq_lens.cpu()
    num_pages = (lengths + page_size - 1) // page_size
    table = problem.block_table.cpu()
    indices = torch.cat([row[:n] for row, n in zip(table, num_pages.tolist(), strict=True)])
    starts = torch.nn.functional.pad(num_pages.cumsum(0), (1, 0)).int()
    return MLAPlanMetadata.csr(torch.arange(len(lengths) + 1, dtype=torch.int32), starts, indices, lengths)


def flashinfer_plan(problem: Problem, wrapper, metadata) -> None:
    """Plan on the host; a step's layers share it."""
    config = problem.config
    wrapper.plan(
        metadata=metadata,
        num_heads=config.num_heads,
        head_dim_ckv=config.kv_lora_rank,
        head_dim_kpe=config.qk_rope_head_dim,
        page_size=problem.kv_cache.shape[1],
        causal=False,
        sm_scale=problem.softmax_scale,
        q_data_type=problem.q_absorbed.dtype,
        kv_data_type=problem.kv_cache.dtype,
        lse_mode="base2",
    )


def flashinfer_decode(problem: Problem, wrapper) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch_size, num_heads, kv_lora_rank) and lse in base 2."""
    return wrapper.run(query=problem.q_absorbed, kv_cache=problem.kv_cache, return_lse=True)
