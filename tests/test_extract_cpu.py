"""The CPU shim against expectations made by hand, and attention against float64 arithmetic written out."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import torch

from extract.cpu import attention, eagle, kv
from extract.cpu.shim import sglang_version


def test_slots_are_written_to_and_read_from_the_requests_own_rows():
    table = torch.zeros(3, 6, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([3, 1])
    kv.assign_req_to_token_pool_cpu(rows, table, start, end, torch.tensor([11, 12, 13]), 6)
    assert table.tolist() == [[13, 0, 0, 0, 0, 0], [0] * 6, [0, 11, 12, 0, 0, 0]]
    packed = torch.zeros(3, dtype=torch.int64)
    kv.assign_extend_cache_locs_cpu(rows, table, start, end, packed, 6)
    assert packed.tolist() == [11, 12, 13]


def test_draft_slots_follow_the_requests_tokens():
    table = torch.arange(12).reshape(2, 6)
    out = torch.zeros(4, dtype=torch.int64)
    kv.assign_draft_cache_locs_contiguous_cpu(torch.tensor([1, 0]), table, torch.tensor([2, 3]), out, 6, 1, 2)
    assert out.tolist() == [8, 9, 3, 4]


def test_every_draft_branch_sees_its_own_slots_after_the_prefix():
    table = torch.arange(8).reshape(1, 8)  # prefix 0..2, branch 0 owns 3, 4 and branch 1 owns 5, 6
    rows = kv.build_draft_decode_metadata_cpu(table, torch.tensor([0]), torch.tensor([3]), 2, 2, 8)
    assert rows[:, :5].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]


def test_slots_move_in_every_layer_even_when_a_target_is_a_later_source():
    layers = [torch.arange(8.0).reshape(4, 2), torch.arange(4, dtype=torch.int16).reshape(4, 1)]
    pointers = torch.tensor([layer.data_ptr() for layer in layers])
    strides = torch.tensor([8, 2])  # bytes of one slot
    kv.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([1, 2]), torch.tensor([0, 1]))
    assert layers[0].tolist() == [[0, 1], [0, 1], [2, 3], [6, 7]]
    assert layers[1].flatten().tolist() == [0, 0, 1, 3]


def test_bonus_token_is_the_last_accepted_one():
    bonus = torch.zeros(2, dtype=torch.int64)
    eagle.fill_bonus_tokens_cpu(torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([1, 3]), bonus, 3)
    assert bonus.tolist() == [5, 10]


def test_accepted_slots_are_packed():
    out = torch.zeros(3, dtype=torch.int64)
    eagle.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 1, -1], [3, -1, -1]]), torch.tensor([20, 21, 22, 23]), out)
    assert out.tolist() == [20, 21, 23]


def test_tokens_rotate_within_each_request():
    tokens = torch.tensor([1, 2, 3, 4, 5])
    eagle.rotate_input_ids_cpu(tokens, torch.tensor([0, 3]), torch.tensor([3, 2]), torch.tensor([[8], [9]]))
    assert tokens.tolist() == [2, 3, 8, 5, 9]


def tree(parent_list, selected, *, seq_lens, topk, depth, num_nodes, mode):
    """Builds the tree of every request; returns mask, positions, first children, next siblings."""
    batch = len(seq_lens)
    num_mask = sum(num_nodes * (num_nodes + (length if mode == eagle.FULL_MASK else 0)) for length in seq_lens)
    mask = torch.ones(num_mask, dtype=torch.bool)
    positions = torch.zeros(batch * num_nodes, dtype=torch.int64)
    nodes, children, siblings = (torch.full((batch, num_nodes), -1) for _ in range(3))
    eagle.build_tree_kernel_efficient_cpu(
        torch.tensor(parent_list), torch.tensor(selected), torch.tensor(seq_lens), mask, positions,
        nodes, children, siblings, topk, depth, num_nodes, mode,
    )  # fmt: skip
    return mask, positions, nodes, children, siblings


def test_a_chain_is_a_tree_in_which_each_draft_follows_the_last():
    # topk 1, 3 steps: SGLang lists the parents as -1, 0, 1 and selects candidates 0, 1, 2
    mask, positions, nodes, children, siblings = tree(
        [[-1, 0, 1]], [[0, 1, 2]], seq_lens=[5], topk=1, depth=3, num_nodes=4, mode=1
    )
    assert mask.view(4, 4).tolist() == torch.ones(4, 4).tril().bool().tolist()
    assert positions.tolist() == [5, 6, 7, 8]
    assert nodes.tolist() == [[0, 1, 2, 3]]
    assert children.tolist() == [[1, 2, 3, -1]]
    assert siblings.tolist() == [[-1, -1, -1, -1]]


def test_a_branching_tree_links_siblings_best_first_and_masks_ancestors_only():
    # topk 2: candidates 0, 1 hang on the root; candidates 2, 3 on candidate 0. Kept: 0, 1, 2.
    mask, positions, _, children, siblings = tree(
        [[-1, 0, 1]] * 2, [[0, 1, 2]] * 2, seq_lens=[2, 1], topk=2, depth=2, num_nodes=4, mode=eagle.FULL_MASK
    )
    among = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert mask[:24].view(4, 6).int().tolist() == [[1, 1, *row] for row in among]
    assert mask[24:].view(4, 5).int().tolist() == [[1, *row] for row in among]
    assert positions.tolist() == [2, 3, 3, 4, 1, 2, 2, 3]
    assert children[0].tolist() == [1, 3, -1, -1]
    assert siblings[0].tolist() == [-1, 2, -1, -1]


def test_verification_accepts_along_the_targets_own_choice_and_stops_at_the_first_miss():
    predicts = torch.zeros(8, dtype=torch.int32)
    accepted = torch.full((2, 4), -1, dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int32)
    chain = torch.tensor([[1, 2, 3, -1]] * 2)
    eagle.verify_tree_greedy_cpu(
        predicts, accepted, counts,
        candidates=torch.tensor([[50, 7, 8, 9], [60, 1, 2, 3]]),
        retrive_index=torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]),
        retrive_next_token=chain, retrive_next_sibling=torch.full((2, 4), -1),
        target_predict=torch.tensor([[7, 8, 40, 41], [9, 2, 3, 4]]),
    )  # fmt: skip
    assert counts.tolist() == [2, 0]
    assert accepted.tolist() == [[0, 1, 2, -1], [4, -1, -1, -1]]
    assert predicts.tolist() == [7, 8, 40, 0, 9, 0, 0, 0]


def test_verification_tries_a_sibling_when_the_first_child_misses():
    predicts, accepted = torch.zeros(3, dtype=torch.int32), torch.full((1, 2), -1, dtype=torch.int32)
    counts = torch.zeros(1, dtype=torch.int32)
    eagle.verify_tree_greedy_cpu(
        predicts, accepted, counts,
        candidates=torch.tensor([[5, 6, 7]]), retrive_index=torch.tensor([[0, 1, 2]]),
        retrive_next_token=torch.tensor([[1, -1, -1]]), retrive_next_sibling=torch.tensor([[-1, 2, -1]]),
        target_predict=torch.tensor([7, 0, 9]),
    )  # fmt: skip
    assert (counts.tolist(), accepted.tolist(), predicts.tolist()) == ([1], [[0, 2]], [7, 0, 9])


# ---- attention ----------------------------------------------------------------------------------

HEADS, KV_HEADS, KEY, VALUE, SLOTS = 4, 2, 8, 6, 40  # values narrower than keys, as in MLA


def truth(query, keys, values, *, visible, scale, sinks=None):
    """Softmax attention of one query [heads, K] on the visible keys [S, kv_heads, K], written out in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    rows = []
    for head in range(HEADS):
        group = head * KV_HEADS // HEADS
        weights = torch.exp(scale * keys[visible, group] @ query[head])
        lost = 0.0 if sinks is None else torch.exp(sinks[head].double())
        rows.append((weights / (weights.sum() + lost)) @ values[visible, group])
    return torch.stack(rows)


def cache(seed, *, lengths):
    """A KV pool whose requests own disjoint random slots; row 0 of the table is nobody's."""
    generator = torch.Generator().manual_seed(seed)
    k_buffer, v_buffer = (torch.randn(SLOTS, KV_HEADS, size, generator=generator) for size in (KEY, VALUE))
    order = torch.randperm(SLOTS, generator=generator)
    table = torch.full((len(lengths) + 1, 16), SLOTS - 1, dtype=torch.int32)
    taken = 0
    for row, length in enumerate(lengths, start=1):
        table[row, :length] = order[taken : taken + length]
        taken += length
    return generator, k_buffer, v_buffer, table


def check_extend(prefixes, news, *, tree_mask=None, from_cache=False, window=0, sinks=None):
    lengths = [prefix + new for prefix, new in zip(prefixes, news)]
    generator, k_buffer, v_buffer, table = cache(1, lengths=lengths)
    total, starts = sum(news), torch.tensor([sum(news[:i]) for i in range(len(news))])
    q = torch.randn(total, HEADS, KEY, generator=generator)
    k, v = (torch.randn(total, KV_HEADS, size, generator=generator) for size in (KEY, VALUE))
    for i, (prefix, new) in enumerate(zip(prefixes, news)):  # as SGLang does, the new ones are in the cache too
        own = table[i + 1, prefix : prefix + new].long()
        k_buffer[own], v_buffer[own] = k[starts[i] : starts[i] + new], v[starts[i] : starts[i] + new]
    out = torch.full((total, HEADS, VALUE), float("nan"))
    attention.extend_attention_cpu(
        q, None if from_cache else k.flatten(1), None if from_cache else v.flatten(1), out, k_buffer, v_buffer,
        1.0, 1.0, table, torch.arange(1, len(news) + 1), torch.tensor(lengths), torch.tensor(news), starts, max(news),
        0.3, 0.0, False, window, None, sinks,
        None if tree_mask is None else torch.cat([m.flatten() for m in tree_mask]), True,
    )  # fmt: skip
    for i, (prefix, new) in enumerate(zip(prefixes, news)):
        slots = table[i + 1, : prefix + new].long()
        for row in range(new):
            visible = torch.arange(prefix + new) <= prefix + row
            if tree_mask is not None:
                visible = torch.cat([torch.ones(prefix, dtype=torch.bool), tree_mask[i][row]])
            if window:  # a token sees itself and the window - 1 before it
                visible &= torch.arange(prefix + new) > prefix + row - window
            expected = truth(
                q[starts[i] + row], k_buffer[slots], v_buffer[slots], visible=visible, scale=0.3, sinks=sinks
            )
            torch.testing.assert_close(out[starts[i] + row].double(), expected, atol=1e-6, rtol=1e-5)


def test_prompts_of_different_lengths_attend_causally_to_their_own_tokens():
    check_extend([0, 0, 0], [3, 1, 5])


def test_prompts_of_equal_length_attend_causally_to_their_own_tokens():
    check_extend([0, 0], [4, 4])


def test_chunks_attend_to_their_cached_prefix():
    check_extend([2, 0, 5], [3, 4, 1])
    check_extend([2, 0, 5], [3, 3, 3], from_cache=True)


def test_a_draft_tree_attends_to_ancestors_only():
    branch = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    chain = torch.ones(3, 3, dtype=torch.bool).tril()
    check_extend([4, 2], [3, 3], tree_mask=[branch, chain])
    check_extend([4], [3], tree_mask=[branch])
    check_extend([0], [3], tree_mask=[branch])


SINKS = torch.tensor([-1.0, 0.5, 2.0, 0.0])


def test_a_window_is_counted_in_positions_and_a_sink_takes_its_share():
    for prefixes, news in (([0, 0], [7, 7]), ([0, 6], [5, 2]), ([5, 5, 2], [3, 3, 3])):
        check_extend(prefixes, news, window=3)
        check_extend(prefixes, news, sinks=SINKS)
        check_extend(prefixes, news, window=4, sinks=SINKS)


def test_decoding_within_a_window_and_with_sinks():
    check_decode([3, 7], window=4, sinks=SINKS)
    check_decode([1, 9], window=2)


def test_decoding_stores_the_new_key_and_attends_to_everything():
    check_decode([3, 7])


def check_decode(lengths, *, window=0, sinks=None):
    generator, k_buffer, v_buffer, table = cache(2, lengths=lengths)
    q = torch.randn(2, HEADS, KEY, generator=generator)
    k, v = (torch.randn(2, KV_HEADS, size, generator=generator) for size in (KEY, VALUE))
    loc = torch.tensor([int(table[i + 1, length - 1]) for i, length in enumerate(lengths)])
    out = torch.full((2, HEADS, VALUE), float("nan"))
    attention.decode_attention_cpu(
        q, k_buffer, v_buffer, 1.0, 1.0, out, k.flatten(1), v.flatten(1), loc, torch.empty(0), table,
        torch.tensor([1, 2]), torch.tensor(lengths), 0.3, 0.0, False, window, None, sinks,
    )  # fmt: skip
    for i, length in enumerate(lengths):
        slots = table[i + 1, :length].long()
        assert torch.equal(k_buffer[slots[-1]], k[i]) and torch.equal(v_buffer[slots[-1]], v[i])
        visible = torch.arange(length) >= (length - window if window else 0)
        expected = truth(q[i], k_buffer[slots], v_buffer[slots], visible=visible, scale=0.3, sinks=sinks)
        torch.testing.assert_close(out[i].double(), expected, atol=1e-6, rtol=1e-5)


def test_the_operators_take_what_the_installed_sglang_passes_them():
    """The arguments of its calls, counted in its own source."""
    backend = Path(importlib.util.find_spec("sglang").origin).parent / "srt/layers/attention/intel_amx_backend.py"
    passed = {
        node.func.attr: len(node.args)
        for node in ast.walk(ast.parse(backend.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("attention_fwd")
    }
    for schema in attention.schemas(sglang_version()):
        declared = torch._C.parse_schema(f"sgl_kernel::{schema}")
        assert passed.pop(declared.name.split("::")[1].replace("_cpu", "_fwd")) == len(declared.arguments)
    assert passed == {}


def test_calls_of_versions_without_scales_are_the_same_attention():
    """SGLang 0.5.16 passes neither scales nor is_causal: four fewer arguments than 0.5.23 in all, same numbers out."""
    counts = {
        version: [len(torch._C.parse_schema(f"sgl_kernel::{schema}").arguments) for schema in attention.schemas(version)]
        for version in ((0, 5, 16), (0, 5, 19), (0, 5, 20))
    }
    assert counts == {(0, 5, 16): [19, 17], (0, 5, 19): [20, 17], (0, 5, 20): [22, 19]}
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, generator=generator), *torch.randn(2, 3, 4, generator=generator)
    cache, table = torch.zeros(8, 1, 4), torch.arange(8, dtype=torch.int32).reshape(1, 8)
    one, three, zero = torch.tensor([1]), torch.tensor([3]), torch.tensor([0])
    told = (table, zero, three, three, zero, 3, 0.5, 0.0, False, 0, None, None, None)
    new, old = torch.zeros(3, 2, 4), torch.zeros(3, 2, 4)
    attention.extend_attention_cpu(q, k, v, new, cache, cache, 1.0, 1.0, *told, True)
    attention.with_scales(attention.extend_attention_cpu, 6)(q, k, v, old, cache, cache, *told)
    assert new.abs().max() > 0 and torch.equal(old, new)
    told = (k[:1], v[:1], zero, None, table, zero, one, 0.5, 0.0, False, 0, None, None)
    new, old = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    attention.decode_attention_cpu(q[:1], cache.clone(), cache.clone(), 1.0, 1.0, new, *told)
    attention.with_scales(attention.decode_attention_cpu, 3)(q[:1], cache.clone(), cache.clone(), old, *told)
    assert new.abs().max() > 0 and torch.equal(old, new)
