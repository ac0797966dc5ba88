"""What `triton-mla-bench prefill` measures: shapes, their inputs, and the gate that a result has to pass."""

import math
from dataclasses import dataclass

import torch

from mla.config import PRESETS, MLAConfig
from mla.measure.cases import ROTATED_BYTES
from mla.measure.gate import LSE_TOLERANCE, relative_error

# Query tokens that the gate looks at; the reference computes no others.
_CHECKED_QUERIES = 33
# q, k_nope, k_pe, v, as `mla_prefill` takes them.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PrefillCase:
    """One prefill of one layer.

    Args:
        q_len: new tokens of each request.
        context_len: tokens that they attend over at most, themselves included.
        preset: key of `mla.PRESETS`.
        batch_size: requests.
        dtype: name of a torch dtype.
    """

    q_len: int
    context_len: int
    preset: str = "deepseek-v3"
    batch_size: int = 1
    dtype: str = "bfloat16"

    @property
    def config(self) -> MLAConfig:
        return PRESETS[self.preset]

    @property
    def name(self) -> str:
        return f"b{self.batch_size}-q{self.q_len}-n{self.context_len}-h{self.config.num_heads}"

    @property
    def flops(self) -> int:
        """Of the scores that causality leaves, and their values; 2 a multiply-add."""
        pairs = self.q_len * (self.context_len - self.q_len) + self.q_len * (self.q_len + 1) // 2
        return 2 * (self.config.qk_head_dim + self.config.v_head_dim) * self.config.num_heads * self.batch_size * pairs

    def to_columns(self) -> dict[str, object]:
        """The columns of a data file that name this case."""
        c = self.config
        return {
            "batch_size": self.batch_size, "q_len": self.q_len, "context_len": self.context_len,
            "num_heads": c.num_heads, "qk_head_dim": c.qk_head_dim, "v_head_dim": c.v_head_dim, "dtype": self.dtype,
        }  # fmt: skip


_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
CASES = (
    *(PrefillCase(n, n, preset) for preset in ("deepseek-v3", "deepseek-v2-lite") for n in _LENGTHS),
    *(PrefillCase(2048, n, preset) for preset in ("deepseek-v3", "deepseek-v2-lite") for n in (8192, 32768)),
)


def draw_inputs(case: PrefillCase, device: str, seed: int, at_most: int | None = None) -> list[Inputs]:
    """Data sets that are together larger than L2; at least one, and no more than `at_most`.

    Keys and values are views of one tensor, as kv_b_proj returns them, and the rotated key one of cached rows.
    """
    c, dtype = case.config, getattr(torch, case.dtype)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    def draw() -> Inputs:
        up = normal(case.batch_size, case.context_len, c.num_heads, c.qk_nope_head_dim + c.v_head_dim)
        rows = normal(case.batch_size, case.context_len, c.cache_dim)
        q = normal(case.batch_size, case.q_len, c.num_heads, c.qk_head_dim)
        return q, up[..., : c.qk_nope_head_dim], rows[..., c.kv_lora_rank :], up[..., c.qk_nope_head_dim :]

    first = draw()
    count = math.ceil(ROTATED_BYTES / sum(x.numel() * x.element_size() for x in first))
    return [first, *(draw() for _ in range(min(count, at_most or count) - 1))]


def reference(
    inputs: Inputs, queries: torch.Tensor, softmax_scale: float, round_to: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp32, for some of the queries: out (batch_size, len(queries), num_heads, v_head_dim) and lse.

    Args:
        queries: (n,) their indices.
        round_to: round what tensor cores take, the probabilities, and the output to this dtype.
    """
    q, k_nope, k_pe, v = inputs
    cached = k_nope.shape[1] - q.shape[1]
    is_seen = torch.arange(k_nope.shape[1], device=q.device) <= cached + queries[:, None]
    outs, lses = [], []
    # a head at a time: keys of all heads in fp32 would be several GB
    for h in range(q.shape[2]):
        keys = torch.cat((k_nope[:, :, h], k_pe), dim=-1).float()
        scores = (q[:, queries, h].float() @ keys.mT) * softmax_scale
        scores = scores.masked_fill(~is_seen, -torch.inf)
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse[..., None])
        out = (p if round_to is None else p.to(round_to).float()) @ v[:, :, h].float()
        outs.append(out if round_to is None else out.to(round_to).float())
        lses.append(lse)
    return torch.stack(outs, dim=2), torch.stack(lses, dim=2)


class Gate:
    """Holds results against the reference, by the rule of `mla.measure.gate.check_result`."""

    def __init__(self, case: PrefillCase, inputs: Inputs):
        self.queries = torch.linspace(0, case.q_len - 1, min(_CHECKED_QUERIES, case.q_len)).long().to(inputs[0].device)
        scale = case.config.softmax_scale
        self.out, self.lse = reference(inputs, self.queries, scale)
        rounded, _ = reference(inputs, self.queries, scale, round_to=inputs[0].dtype)
        logit = self.lse.abs().max().item()
        self.bound = 2 * relative_error(rounded, self.out) + 2 * torch.finfo(torch.float32).eps * logit

    def check(self, out: torch.Tensor, lse: torch.Tensor | None) -> dict[str, object]:
        """rel_err, passed and status of a result."""
        error = relative_error(out[:, self.queries], self.out)
        columns = {"rel_err": f"{error:.3e}", "passed": False}
        if not error <= self.bound:
            return {**columns, "status": f"failed: relative error of out {error:.2e} is above {self.bound:.2e}"}
        if lse is not None:
            lse_error = ((lse[:, self.queries] - self.lse).abs() / self.lse.abs().clamp(min=1.0)).max().item()
            if not lse_error <= LSE_TOLERANCE:
                return {**columns, "status": f"failed: error of lse {lse_error:.2e} is above {LSE_TOLERANCE:.0e}"}
        return {**columns, "passed": True, "status": "ok"}
