"""`patch_model` and `unpatch_model`: a loaded transformers model that decodes absorbed, and back.

What changes, and by which means of the library's:

- the attention function, through the registry of attention functions: `mla.hf.attention.latent_attention`;
- the mask, through the registry of mask functions: padding as it is, no matrix;
- the cache's layers, subclasses of `CacheLayerMixin`, set into the caller's or `generate`'s own `Cache` by a forward
  pre-hook of the decoder, which also prepares what the layers of one pass share.

One thing is no extension point: the attention modules' method `expand_kv`, which rebuilds keys and values from the
latents, is shadowed on each module so that latents pass through. Projections, norms, rotation and scale stay the
model's own code.
"""

import inspect
from functools import partial

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from mla.checks import is_supported_width
from mla.config import MLAConfig
from mla.hf.attention import NAME, latent_attention, latent_mask
from mla.hf.cache import adopt

# Attention classes that were read and are tested: all cache latents and rebuild keys and values by expand_kv. Kimi-K2
# and DeepSeek-R1 load as DeepseekV3. Sparse ones (DeepseekV32, GlmMoeDsa, ...) cache other things, and are refused.
SUPPORTED = (
    "DeepseekV2Attention",
    "DeepseekV3Attention",
    "AXK1Attention",
    "Glm4MoeLiteAttention",
    "KimiLinearAttention",
    "LongcatFlashMLA",
    "MiniCPM3Attention",
    "Mistral4Attention",
    "YoutuAttention",
)
_STATE = "_mla_patch"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

AttentionInterface.register(NAME, latent_attention)
AttentionMaskInterface.register(NAME, latent_mask)


def patch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model decode absorbed, through `mla_decode`, from a cache of latent rows; in place.

    Afterwards `model.generate` and `model(...)` work as before: greedy, sampling, beams, left-padded batches,
    continuing a cache, prefill in chunks, `cache_implementation="static"`. A cache that the model makes, or an empty
    `DynamicCache` or `StaticCache` that it is given, holds kv_lora_rank + qk_rope_head_dim values a token and layer,
    without padding; decoding never rebuilds keys and values. Logits are the original's up to rounding.

    A token's mask is read once, when the token comes in; hiding tokens that are cached already has no effect.

    Args:
        model: of DeepSeek's family (`SUPPORTED` lists the attention classes), on one device, in bf16, fp16 or fp32.

    Returns:
        The same model.

    Raises:
        ValueError: the model, its widths or its weights are not supported, or it is patched already.
    """
    if hasattr(model, _STATE):
        raise ValueError("model: expected one that is not patched, got one that is; mla.unpatch_model undoes it")
    decoder, modules = _find_attention(model)
    for module in modules:
        module.expand_kv, module.mla_config = _pass_latents, _layer_config(module)
    previous = decoder.config._attn_implementation
    decoder.set_attn_implementation(NAME)
    arguments = tuple(inspect.signature(decoder.forward).parameters)
    hook = decoder.register_forward_pre_hook(partial(_before_forward, arguments=arguments), with_kwargs=True)
    setattr(model, _STATE, (decoder, modules, previous, hook))
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `patch_model`, in place. Caches that the patched model filled cannot be used any more.

    Raises:
        ValueError: the model is not patched.
    """
    if not hasattr(model, _STATE):
        raise ValueError("model: expected one that mla.patch_model changed, got one that is not patched")
    decoder, modules, previous, hook = getattr(model, _STATE)
    hook.remove()
    decoder.set_attn_implementation(previous)
    for module in modules:
        del module.expand_kv, module.mla_config
    delattr(model, _STATE)
    return model


def _pass_latents(latent, k_pe):
    return latent, k_pe


def _find_attention(model: PreTrainedModel) -> tuple[PreTrainedModel, list[torch.nn.Module]]:
    """The decoder, which is the model's part that owns the layers, and its attention modules."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    named = ", ".join(SUPPORTED)
    decoders = [m for m in model.modules() if isinstance(m, PreTrainedModel) and hasattr(m, "layers")]
    modules = [
        (d, m) for d in decoders for m in d.modules() if hasattr(m, "kv_a_proj_with_mqa") and hasattr(m, "kv_b_proj")
    ]
    if not modules or len({id(d) for d, _ in modules}) != 1:
        raise ValueError(f"model: expected one decoder with attention of {named}, got {type(model).__name__} with none")
    decoder, modules = modules[0][0], [m for _, m in modules]
    for m in modules:
        if type(m).__name__ not in SUPPORTED or not hasattr(m, "expand_kv"):
            raise ValueError(f"model: expected attention of {named} (transformers >= 5.17), got {type(m).__name__}")
        if not (is_supported_width(m.kv_lora_rank) and is_supported_width(m.qk_rope_head_dim)):
            raise ValueError(
                f"model: expected kv_lora_rank and qk_rope_head_dim to be powers of two from 16 up, got "
                f"{m.kv_lora_rank} and {m.qk_rope_head_dim}"
            )
        # the weight is read itself: what a quantised layer or an adapter would add to it would be lost
        if type(m.kv_b_proj) is not torch.nn.Linear or m.kv_b_proj.weight.dtype not in _DTYPES:
            raise ValueError(
                f"model: expected kv_b_proj to be a plain Linear in bf16, fp16 or fp32, got "
                f"{type(m.kv_b_proj).__name__} in {m.kv_b_proj.weight.dtype}; load the model dequantised, or merge "
                f"its adapters"
            )
    devices = {m.kv_b_proj.weight.device for m in modules}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise ValueError(
            f"model: expected all attention on one device, got {', '.join(sorted(map(str, devices)))}; load it without "
            f"offloading or a device_map over several devices"
        )
    return decoder, modules


def _layer_config(module: torch.nn.Module) -> MLAConfig:
    names = ("hidden_size", "num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    return MLAConfig(**{name: getattr(module, name) for name in (*names, "v_head_dim")})


def _before_forward(
    decoder: PreTrainedModel, args: tuple, kwargs: dict, *, arguments: tuple[str, ...]
) -> tuple[tuple, dict]:
    """Set latent layers into the cache and prepare the pass; `arguments` are the decoder's, in order."""
    kwargs = kwargs | dict(zip(arguments, args, strict=False))
    config = decoder.config
    if kwargs.get("output_attentions", config.output_attentions):
        raise ValueError(
            "output_attentions: expected False, since the patched model never stores probabilities, got True; "
            "unpatch the model for it (mla.unpatch_model)"
        )
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):
        mask = mask["full_attention"]
    if mask is not None and mask.ndim != 2:
        raise ValueError(
            f"attention_mask: expected (batch_size, tokens) with 0 where a token is padding, got {tuple(mask.shape)}"
        )
    # from some release after 5.17 on transformers says cache, and takes the old name too
    name = "cache" if "cache" in arguments else "past_key_values"
    if kwargs.get("past_key_values") is not None:
        kwargs[name] = kwargs.pop("past_key_values")
    if kwargs.get(name) is None:
        use_cache = kwargs.get("use_cache")
        if not (config.use_cache if use_cache is None else use_cache):
            return (), kwargs
        kwargs[name] = DynamicCache(config=config)
    inputs = kwargs.get("input_ids")
    inputs = kwargs["inputs_embeds"] if inputs is None else inputs
    batch_size, q_len = inputs.shape[:2]
    store = adopt(kwargs[name], config.num_hidden_layers, config.num_attention_heads)
    is_real = None if mask is None else mask[:, -q_len:].bool()
    kwargs["latent_step"] = store.begin(batch_size, q_len, is_real, inputs.device)
    return (), kwargs
