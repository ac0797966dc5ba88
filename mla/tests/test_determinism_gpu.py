"""Same input, same bits: beside other work on the GPU, in other threads, on two streams and two GPUs at once."""

import dataclasses
import threading

import pytest
import torch

from mla.tests.kernel_cases import KERNELS, assert_same_bits, check, decode, make

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kernel", KERNELS)]
REPEATS = 200


def _problem(seed=0):
    # ragged, so that both kernels divide some requests and merge them
    return make([1, 63, 64, 65, 0, 1000, 9000, 129], num_heads=128, page_size=64, seed=seed)


def _assert_repeats(results, expected):
    for result in results:
        assert_same_bits(result, expected)


def test_200_times(kernel):
    p = _problem()
    expected = decode(kernel, p)
    check(expected, p)
    for _ in range(REPEATS):
        assert_same_bits(decode(kernel, p), expected)


def test_200_times_beside_a_bandwidth_hog(kernel):
    """Copies on another stream take bandwidth, L2 and SMs, so that every CTA's timing changes."""
    p = _problem()
    expected = decode(kernel, p)
    source = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    hog, own = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    results = []
    for _ in range(REPEATS):
        with torch.cuda.stream(hog):
            target.copy_(source)
        with torch.cuda.stream(own):
            results.append(decode(kernel, p))
    still_running = not hog.query()
    torch.cuda.synchronize()
    assert still_running, "the hog ended before the calls were launched: make it larger"
    _assert_repeats(results, expected)


def test_two_streams_at_once(kernel):
    """Other data on each, in flight together."""
    problems = [_problem(seed) for seed in range(2)]
    expected = [decode(kernel, p) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    results = [[], []]
    torch.cuda.synchronize()
    for _ in range(REPEATS):
        for p, stream, found in zip(problems, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(decode(kernel, p))
    torch.cuda.synchronize()
    for found, first in zip(results, expected, strict=True):
        _assert_repeats(found, first)


def test_in_a_new_thread(kernel):
    """It has no CUDA context until something makes one; other addresses, so that nothing is prepared already."""
    p = _problem()
    expected = decode(kernel, p)
    copied = dataclasses.replace(p, kv_cache=p.kv_cache.clone())
    torch.cuda.synchronize()
    results = []
    thread = threading.Thread(target=lambda: results.append(decode(kernel, copied)))
    thread.start()
    thread.join()
    assert len(results) == 1, "the call in the thread raised"
    assert_same_bits(results[0], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_at_once(kernel):
    """From a thread each, which meet in what is kept between calls."""
    first = _problem()
    names = ("q_absorbed", "kv", "kv_cache", "block_table", "seq_lens")
    other = dataclasses.replace(first, **{name: getattr(first, name).to("cuda:1") for name in names})
    expected = decode(kernel, first)
    results, errors = {0: [], 1: []}, []

    def run(index, p):
        try:
            with torch.cuda.device(index):
                for _ in range(REPEATS):
                    results[index].append(decode(kernel, p))
                torch.cuda.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((first, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    _assert_repeats(results[0], expected)
    _assert_repeats([tuple(t.to("cuda:0") for t in result) for result in results[1]], expected)
