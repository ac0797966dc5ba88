"""Kinds of fault that public MLA kernels had, each with a test that fails on a kernel with that fault.

On the CPU these run the portable kernel, on a Hopper GPU the Hopper kernel too; both merge what they divided.

| Fault | Test |
|---|---|
| what unused slots and tails of pages hold gets into the result | `test_unused_slots_may_hold_anything` |
| another request's rows do | `test_nan_of_one_request_stays_there` |
| unused table entries are followed, or read far ahead | `test_unused_entries_may_hold_anything` |
| requests without tokens: NaN, or memory that was not written | `test_requests_without_tokens` |
| 32-bit offsets into query and output | `test_query_and_output_beyond_2_to_31_elements` |
| ... into scratch | `test_scratch_beyond_2_to_31_elements` |
| ... into the cache | `kernels/test_portable.py`, `test_decode_gpu.py`, `test_hopper_reads_beyond_2_to_31_elements` |
| parts without tiles | `test_more_splits_than_tiles` |
| scratch that is read before it is written | `test_scratch_may_hold_nan` |
| -inf minus -inf; the mark of an empty part | `kernels/test_merge.py`, `test_requests_without_tokens` |
| logits far from 0, maxima that rise or fall, one outlier at the end | `test_logits` |
| strides are taken for sizes | `test_decode.py`, `test_strided_tensors` |
| integers of another width are misread | `test_integers_of_another_type_are_refused` |
| numbers of heads and page sizes that tiles do not divide | `test_any_number_of_heads`, `test_any_page_size` |
| grid axes end at 65,535 | `test_decode_gpu.py` |
| a page is listed twice, or by several requests | `test_shared_pages` |
| a captured graph keeps lengths or tables | `test_decode_gpu.py`, `test_graph_replays_many_times` |
| the pool's size costs time | `test_a_large_pool_costs_nothing` |
| lengths and page ids out of range are followed | `test_validate.py` |
"""

import dataclasses

import pytest
import torch

from mla.tests.kernel_cases import (
    DEVICE,
    DTYPE,
    KERNELS,
    LENGTHS,
    ON_GPU,
    assert_same_bits,
    check,
    decode,
    make,
    poisoned_memory,
    request,
    with_rows,
)

kernels = pytest.mark.parametrize("kernel", KERNELS)


def _with_page_0_unused(p):
    """Page 0 is where masked loads of a table lead, if what they give is followed."""
    num_pages = len(p.kv_cache)
    (spare,) = set(range(num_pages)) - set(p.block_table.flatten().tolist())
    kv_cache, table = p.kv_cache.clone(), p.block_table.clone()
    kv_cache[[0, spare]] = p.kv_cache[[spare, 0]]
    return dataclasses.replace(p, kv_cache=kv_cache, block_table=table.masked_fill(table == 0, spare))


@kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 60_000.0], ids=str)
def test_unused_slots_may_hold_anything(kernel, value):
    """Unused slots of pages in use, and pages that no request uses; finite is what earlier requests left."""
    p = _with_page_0_unused(make())
    unused = p.kv_cache.isnan()
    assert unused[0].all()
    check(decode(kernel, dataclasses.replace(p, kv_cache=p.kv_cache.masked_fill(unused, value))), p)


@kernels
def test_nan_of_one_request_stays_there(kernel):
    """And is not hidden there."""
    p = make()
    poisoned = LENGTHS.index(max(LENGTHS))
    kv = p.kv.clone()
    kv[poisoned] = torch.nan
    out, lse = decode(kernel, with_rows(p, kv))
    assert out[poisoned].isnan().all()
    others = [b for b in range(len(LENGTHS)) if b != poisoned]
    expected_out, expected_lse = decode(kernel, p)
    assert_same_bits((out[others], lse[others]), (expected_out[others], expected_lse[others]))


@kernels
@pytest.mark.parametrize("garbage", [-1, 2**31 - 1, -(2**31), "a page of NaN"], ids=str)
def test_unused_entries_may_hold_anything(kernel, garbage):
    """Past a request's pages, also far past them and past where a kernel may look ahead."""
    p = make(num_heads=128 if ON_GPU else 4, page_size=64)  # on a GPU with the prefetch
    num_pages = len(p.kv_cache)
    unused = p.block_table >= num_pages
    if garbage == "a page of NaN":
        (garbage,) = set(range(num_pages)) - set(p.block_table[~unused].tolist())
        assert p.kv_cache[garbage].isnan().all()
    table = torch.full((len(LENGTHS), p.block_table.shape[1] + 300), garbage, dtype=torch.int32, device=DEVICE)
    table[:, : unused.shape[1]] = p.block_table.masked_fill(unused, garbage)
    check(decode(kernel, dataclasses.replace(p, block_table=table)), p)


@kernels
@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [0, 5, 0], [70, 0, 0, 64], [0, 130, 3, 0]], ids=str)
def test_requests_without_tokens(kernel, lengths):
    p = make(lengths)
    for options in ({}, {"num_splits": 1}) if kernel == "portable" else ({}, {"batch_invariant": True}):
        with poisoned_memory():
            result = decode(kernel, p, **options)
        check(result, p)


@pytest.mark.parametrize("num_splits", [2, 7, 40], ids=lambda s: f"s{s}")
def test_more_splits_than_tiles(num_splits):
    p = make()
    with poisoned_memory():
        result = decode("portable", p, num_splits=num_splits)
    check(result, p)


@kernels
@pytest.mark.parametrize("num_heads", [4, 70], ids=lambda h: f"h{h}")
def test_scratch_may_hold_nan(kernel, num_heads):
    """Partial results, the plan's slots and counters, out and lse all begin as NaN or garbage."""
    p = make([3000, 700, 0, 9000] if ON_GPU else [100, 0, 40], num_heads)
    with poisoned_memory():
        result = decode(kernel, p)
    check(result, p)


@kernels
def test_query_and_output_beyond_2_to_31_elements(kernel):
    """Requests far apart in memory that, on the CPU, the system maps as it is touched."""
    p = make([3000, 0, 700] if ON_GPU else [37, 0, 70])
    batch_size, num_heads, width = p.q_absorbed.shape
    rank, far = p.config.kv_lora_rank, 2**30 + 2**29
    q, out = (
        torch.empty(2 * far + num_heads * w, dtype=DTYPE, device=DEVICE).as_strided(
            (batch_size, num_heads, w), (far, w, 1)
        )
        for w in (width, rank)
    )
    q.copy_(p.q_absorbed)
    out.fill_(torch.nan)
    check(decode(kernel, dataclasses.replace(p, q_absorbed=q), out=out), p)


@pytest.mark.gpu
def test_scratch_beyond_2_to_31_elements():
    batch_size, num_splits, num_heads = 520, 64, 128
    assert batch_size * num_splits * num_heads * 512 > 2**31
    p = make([70] * batch_size, num_heads)
    out, lse = decode("portable", p, num_splits=num_splits)
    for b in (0, batch_size // 2, batch_size - 1):
        check((out[b : b + 1], lse[b : b + 1]), request(p, b))


@pytest.mark.gpu
def test_hopper_reads_beyond_2_to_31_elements():
    """With the prefetch, which computes addresses by itself."""
    p = make([3000, 64], num_heads=128, page_size=64)
    stride = 2**31 // (len(p.kv_cache) - 4) // 16 * 16
    pool = torch.empty(len(p.kv_cache) * stride, dtype=DTYPE, device=DEVICE)
    pool = pool.as_strided(p.kv_cache.shape, (stride, 576, 1))
    assert pool[-1].storage_offset() > 2**31
    pool.copy_(p.kv_cache)
    check(decode("hopper", dataclasses.replace(p, kv_cache=pool)), p)


@kernels
@pytest.mark.parametrize("shape", ["rising", "rising below 0", "falling", "all large", "all very negative", "outlier"])
def test_logits(kernel, shape):
    """Up to ±1e5: a common term of every score, which the last rotated column carries.

    Requests are divided and whole: a part of one tile rescales nothing, and the last of a rising one hides the rest.
    """
    lengths = [131, 1, 700, 64] if ON_GPU else [131, 1, 64]
    p = make(lengths)
    column, length = p.config.cache_dim - 1, p.kv.shape[1]
    q, kv = p.q_absorbed.clone(), p.kv.clone()
    q[..., column] = 1e3
    # the row's value at which a logit is 1e5
    largest = 1e5 / (1e3 * p.softmax_scale)
    ramp = torch.linspace(-largest, largest, length, device=DEVICE)
    values = {
        "rising": ramp,
        # from -120 to -20, by 9 (13 in base 2) in 64 of 700 tokens: more than the Hopper kernel's THRESHOLD
        "rising below 0": torch.linspace(-120, -20, length, device=DEVICE) * (largest / 1e5),
        "falling": -ramp,
        "all large": torch.full_like(ramp, largest),
        "all very negative": torch.full_like(ramp, -largest),
        "outlier": torch.zeros_like(ramp),
    }[shape]
    kv[..., column] = torch.where(kv[..., column].isnan(), torch.nan, values.to(kv.dtype))
    if shape == "outlier":
        for b, n in enumerate(lengths):
            kv[b, n - 1, column] = largest / 100
    p = with_rows(dataclasses.replace(p, q_absorbed=q), kv)
    for options in ({}, {"num_splits": 1}) if kernel == "portable" else ({}, {"batch_invariant": True}):
        check(decode(kernel, p, **options), p)


@kernels
@pytest.mark.parametrize("page_size", [16, 64], ids=lambda n: f"p{n}")
def test_strided_tensors(kernel, page_size):
    """Everything is cut out of larger tensors of NaN or garbage, in steps that the Hopper kernel takes too."""
    p = make(page_size=page_size, num_heads=70 if ON_GPU else 5)
    batch_size, num_heads, width = p.q_absorbed.shape
    rank, max_pages = p.config.kv_lora_rank, p.block_table.shape[1]
    q = torch.full((batch_size, num_heads, 2, width + 8), torch.nan, dtype=DTYPE, device=DEVICE)
    q[:, :, 1, :width] = p.q_absorbed
    pool = torch.full((len(p.kv_cache), page_size + 3, width + 8), torch.nan, dtype=DTYPE, device=DEVICE)
    pool[:, 2:-1, :width] = p.kv_cache
    table = torch.full((batch_size, max_pages + 3), -7, dtype=torch.int32, device=DEVICE)
    table[:, 2:-1] = p.block_table
    guarded = torch.full((batch_size + 2, num_heads + 2, rank + 16), 7.0, dtype=DTYPE, device=DEVICE)
    inside = (slice(1, -1), slice(1, -1), slice(8, -8))
    out = guarded[inside].fill_(torch.nan)
    strided = dataclasses.replace(
        p, q_absorbed=q[:, :, 1, :width], kv_cache=pool[:, 2:-1, :width], block_table=table[:, 2:-1]
    )
    check(decode(kernel, strided, out=out), p)
    guarded[inside] = 7.0
    assert (guarded == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8, torch.uint32, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["block_table", "seq_lens"])
def test_integers_of_another_type_are_refused(name, dtype):
    p = make([5, 3])
    wrong = dataclasses.replace(p, **{name: getattr(p, name).clamp(max=100).to(dtype)})
    with pytest.raises(TypeError, match=rf"{name}: expected torch.int32, got {dtype}; call .int\(\)"):
        decode("portable", wrong)


@kernels
@pytest.mark.parametrize("num_heads", [1, 3, 16, 17, 63, 65, 127, 128], ids=lambda h: f"h{h}")
def test_any_number_of_heads(kernel, num_heads):
    p = make([131, 37] if ON_GPU else [37], num_heads)
    with poisoned_memory():
        result = decode(kernel, p)
    check(result, p)


@pytest.mark.parametrize("page_size", [1, 3, 16, 48, 64, 100, 256], ids=lambda n: f"p{n}")
def test_any_page_size(page_size):
    """Whichever kernel takes it."""
    p = make([0, page_size - 1, page_size, page_size + 1, 150], page_size=page_size)
    check(decode("portable", p, num_splits=None), p)


@kernels
@pytest.mark.parametrize("page_size", [16, 64], ids=lambda n: f"p{n}")
def test_shared_pages(kernel, page_size):
    """A page stands twice in a request's row, and two requests begin with the same pages."""
    p = make([3 * page_size + 5, 2 * page_size + 7, 3 * page_size], page_size=page_size)
    kv = p.kv.clone()
    kv[0, page_size : 2 * page_size] = kv[0, :page_size]
    kv[1, : 2 * page_size] = kv[0, : 2 * page_size]
    p = with_rows(p, kv)
    kv_cache, table = p.kv_cache.clone(), p.block_table.clone()
    kv_cache[torch.cat((table[0, 1:2], table[1, :2])).long()] = torch.nan
    table[0, 1] = table[0, 0]
    table[1, :2] = table[0, :2]
    check(decode(kernel, dataclasses.replace(p, kv_cache=kv_cache, block_table=table)), p)


@pytest.mark.gpu
@kernels
def test_graph_replays_many_times(kernel):
    """One capture, then lengths, tables and rows that change in place, as scratch does with each replay."""
    capacity, batch_size = 2048, 6
    p = make([capacity] * batch_size)
    decode(kernel, p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = decode(kernel, p)
    generator = torch.Generator().manual_seed(0)
    for i in range(40):
        longest = capacity if i % 4 else 3
        lengths = torch.randint(0, longest + 1, (batch_size,), generator=generator).tolist()
        drawn = make(lengths, seed=i)
        p.q_absorbed.copy_(drawn.q_absorbed)
        p.kv_cache.fill_(torch.nan)[: len(drawn.kv_cache)] = drawn.kv_cache
        p.block_table.fill_(-1)[:, : drawn.block_table.shape[1]] = drawn.block_table
        p.seq_lens.copy_(drawn.seq_lens)
        for tensor in result:
            tensor.fill_(torch.nan)
        graph.replay()
        check(result, drawn)


@pytest.mark.gpu
@kernels
def test_a_large_pool_costs_nothing(kernel):
    """Ten times the pool, same pages in use: a kernel that touched all of it would take many times as long."""
    small = make([4096] * 32, num_heads=16, page_size=64)
    pool = torch.zeros(10 * len(small.kv_cache), 64, 576, dtype=DTYPE, device=DEVICE)
    pool[: len(small.kv_cache)] = small.kv_cache
    problems = {"small": small, "large": dataclasses.replace(small, kv_cache=pool)}
    # in graphs, so that the host, which other tests may keep busy, has no part in it
    graphs = {name: torch.cuda.CUDAGraph() for name in problems}
    for name, graph in graphs.items():
        decode(kernel, problems[name])
        with torch.cuda.graph(graph):
            for _ in range(10):
                decode(kernel, problems[name])
    times = {name: [] for name in problems}
    for _ in range(25):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end))
    # other tests may share the GPU, so the best times are compared
    assert min(times["large"]) < 1.5 * min(times["small"])
