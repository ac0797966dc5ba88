"""Multi-head Latent Attention (MLA) decode: references, a ladder of kernels, a benchmark and its report.

The names below are loaded on first use, so that `import mla` and `mla.report` need neither torch nor triton.
"""

from importlib import import_module

_PUBLIC = {
    "MLAConfig": "mla.config",
    "PRESETS": "mla.config",
    "PagedCache": "mla.cache",
    "config_from_json": "mla.config",
    "Problem": "mla.problem",
    "MultiHeadLatentAttention": "mla.layer",
    "CacheStep": "mla.step",
    "begin_step": "mla.step",
    "inspect_weights": "mla.weights",
    "load_attention": "mla.weights",
    "split_kv_b_proj": "mla.weights",
    "DecodePlan": "mla.decode",
    "mla_decode": "mla.decode",
    "plan_decode": "mla.decode",
    "patch_model": "mla.hf.patch",
    "unpatch_model": "mla.hf.patch",
    "mla_prefill": "mla.prefill",
}

__all__ = sorted(_PUBLIC)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mla' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__():
    return __all__
