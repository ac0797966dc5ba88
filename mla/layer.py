"""`MultiHeadLatentAttention`: the whole layer, from hidden states to hidden states, on a paged cache of latent rows.

Prefill rebuilds keys and values of the tokens at hand, decode attends over the latents themselves. What is cached is
the same for both: one row a token, the normalised latent and the rotated key that all heads share.
"""

from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mla.config import MLAConfig, config_from_json
from mla.decode import mla_decode
from mla.prefill import attend_prompt, merge_attention, mla_prefill
from mla.reference import absorb_query, project_values
from mla.rope import apply_rope
from mla.step import CacheStep
from mla.weights import load_attention, split_kv_b_proj

# Cached tokens whose keys and values are rebuilt at a time for a chunk: 512 MiB at 128 heads of 128 + 128 in bf16.
CONTEXT_TOKENS = 8192
# DeepSeek's code leaves the norms of the low ranks at this, whatever the config's rms_norm_eps is.
_RMS_NORM_EPS = 1e-6


class MultiHeadLatentAttention(nn.Module):
    """Multi-head Latent Attention; parameters have the names that DeepSeek's checkpoints use.

    Without a cache it attends causally within each sequence and has a gradient. With one it is for inference: new rows
    are written to the cache, and nothing has a gradient.

    Args:
        config: dimensions, YaRN and order of the rotated channels.
        layer_idx: which of the cache's layers is this one's.
        device, dtype: of the parameters.

    Reference: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    def __init__(
        self,
        config: MLAConfig,
        *,
        layer_idx: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        options: dict[str, Any] = dict(device=device, dtype=dtype)
        hidden, heads, bias = config.hidden_size, config.num_heads, config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, heads * config.qk_head_dim, bias=False, **options)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=bias, **options)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=_RMS_NORM_EPS, **options)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False, **options)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.cache_dim, bias=bias, **options)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps=_RMS_NORM_EPS, **options)
        up_width = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, up_width, bias=False, **options)
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=bias, **options)

    @classmethod
    def from_weights(
        cls,
        path: str | Path,
        layer_idx: int = 0,
        config: MLAConfig | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> "MultiHeadLatentAttention":
        """A layer of a checkpoint; arguments and errors as `mla.load_attention` has them.

        Args:
            layer_idx: of the checkpoint, and of the cache.
            device: of the parameters, which need no gradient.
        """
        config = config or config_from_json(Path(path) if Path(path).is_dir() else Path(path).parent)
        weights = load_attention(path, layer_idx, config, dtype=dtype)
        # one dtype for all, also where a checkpoint keeps its norms in fp32
        dtype = dtype or weights["kv_b_proj.weight"].dtype
        layer = cls(config, layer_idx=layer_idx, device="meta")
        layer.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
        return layer.requires_grad_(False).to(device)

    def forward(self, hidden_states: torch.Tensor, step: CacheStep | None = None) -> torch.Tensor:
        """Attend.

        Args:
            hidden_states: (batch_size, tokens, hidden_size), sequences from position 0 on; with a step
                (tokens, hidden_size), the new tokens request by request without padding.
            step: of the cache, from `mla.begin_step`.

        Returns:
            hidden_states' shape.

        Raises:
            ValueError: the shape does not fit, or the cache's rows do not.
        """
        self._check(hidden_states, step)
        if step is None:
            positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            q_nope, q_pe, rows = self._project(hidden_states, positions)
            q = torch.cat((q_nope, q_pe), dim=-1)
            out = attend_prompt(q, *self._rebuild(rows), softmax_scale=self.config.softmax_scale)
            return self.o_proj(out.flatten(-2))
        with torch.no_grad():
            out = self._decode(hidden_states, step) if step.is_decode else self._prefill(hidden_states, step)
            return self.o_proj(out.flatten(-2))

    def _project(
        self, hidden_states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_nope and q_pe (..., tokens, num_heads, width), and the rows to be cached (..., tokens, cache_dim)."""
        c = self.config
        if c.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q_nope, q_pe = q.unflatten(-1, (c.num_heads, c.qk_head_dim)).split(
            (c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1
        )
        latent, k_pe = self.kv_a_proj_with_mqa(hidden_states).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        # all heads of a token are rotated by its position
        q_pe = apply_rope(q_pe, positions[:, None], c, c.rope_order)
        k_pe = apply_rope(k_pe, positions, c, c.rope_order)
        return q_nope, q_pe, torch.cat((self.kv_a_layernorm(latent), k_pe), dim=-1)

    def _rebuild(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values of every head from cached rows (batch_size, tokens, cache_dim): k_nope, k_pe, v."""
        c = self.config
        latent, k_pe = rows.split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        up = self.kv_b_proj(latent).unflatten(-1, (c.num_heads, c.qk_nope_head_dim + c.v_head_dim))
        k_nope, v = up.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        return k_nope, k_pe, v

    def _decode(self, hidden_states: torch.Tensor, step: CacheStep) -> torch.Tensor:
        """One token a request, absorbed; waits for nothing. (batch_size, num_heads, v_head_dim)."""
        q_nope, q_pe, rows = self._project(hidden_states, step.seq_lens - 1)
        step.cache.write(self.layer_idx, step.slots, rows)
        w_uk, w_uv = split_kv_b_proj(self.kv_b_proj.weight, self.config)
        out, _ = mla_decode(
            absorb_query(q_nope, q_pe, w_uk),
            step.cache.kv_cache[self.layer_idx],
            step.block_table,
            step.seq_lens,
            softmax_scale=self.config.softmax_scale,
            kv_lora_rank=self.config.kv_lora_rank,
            plan=step.plan,
        )
        return project_values(out, w_uv)

    def _prefill(self, hidden_states: torch.Tensor, step: CacheStep) -> torch.Tensor:
        """Several tokens a request, after those that are cached. (tokens, num_heads, v_head_dim)."""
        lengths = list(zip(step.cached_lens, step.query_lens, strict=True))
        q_nope, q_pe, rows = self._project(hidden_states, step.prefill_positions)
        step.cache.write(self.layer_idx, step.slots, rows)
        q = torch.cat((q_nope, q_pe), dim=-1)
        if len(set(lengths)) == 1:
            q, rows = (x.unflatten(0, (len(lengths), -1)) for x in (q, rows))
            return self._attend(q, rows, step, slice(None), lengths[0][0]).flatten(0, 1)
        ends = accumulate(step.query_lens)
        outs = [
            self._attend(q[None, end - n : end], rows[None, end - n : end], step, slice(b, b + 1), cached)[0]
            for b, (end, (cached, n)) in enumerate(zip(ends, lengths, strict=True))
        ]
        return torch.cat(outs)

    def _attend(
        self, q: torch.Tensor, rows: torch.Tensor, step: CacheStep, requests: slice, num_cached: int
    ) -> torch.Tensor:
        """Requests of one length: q (batch_size, tokens, num_heads, qk_head_dim) over the cached rows and their own."""
        scale = self.config.softmax_scale
        if num_cached == 0:
            return attend_prompt(q, *self._rebuild(rows), softmax_scale=scale)
        out, lse = mla_prefill(q, *self._rebuild(rows), softmax_scale=scale, out_dtype=torch.float32)
        pool, page_size = step.cache.kv_cache[self.layer_idx], step.cache.kv_cache.shape[2]
        pages_at_once = max(1, CONTEXT_TOKENS // (page_size * len(q)))
        for first in range(0, -(-num_cached // page_size), pages_at_once):
            pages = step.block_table[requests, first : first + pages_at_once]
            cached = pool[pages].flatten(1, 2)[:, : num_cached - first * page_size]
            part = mla_prefill(q, *self._rebuild(cached), softmax_scale=scale, is_causal=False, out_dtype=torch.float32)
            out, lse = merge_attention(out, lse, *part)
        return out.to(q.dtype)

    def _check(self, hidden_states: torch.Tensor, step: CacheStep | None) -> None:
        hidden = self.config.hidden_size
        if step is None:
            if hidden_states.ndim != 3 or hidden_states.shape[-1] != hidden:
                raise ValueError(
                    f"hidden_states: expected (batch_size, tokens, {hidden}) without a step of a cache, got "
                    f"{tuple(hidden_states.shape)}"
                )
            return
        if tuple(hidden_states.shape) != (sum(step.query_lens), hidden):
            raise ValueError(
                f"hidden_states: expected ({sum(step.query_lens)}, {hidden}), the step's {step.query_lens} new tokens "
                f"request by request, got {tuple(hidden_states.shape)}"
            )
        num_layers, width = step.cache.kv_cache.shape[0], step.cache.kv_cache.shape[-1]
        if self.layer_idx >= num_layers or width != self.config.cache_dim:
            raise ValueError(
                f"step.cache: expected rows of {self.config.cache_dim} for layer {self.layer_idx}, got rows of {width} "
                f"in {num_layers} layers"
            )
