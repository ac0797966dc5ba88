"""`model.generate` of a patched model: the original's tokens, from a latent cache."""

# before transformers, which imports triton: without a GPU the interpreter must be chosen first
import mla.kernels  # noqa: F401

# isort: split
import copy

import pytest
import torch
from transformers import CompileConfig, DynamicCache

from mla import patch_model
from mla.hf.cache import LatentLayer
from mla.tests.hf_models import cache_of, counted_expansions, tiny_model

NEW_TOKENS = 6
OPTIONS = {
    "greedy": {},
    "sampling": dict(do_sample=True, temperature=1.5),
    "beams": dict(num_beams=3, num_return_sequences=2),
    "static cache": dict(cache_implementation="static"),
    "chunked prefill": dict(prefill_chunk_size=4),
    "several answers": dict(do_sample=True, num_return_sequences=2),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    original = tiny_model("v3", tmp_path_factory.mktemp("v3"))
    return original, patch_model(copy.deepcopy(original))


@pytest.fixture
def prompt():
    tokens = torch.randint(2, 61, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    # padding is where a mask of zeros is, whatever its tokens are
    return dict(input_ids=tokens, attention_mask=mask)


def generate(model, prompt, **options):
    torch.manual_seed(0)
    with torch.no_grad():
        return model.generate(**prompt, **{"max_new_tokens": NEW_TOKENS} | options, return_dict_in_generate=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_same_tokens(pair, prompt, name):
    original, patched = pair
    expected = generate(original, prompt, **OPTIONS[name])
    with counted_expansions(patched) as expansions:
        actual = generate(patched, prompt, **OPTIONS[name])
    assert actual.sequences.shape[1] == 9 + NEW_TOKENS
    assert torch.equal(actual.sequences, expected.sequences)
    assert len(torch.unique(expected.sequences[:, 9:])) > 3
    assert all(isinstance(layer, LatentLayer) for layer in cache_of(actual).layers)
    # once a layer for the prompt, never in a decode step. In chunks of 4, 4 and 1 tokens: the second meets cached
    # tokens of different number, and is computed request by request; the third is one token, and decoded
    expected_expansions = 1 + 3 if name == "chunked prefill" else 1
    assert len(expansions) == expected_expansions * patched.config.num_hidden_layers


def test_padding_changes_nothing(pair, prompt):
    """A request of a padded batch gives what it gives alone."""
    _, patched = pair
    together = generate(patched, prompt).sequences
    alone = generate(patched, dict(input_ids=prompt["input_ids"][1:2, 4:])).sequences
    assert torch.equal(together[1, 4:], alone[0])


@pytest.mark.parametrize("kind", ["default", "given"])
def test_continuing_a_cache(pair, prompt, kind):
    """A second turn on the first one's cache: the new text comes as a chunk."""
    answers = []
    more = torch.randint(2, 61, (3, 5), generator=torch.Generator().manual_seed(1))
    for model in pair:
        options = dict(past_key_values=DynamicCache(config=model.config)) if kind == "given" else {}
        first = generate(model, prompt, **options)
        tokens = torch.cat((first.sequences, more), dim=1)
        mask = torch.cat((prompt["attention_mask"], torch.ones(3, NEW_TOKENS + 5, dtype=torch.long)), dim=1)
        second = generate(
            model, dict(input_ids=tokens, attention_mask=mask), past_key_values=cache_of(first), max_new_tokens=4
        )
        answers.append(second.sequences)
    assert torch.equal(*answers)
    layers = cache_of(second).layers
    assert layers[0].store.seq_lens.tolist() == [23, 19, 23]


def test_compiled_decode_with_a_static_cache(pair, prompt):
    """What `generate` does on a GPU by itself: one graph without breaks, compiled once for all decode steps."""
    original, patched = pair
    config = CompileConfig(fullgraph=True, mode=None, backend="aot_eager")
    config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected = generate(original, prompt)
    actual = generate(patched, prompt, cache_implementation="static", compile_config=config)
    assert torch.equal(actual.sequences, expected.sequences)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
