"""Times generation by whole models: `python -m mla.measure.pipeline_worker`, a JSON request a line, an answer a line.

The loop is transformers' `generate` with a preallocated cache (`StaticCache`). A token's time is what lies between two
calls of a stopping criterion, which the loop makes once a step: all that a user waits for, the library's own work
included. Models of one kind are built once a process.
"""

import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass

import torch

# before transformers, which imports triton: without a GPU the interpreter must be chosen first
from mla.hf.cache import adopt, latent_layers
from mla.hf.patch import patch_model

# isort: split
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

# Steps that are not counted: kernels are compiled, memory is allocated, graphs are recorded.
WARM_UP = 8
MODELS = ("mla_patched", "mla_unpatched", "mha")
ANSWER_BEGINS = '{"status"'


@dataclass(frozen=True)
class PipelineCase:
    """One generation.

    Args:
        model: one of MODELS.
        batch_size: sequences.
        context_len: tokens of each before the first timed step.
        is_prefilled: the context is a prompt that the model reads; otherwise the cache is filled with random rows.
        is_compiled: `generate` compiles decoding, as it does by default where the cache is static.
        new_tokens: timed steps.
        num_layers, hidden_size, num_heads, intermediate_size: of the model, by default Llama-2-7B's but for the layers.
        device: "cuda", or "cpu" for a test.
    """

    model: str
    batch_size: int
    context_len: int
    is_prefilled: bool
    is_compiled: bool = False
    new_tokens: int = 24
    num_layers: int = 4
    hidden_size: int = 4096
    num_heads: int = 32
    intermediate_size: int = 11008
    device: str = "cuda"


class _Clock(StoppingCriteria):
    """Notes the time of every step and stops nothing; the loop's own look at the answer waits for the device."""

    def __init__(self, is_cuda: bool):
        self.is_cuda = is_cuda
        self.marks = []
        self.mark()

    def mark(self) -> None:
        if not self.is_cuda:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def __call__(self, input_ids, scores, **kwargs):
        self.mark()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def steps_ms(self) -> list[float]:
        if not self.is_cuda:
            return [1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:], strict=False)]


def make_model(case: PipelineCase):
    """A dense model of random weights: bf16 on a GPU, fp32 on the CPU, where the kernel's interpreter has no bf16."""
    shared = dict(
        vocab_size=4096, hidden_size=case.hidden_size, intermediate_size=case.intermediate_size,
        num_hidden_layers=case.num_layers, num_attention_heads=case.num_heads, num_key_value_heads=case.num_heads,
        max_position_embeddings=2**18, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    if case.model == "mha":
        cls, config = LlamaForCausalLM, LlamaConfig(**shared)
    else:
        cls = DeepseekV3ForCausalLM
        # every other width is DeepSeek-V3's, which is the config's default
        config = DeepseekV3Config(**shared, first_k_dense_replace=case.num_layers)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if case.device == "cuda" else torch.float32)
    try:
        with torch.device(case.device):
            model = cls(config).eval()
    finally:
        torch.set_default_dtype(before)
    return patch_model(model) if case.model == "mla_patched" else model


def fill(cache: StaticCache, model, case: PipelineCase) -> None:
    """Put random rows where a prefill of context_len tokens would have put its own."""
    config, device = model.config, torch.device(case.device)

    def empty(heads: int, width: int) -> torch.Tensor:
        return torch.empty((case.batch_size, heads, 0, width), dtype=model.dtype, device=device)

    if case.model == "mha":
        states = [empty(case.num_heads, config.head_dim)] * 2
    else:
        states = [empty(1, config.kv_lora_rank), empty(1, config.qk_rope_head_dim)]
    if case.model == "mla_patched":
        store = adopt(cache, config.num_hidden_layers, case.num_heads)
        store.begin(case.batch_size, case.context_len, None, device)
        store.count_columns(case.context_len)
    for layer in cache.layers:
        layer.lazy_initialization(*states)
        if case.model == "mla_patched":
            layer.rows.normal_()
        else:
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(case.context_len)


def cache_bytes(cache: StaticCache) -> int:
    """Bytes of everything that is cached."""
    tensors = [layer.rows for layer in latent_layers(cache)]
    tensors += [x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None]
    return sum(x.nbytes for x in tensors)


@torch.no_grad()
def measure(model, case: PipelineCase) -> dict[str, object]:
    """Columns of one row: times of a step (a token of every sequence), memory, status."""
    is_cuda = case.device == "cuda"
    num_steps = WARM_UP + case.new_tokens
    cache = StaticCache(config=model.config, max_cache_len=case.context_len + num_steps + 1)
    tokens = torch.randint(2, 4096, (case.batch_size, case.context_len + (not case.is_prefilled)), device=case.device)
    peaks = {}
    options = dict(
        do_sample=False, disable_compile=not case.is_compiled, past_key_values=cache, return_dict_in_generate=True
    )
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    prefill_ms = None
    if case.is_prefilled:
        clock = _Clock(is_cuda)
        first = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=1,
            stopping_criteria=StoppingCriteriaList([clock]), **options,
        )  # fmt: skip
        (prefill_ms,) = clock.steps_ms()
        tokens = first.sequences
    else:
        fill(cache, model, case)
    if is_cuda:
        peaks["fill_peak_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    clock = _Clock(is_cuda)
    model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_steps,
        stopping_criteria=StoppingCriteriaList([clock]), **options,
    )  # fmt: skip
    steps_us = sorted(1e3 * ms for ms in clock.steps_ms()[WARM_UP:])
    if is_cuda:
        peaks["decode_peak_bytes"] = torch.cuda.max_memory_allocated()
    quantiles = statistics.quantiles(steps_us, n=10, method="inclusive")
    return {
        "status": "ok",
        **{f"latency_us_p{q}": round(quantiles[q // 10 - 1], 1) for q in (20, 50, 80)},
        "repeats": len(steps_us),
        "tokens_per_s": round(case.batch_size * 1e6 / statistics.median(steps_us), 1),
        "prefill_ms": None if prefill_ms is None else round(prefill_ms, 3),
        "cache_bytes": cache_bytes(cache),
        **peaks,
    }


def answer(case: PipelineCase, models: dict) -> dict[str, object]:
    """`measure`, or the status that says why not; `models` keeps what was built."""
    try:
        model = models[case.model] if case.model in models else models.setdefault(case.model, make_model(case))
        sizes = [(p.numel(), p.nbytes) for p in model.parameters()]
        facts = {"parameters": sum(n for n, _ in sizes), "weight_bytes": sum(b for _, b in sizes)}
        return measure(model, case) | facts
    except torch.OutOfMemoryError:
        return {"status": "out_of_memory"}
    except Exception as error:  # a case that fails is a result
        return {"status": f"failed: {type(error).__name__}: {' '.join(str(error).split())[:120]}"}


def main() -> None:
    """Answer the requests on stdin, which are of one shape of models."""
    models = {}
    for line in sys.stdin:
        print(json.dumps(answer(PipelineCase(**json.loads(line)), models)), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
