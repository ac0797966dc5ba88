"""Deliberate breaks, each with the tests of which at least one must fail (`make breaks`; see `test_breaks.py`)."""

from typing import NamedTuple


class Break(NamedTuple):
    """One guard taken away.

    Args:
        file: under mla/.
        old: text that occurs once in the file.
        new: what replaces it.
        tests: under mla/tests/, as pytest takes them.
        needs: "" for any machine, or "hopper".
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    needs: str = ""


_LOAD_PAGE = "page = tl.load(block_table_ptr + start // PAGE_SIZE)"
_LENGTHS = "test_validate.py::test_lengths_out_of_range_read_nothing_outside"
_PAGES = "test_validate.py::test_pages_out_of_range_read_nothing_outside"
_FAR = "kernels/test_portable.py::test_offsets_beyond_2_to_31_elements"
_FAR_OUT = "test_faults.py::test_query_and_output_beyond_2_to_31_elements"
_PARTS = "kernels/test_merge.py::test_empty_parts_are_ignored_whatever_they_hold"
_PLAN = "kernels/test_work_plan.py"
_MODEL = "kernels/test_barrier_model.py::test_model_is_the_kernels_protocol"

PORTABLE = {
    "mask": Break(
        "kernels/tile.py",
        'scores = tl.where(is_token[None, :], scores, float("-inf"))',
        "scores = scores + 0.0",
        ("test_decode.py::test_matches_the_reference",),
    ),
    "rescaling": Break(
        "kernels/tile.py",
        "latent, acc * correction[:, None],",
        "latent, acc,",
        ("test_faults.py::test_logits",),
    ),
    "maximum": Break(
        "kernels/tile.py",
        "new_max = tl.maximum(row_max, tl.max(scores, axis=1))",
        "new_max = tl.maximum(row_max, 0.0)",
        ("test_faults.py::test_logits",),
    ),
    "empty row": Break(
        "kernels/tile.py",
        "safe_sum = tl.where(is_empty, 1.0, row_sum)",
        "safe_sum = row_sum",
        ("test_faults.py::test_requests_without_tokens",),
    ),
    "tail clearing": Break(
        "kernels/portable.py",
        "mask=is_token, other=-1)",
        "mask=is_token, other=0)",
        ("test_faults.py::test_unused_slots_may_hold_anything",),
    ),
    "int64 page": Break("kernels/portable.py", f"{_LOAD_PAGE}.to(tl.int64)", _LOAD_PAGE, (_FAR,)),
    "int64 pages of a tile": Break(
        "kernels/portable.py",
        "mask=is_token, other=-1).to(tl.int64)",
        "mask=is_token, other=-1)",
        (_FAR,),
    ),
    "int64 slot": Break(
        "kernels/portable.py",
        "slots = (tokens % PAGE_SIZE).to(tl.int64)",
        "slots = tokens % PAGE_SIZE",
        (_FAR,),
    ),
    "int64 request": Break(
        "kernels/portable.py",
        "b = (program // (head_blocks * num_splits)).to(tl.int64)",
        "b = program // (head_blocks * num_splits)",
        (_FAR_OUT,),
    ),
    "int64 row of the merge": Break(
        "kernels/merge.py", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)", (_FAR_OUT,)
    ),
    "split bound": Break(
        "kernels/portable.py",
        "end_token = tl.minimum(first_token + split_len, seq_len)",
        "end_token = first_token + split_len",
        ("test_decode.py::test_matches_the_reference", "test_faults.py::test_more_splits_than_tiles"),
    ),
    "last split": Break(
        "kernels/portable.py",
        "split_len = tl.cdiv(tl.cdiv(seq_len, BLOCK_N), num_splits) * BLOCK_N",
        "split_len = tl.cdiv(seq_len, BLOCK_N) // num_splits * BLOCK_N",
        ("test_decode.py::test_matches_the_reference",),
    ),
    "heads past the end": Break(
        "kernels/portable.py",
        "tl.store(out_row + rank, out, mask=is_head[:, None])",
        "tl.store(out_row + rank, out)",
        ("test_faults.py::test_strided_tensors",),
    ),
    "table's width": Break(
        "kernels/portable.py",
        "tl.minimum(tl.load(seq_lens_ptr + b), max_seq_len)",
        "tl.minimum(tl.load(seq_lens_ptr + b), max_seq_len + 1)",
        (_LENGTHS,),
    ),
    "page behind the pool, by descriptor": Break(
        "kernels/portable.py",
        "row = tl.where((page >= 0) & (page < num_pages), page * PAGE_SIZE + start % PAGE_SIZE, -BLOCK_N)",
        "row = page * PAGE_SIZE + start % PAGE_SIZE",
        (_PAGES,),
    ),
    "page behind the pool, by pointer": Break(
        "kernels/portable.py",
        "is_held = ((pages >= 0) & (pages < num_pages))[:, None]",
        "is_held = ((pages >= 0) & (pages <= num_pages))[:, None]",
        (f"{_PAGES}[first behind-p16-portable]",),
    ),
    "pool without pages": Break(
        "kernels/portable.py",
        "block_table.shape[1] * page_size if len(kv_cache) else 0",
        "block_table.shape[1] * page_size",
        ("test_validate.py::test_a_pool_without_pages_is_not_read",),
    ),
}

MERGE = {
    "the other infinity": Break("kernels/merge.py", ' | (part_lse == float("inf"))', "", (_PARTS,)),
    "-inf minus -inf": Break(
        "kernels/merge.py",
        """    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.where(is_empty, 0.0, tl.exp(part_lse - shift)), axis=0)
""",
        """    shift = largest
    total = tl.sum(tl.exp(part_lse - shift), axis=0)
""",
        (_PARTS,),
    ),
    "empty parts' outputs": Break(
        "kernels/merge.py", "mask=is_used[:, None], other=0.0", "mask=(i < num_splits)[:, None], other=0.0", (_PARTS,)
    ),
    "parts past a chunk": Break(
        "kernels/merge.py",
        "for start in range(0, num_splits, CHUNK):",
        "for start in range(0, CHUNK, CHUNK):",
        ("kernels/test_merge.py::test_merge_matches_fp64",),
    ),
}

HOST = {
    "lengths' dtype": Break(
        "checks.py",
        'for name in ("block_table", "seq_lens"):',
        'for name in ("block_table",):',
        ("test_faults.py::test_integers_of_another_type_are_refused",),
    ),
    "negative lengths": Break(
        "checks.py",
        "is_wrong_length = (lengths < 0) | (lengths > max_pages * page_size)",
        "is_wrong_length = lengths > max_pages * page_size",
        ("test_validate.py::test_validate_names_the_request",),
    ),
    "entries in use": Break(
        "checks.py",
        "* page_size < lengths[:, None]",
        "* page_size <= lengths[:, None]",
        ("test_validate.py::test_validate_names_the_request", "test_validate.py::test_validate_agrees_with_the_rule"),
    ),
    "a plan of another division": Break(
        "decode.py",
        "plan.batch_invariant != batch_invariant",
        "plan.batch_invariant is None",
        ("test_batch_invariant.py::test_a_plan_carries_the_mode",),
    ),
    "whole requests": Break(
        "decode.py",
        "if batch_invariant and num_splits is None:",
        "if batch_invariant and num_splits is not None:",
        ("test_batch_invariant.py::test_the_batch_does_not_choose_the_splits",),
    ),
}

# Of the Hopper kernel, what plain Python can see: the plan, and the models of its barriers and its merge.
MODELS = {
    "lengths of the plan": Break(
        "kernels/work_plan.py",
        "tl.minimum(tl.maximum(tl.load(seq_lens_ptr + index, mask=mask, other=0), 0), MAX_SEQ_LEN)",
        "tl.load(seq_lens_ptr + index, mask=mask, other=0)",
        (f"{_PLAN}::test_lengths_out_of_range_count_as_the_nearest",),
    ),
    "tokens of a part's first run": Break(
        "kernels/work_plan.py",
        "tl.where(request == end_request, tl.minimum(first_len, end_tile * 64), first_len)",
        "first_len",
        (f"{_PLAN}::test_small_batches", f"{_PLAN}::test_dearest_part"),
    ),
    "cuts before the first tile": Break(
        "kernels/work_plan.py",
        "if tile < _SHORTEST_RUN:",
        "if tile < 0:",
        (f"{_PLAN}::test_a_first_request_of_one_tile",),
    ),
    "the counter's first amount": Break(
        "kernels/hopper_merge.py",
        "gl.where(run == 0, _FULL_COUNT - num_runs + 1, 1)",
        "gl.where(run == 0, _FULL_COUNT - num_runs, 1)",
        ("kernels/test_hopper_merge.py::test_launches_in_random_orders",),
    ),
    "the merge's wait": Break(
        "kernels/hopper_merge.py",
        "while _load_acquire(plan_row + 2 + head_block) % _FULL_COUNT != 0:",
        "while _load_acquire(plan_row + 2 + head_block) < 0:",
        ("kernels/test_hopper_merge.py",),
    ),
    "an acquiring load": Break(
        "kernels/hopper_merge.py",
        "ld.acquire.gpu.global.u32",
        "ld.relaxed.gpu.global.u32",
        ("kernels/test_hopper_merge.py::test_loads_of_the_counter_are_acquiring",),
    ),
    "a wait of the producer": Break(
        "kernels/hopper.py", "            mbarrier.wait(bars[ODD_LEFT_FREE], parity)\n", "", (_MODEL,)
    ),
    "a release": Break(
        "kernels/hopper.py", "            mbarrier.arrive(bars[EVEN_RIGHT_FREE], count=1)\n", "", (_MODEL,)
    ),
}

HOPPER = {
    "mask": Break(
        "kernels/hopper.py",
        "column % ROWS >= ROWS - held",
        "column % ROWS >= ROWS - held - 1",
        ("test_faults.py::test_any_number_of_heads",),
        "hopper",
    ),
    "tail clearing": Break(
        "kernels/hopper.py",
        "row = gl.where(held <= 0, -64, (tile % TILES_PER_PAGE) * 64 + held - 64)",
        "row = (tile % TILES_PER_PAGE) * 64",
        ("test_faults.py::test_unused_entries_may_hold_anything",),
        "hopper",
    ),
    "empty row": Break(
        "kernels/hopper.py",
        "safe_sum = gl.where(has_tokens, row_sum, 1.0)",
        "safe_sum = row_sum",
        ("test_faults.py::test_requests_without_tokens",),
        "hopper",
    ),
    "empty row's mark": Break(
        "kernels/hopper.py",
        'lse = gl.where(has_tokens, (row_max + gl.log2(safe_sum)) * _LN_2, float("-inf"))',
        "lse = (row_max + gl.log2(safe_sum)) * _LN_2",
        ("test_faults.py::test_requests_without_tokens",),
        "hopper",
    ),
    "split bound": Break(
        "kernels/hopper.py",
        "tokens = gl.minimum(tokens, part[END_TILE] * 64)",
        "tokens = tokens + 0",
        ("kernels/test_hopper_gpu.py::test_dtypes_logits_and_lengths",),
        "hopper",
    ),
    "table's width": Break(
        "kernels/hopper.py",
        "gl.maximum(gl.load(seq_lens_ptr + part[REQUEST] + w), 0), max_seq_len)",
        "gl.maximum(gl.load(seq_lens_ptr + part[REQUEST] + w), 0), max_seq_len + 1)",
        (_LENGTHS,),
        "hopper",
    ),
    "negative length": Break(
        "kernels/hopper.py",
        "gl.maximum(gl.load(seq_lens_ptr + part[REQUEST] + w), 0)",
        "gl.load(seq_lens_ptr + part[REQUEST] + w)",
        (_LENGTHS,),
        "hopper",
    ),
    "table's width in a part's first run": Break(
        "kernels/hopper.py",
        "max_seq_len - _field(parts_ptr, FIRST_TILE) * 64)",
        "max_seq_len + 1 - _field(parts_ptr, FIRST_TILE) * 64)",
        (_LENGTHS,),
        "hopper",
    ),
    "rows that moved": Break(
        "kernels/hopper.py",
        "return gl.where(grows, tile_max, row_max), grows.to(gl.int32)",
        "return gl.where(grows, tile_max, row_max), (grows & (tile_max > 0.0)).to(gl.int32)",
        ("test_faults.py::test_logits",),
        "hopper",
    ),
    "int64 request of the merge": Break(
        "kernels/hopper_merge.py",
        "out_at = request.to(gl.int64) * stride_out_batch",
        "out_at = request * stride_out_batch",
        (_FAR_OUT,),
        "hopper",
    ),
    "rows of the merge": Break(
        "kernels/hopper_merge.py",
        "end_row = (run + 1) * heads // num_runs",
        "end_row = (run + 1) * (heads // num_runs)",
        ("test_faults.py::test_scratch_may_hold_nan",),
        "hopper",
    ),
    "whole requests": Break(
        "decode.py",
        "mode = WHOLE.value if batch_invariant else None",
        "mode = None",
        ("test_batch_invariant.py::test_alone_and_in_batches",),
        "hopper",
    ),
}

BREAKS = {
    f"{group}: {name}": value
    for group, breaks in dict(portable=PORTABLE, merge=MERGE, host=HOST, models=MODELS, hopper=HOPPER).items()
    for name, value in breaks.items()
}
