"""Draft trees: the EAGLE kernels of SGLang's CPU build, in plain PyTorch. Outputs are written in place.

A tree has D nodes: node 0 is the last token the target gave, nodes 1..D-1 are drafts. A chain
(topk 1) is a tree whose node i hangs below node i-1.
"""

from __future__ import annotations

import torch
from torch import Tensor

FULL_MASK = 0  # sglang.kernels.ops.speculative.spec_tree.TreeMaskMode


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """bonus_tokens[b] = the last accepted token of request b.

    accept_tokens [B * accept_stride]        accept_lens [B], the bonus token counted
    """
    num_requests = accept_lens.numel()
    last = torch.arange(num_requests) * accept_stride + accept_lens.long() - 1  # [B]
    bonus_tokens[:num_requests] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Packs the KV slots of the accepted nodes; accept_index holds node numbers of the batch, -1 where none."""
    nodes = accept_index.reshape(-1)
    nodes = nodes[nodes > -1].long()
    accept_out_cache_loc[: nodes.numel()] = out_cache_loc[nodes]


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shifts each request's tokens left by one and puts its new token last, or at row select_index[b] where given."""
    new_tokens = topk_index.reshape(-1)
    for i, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist())):
        if length <= 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        row = start + length - 1 if select_index is None else int(select_index[i])
        input_ids[row] = new_tokens[i].to(input_ids.dtype)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """From the drafts kept for each request, the tree that the target verifies.

    parent_list     [B, *]    candidate number of a step's parents
    selected_index  [B, D-1]  candidate numbers of the drafts kept, best first
    seq_lens        [B]       tokens before the tree
    tree_mask       flat bool: who attends to whom. FULL_MASK: per request [D, seq_len + D], else [D, D]
    positions       [B * D]   seq_len + depth of the node
    retrieve_index  [B, D]    number of a node in the batch
    retrieve_next_token, retrieve_next_sibling  [B, D]  first child and next sibling of a node, -1 where none
    """
    flat_mask, flat_positions = tree_mask.reshape(-1), positions.reshape(-1)
    shape = (seq_lens.numel(), draft_token_num)
    nodes, children, siblings = (x.view(shape) for x in (retrieve_index, retrieve_next_token, retrieve_next_sibling))
    mask_row = 0  # where the next row of the flat mask starts
    for b, (seq_len, selected, candidates) in enumerate(
        zip(seq_lens.tolist(), selected_index.tolist(), parent_list.reshape(shape[0], -1).tolist())
    ):
        parents = _parents(selected[: draft_token_num - 1], candidates, topk=topk)
        nodes[b] = torch.arange(b * draft_token_num, (b + 1) * draft_token_num)
        for node in range(draft_token_num - 1, 0, -1):  # backwards, so that the best child ends up first
            parent = parents[node]
            if parent is not None:
                siblings[b, node] = children[b, parent]
                children[b, parent] = node
        prefix = seq_len if int(tree_mask_mode) == FULL_MASK else 0
        for node in range(draft_token_num):
            path = _path(node, parents, depth=depth)
            row = flat_mask[mask_row + prefix : mask_row + prefix + draft_token_num]
            row[:] = False
            row[[0, *path]] = True
            flat_positions[b * draft_token_num + node] = seq_len + len(path)
            mask_row += prefix + draft_token_num


def _parents(selected: list[int], candidates: list[int], *, topk: int) -> list[int | None]:
    """Node number of every node's parent; None for the root, and where the parent was not kept."""
    parents: list[int | None] = [None]
    for candidate in selected:
        step_row = candidate // topk
        if step_row == 0:
            parents.append(0)
        else:
            parent = candidates[step_row]
            parents.append(selected.index(parent) + 1 if parent in selected else None)
    return parents


def _path(node: int, parents: list[int | None], *, depth: int) -> list[int]:
    """Nodes from `node` up to, not including, the root; at most `depth`."""
    path: list[int] = []
    while node and len(path) < depth:
        path.append(node)
        node = parents[node] or 0
    return path


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walks each tree from its root along the target's own greedy choice (the spelling of the names is SGLang's).

    candidates        [B, D]  tokens of the nodes     target_predict  [B * D]  the target's next token at each node
    predicts          [B * D] next token at every node walked
    accept_index      [B, S]  numbers of the nodes walked, the rest untouched
    accept_token_num  [B]     drafts accepted, the root not counted
    """
    tokens, numbers = candidates.tolist(), retrive_index.tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    wanted = target_predict.reshape(-1).tolist()
    num_requests, max_walk = accept_index.shape
    for b in range(num_requests):
        node, walked = 0, [numbers[b][0]]
        while len(walked) < max_walk:
            child = children[b][node]
            while child != -1 and tokens[b][child] != wanted[walked[-1]]:
                child = siblings[b][child]
            if child == -1:
                break
            node = child
            walked.append(numbers[b][node])
        accept_index[b, : len(walked)] = torch.tensor(walked, dtype=accept_index.dtype)
        predicts[walked] = torch.tensor([wanted[number] for number in walked], dtype=predicts.dtype)
        accept_token_num[b] = len(walked) - 1
