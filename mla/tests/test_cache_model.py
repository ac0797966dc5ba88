"""`PagedCache` against a model that knows no pages: for each request, the list of its rows."""

from collections import Counter

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mla.cache import OutOfPages
from mla.tests.test_cache import append, as_problem, check_decode, make_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_PAGES, PAGE_SIZE, NUM_LAYERS = 9, 4, 2


class CacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.cache = make_cache(DEVICE, NUM_PAGES, PAGE_SIZE, NUM_LAYERS)
        # (num_layers, tokens, cache_dim) of each request
        self.rows: dict[int, torch.Tensor] = {}
        self.freed: list[int] = []
        self.seed = 0

    def _some(self, data, min_size=1) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=min_size, max_size=4, unique=True))

    def _pages(self) -> dict[int, list[int]]:
        """The pages of each request, as its row of the table has them."""
        table, seq_lens = (x.tolist() for x in self.cache.tables(list(self.rows)))
        return {r: row[: -(-n // PAGE_SIZE)] for r, row, n in zip(self.rows, table, seq_lens, strict=True)}

    def _state(self):
        return (
            self._pages(),
            self.cache.num_free_pages,
            self.cache.requests,
            self.cache.kv_cache.view(torch.int16).tolist(),
        )

    @initialize()
    def first(self):
        self.allocate()

    @precondition(lambda self: len(self.rows) < 5)
    @rule()
    def allocate(self):
        request = self.cache.allocate()
        assert request not in self.rows
        assert request not in self.freed
        self.rows[request] = self.cache.kv_cache.new_empty(NUM_LAYERS, 0, 48)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def lengthen(self, data):
        requests = self._some(data)
        counts = [data.draw(st.integers(0, 9)) for _ in requests]
        needed, owners = 0, Counter(page for pages in self._pages().values() for page in pages)
        for request, count in zip(requests, counts, strict=True):
            length = self.rows[request].shape[1]
            needed += -(-(length + count) // PAGE_SIZE) - -(-length // PAGE_SIZE)
            if count and length % PAGE_SIZE:
                last = self._pages()[request][-1]
                needed += owners[last] > 1
                owners[last] -= 1
        if needed > self.cache.num_free_pages:
            before = self._state()
            try:
                self.cache.reserve(requests, counts)
            except OutOfPages as error:
                assert (error.needed, error.free) == (needed, self.cache.num_free_pages)
            else:
                raise AssertionError("expected OutOfPages")
            assert self._state() == before
            return
        free = self.cache.num_free_pages
        self.seed += 1
        new = append(self.cache, requests, counts, self.seed)
        assert self.cache.num_free_pages == free - needed
        for request, rows in zip(requests, new, strict=True):
            self.rows[request] = torch.cat((self.rows[request], rows), dim=1)

    @precondition(lambda self: 0 < len(self.rows) < 5)
    @rule(data=st.data())
    def fork(self, data):
        (parent,) = self._some(data)[:1]
        length = data.draw(st.none() | st.integers(0, self.rows[parent].shape[1]))
        free = self.cache.num_free_pages
        self.rows[self.cache.fork(parent, length)] = self.rows[parent][:, :length]
        assert self.cache.num_free_pages == free

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data):
        requests = self._some(data)
        self.cache.free(requests)
        for request in requests:
            del self.rows[request]
        self.freed += requests

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def free_again(self, data):
        requests = [*(self._some(data) if self.rows else []), data.draw(st.sampled_from(self.freed))]
        before = self._state()
        try:
            self.cache.free(requests)
        except ValueError as error:
            assert f"got {requests[-1]}, which was freed" in str(error)
        else:
            raise AssertionError("expected a ValueError")
        assert self._state() == before

    @invariant()
    def every_request_has_its_rows(self):
        for request, pages in self._pages().items():
            length = self.rows[request].shape[1]
            assert self.cache.length(request) == length
            rows = self.cache.kv_cache[:, pages].flatten(1, 2)[:, :length]
            assert torch.equal(rows, self.rows[request])

    @invariant()
    def other_pages_are_free_and_poisoned(self):
        owned = {page for pages in self._pages().values() for page in pages}
        others = sorted(set(range(NUM_PAGES)) - owned)
        assert self.cache.num_free_pages == len(others)
        assert self.cache.kv_cache[:, others].isnan().all()
        assert self.cache.requests == list(self.rows)

    def teardown(self):
        """What a decode step makes of it, in the last layer."""
        if self.rows:
            block_table, seq_lens = self.cache.tables(list(self.rows))
            rows = [r[-1] for r in self.rows.values()]
            check_decode(as_problem(rows, self.cache.kv_cache[-1], block_table, seq_lens))


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestCacheMachine = CacheMachine.TestCase
