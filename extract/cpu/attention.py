"""Attention over SGLang's paged KV cache, in plain PyTorch: the two operators its `intel_amx` backend calls.

Heads attend in groups (GQA, and MLA as one group); values may be narrower than keys (MLA); a layer may see a
window of the last tokens only, and a head may have a sink (GPT-OSS). A slot of the KV pool holds one token:
`req_to_token[req_pool_indices[b], i]` is the slot of token i of request b.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SCALES_SINCE, CAUSAL_SINCE = (0, 5, 20), (0, 5, 19)  # SGLang versions whose calls pass k_scale and v_scale, and is_causal
_libraries: list[torch.library.Library] = []  # the operators live as long as their library does


def schemas(version: tuple[int, ...]) -> tuple[str, str]:
    """The two operators as SGLang of this version calls them, by position."""
    scales = "float k_scale, float v_scale, " if version >= SCALES_SINCE else ""
    causal = ", bool is_causal" if version >= CAUSAL_SINCE else ""
    return (
        "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, Tensor v_buffer, "
        f"{scales}Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, "
        "Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap, bool is_cross_attn, "
        f"int sliding_window, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask{causal}) -> ()",
        "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, "
        f"{scales}Tensor(c!) o, Tensor? k, Tensor? v, Tensor loc, Tensor attn_logits, Tensor req_to_token, "
        "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn, "
        "int sliding_window, Tensor? encoder_lens, Tensor? sinks) -> ()",
    )


def register_operators(version: tuple[int, ...]) -> None:
    """Declares torch.ops.sgl_kernel.{extend,decode}_attention_cpu for SGLang of this version; once a process."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for schema in schemas(version):
        library.define(schema)
    kernels = {"extend_attention_cpu": (extend_attention_cpu, 6), "decode_attention_cpu": (decode_attention_cpu, 3)}
    for name, (kernel, position) in kernels.items():
        library.impl(name, kernel if version >= SCALES_SINCE else with_scales(kernel, position), "CPU")
    _libraries.append(library)


def with_scales(kernel: Callable, position: int) -> Callable:
    """For calls without k_scale and v_scale, which stand at `position`."""

    def call(*arguments: object) -> None:
        kernel(*arguments[:position], 1.0, 1.0, *arguments[position:])

    return call


def extend_attention_cpu(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool = True,
) -> None:
    """New tokens of each request attend to its cached prefix and to one another; the result is written to `o`.

    q [N, heads, K], k [N, kv_heads * K], v [N, kv_heads * V], o [N, heads, V]: the new tokens of all
    requests, packed: request b owns extend_seq_lens[b] rows from extend_start_loc[b]. Where k is None
    the new tokens' keys are in the cache already. seq_lens counts prefix and new tokens.
    tree_mask: per request [n, n] bool, flat, in place of the causal mask among the new tokens.
    sliding_window: tokens a token sees, itself among them; 0: all before it. sinks [heads]: a logit that takes
    its share of the softmax and has no value.
    Raises NotImplementedError for what the models served here do not use.
    """
    _refuse(logit_cap=logit_cap, is_cross_attn=is_cross_attn)
    lengths, starts = extend_seq_lens.tolist(), extend_start_loc.tolist()
    requests = [b for b, length in enumerate(lengths) if length]
    # Equal lengths (a verified draft, equal prompts) go through one call; padding unequal ones would cost more.
    groups = [requests] if len(set(lengths)) == 1 else [[b] for b in requests]
    mask_start = 0
    for group in groups:
        if not group:
            continue
        num_new = lengths[group[0]]
        rows = slice(starts[group[0]], starts[group[-1]] + num_new)  # requests lie packed, in their order
        batch = (len(group), num_new)
        prefix_lens = seq_lens[group].long() - num_new
        requests_of_group = req_pool_indices[group].long()
        if k is None:
            positions = prefix_lens[:, None] + torch.arange(num_new)
            own = req_to_token[requests_of_group[:, None], positions].long()
            keys, values = _rows(k_buffer, own), _rows(v_buffer, own)
        else:
            keys = k.reshape(q.shape[0], -1, q.shape[2])[rows].unflatten(0, batch)  # [B, n, kv_heads, K]
            values = v.reshape(q.shape[0], -1, o.shape[2])[rows].unflatten(0, batch)
        slots, seen = _cached(req_to_token, requests_of_group, prefix_lens)
        if slots.shape[1]:
            keys = torch.cat([_rows(k_buffer, slots).to(keys.dtype), keys], dim=1)  # [B, P + n, kv_heads, K]
            values = torch.cat([_rows(v_buffer, slots).to(values.dtype), values], dim=1)
        among = None  # [B or 1, n, n] who sees whom among the new tokens; None: all, or the triangle where causal
        if tree_mask is not None:
            count = len(group) * num_new * num_new
            among = tree_mask.reshape(-1)[mask_start : mask_start + count].view(-1, num_new, num_new).bool()
            mask_start += count
        attended = _attend(
            q[rows].unflatten(0, batch), keys, values, seen=seen, first=prefix_lens, among=among,
            causal=is_causal and among is None, window=sliding_window, sinks=sinks, scale=sm_scale,
        )  # fmt: skip
        o[rows] = attended.flatten(0, 1)


def decode_attention_cpu(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    o: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One new token per request: its key and value are stored at slot loc[b], then it attends to all seq_lens[b].

    q [B, heads, K], k [B, kv_heads * K], v [B, kv_heads * V] or None (then only o is written), o [B, heads, V].
    attn_logits is scratch space of the C++ kernel and not used; sliding_window, sinks: as above.
    Raises NotImplementedError for what the models served here do not use.
    """
    _refuse(logit_cap=logit_cap, is_cross_attn=is_cross_attn)
    if k is not None:
        k_buffer[loc] = k.reshape(loc.numel(), *k_buffer.shape[1:]).to(k_buffer.dtype)
        if v is not None:
            v_buffer[loc] = v.reshape(loc.numel(), *v_buffer.shape[1:]).to(v_buffer.dtype)
    slots, seen = _cached(req_to_token, req_pool_indices.long(), seq_lens.long())
    keys, values = _rows(k_buffer, slots), _rows(v_buffer, slots)  # [B, P, kv_heads, .], the new token among them
    attended = _attend(
        q[:, None], keys, values, seen=seen, first=seq_lens.long() - 1, among=None, causal=False,
        window=sliding_window, sinks=sinks, scale=sm_scale,
    )  # fmt: skip
    o.copy_(attended[:, 0])


def _rows(buffer: Tensor, slots: Tensor) -> Tensor:
    """buffer[slots], by index_select: seven times as fast as indexing, on one core."""
    return buffer.index_select(0, slots.reshape(-1)).view(*slots.shape, *buffer.shape[1:])


def _cached(req_to_token: Tensor, requests: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """Slots [B, P] of each request's first tokens, P the longest of `lens`, and which of them are real, bool.

    The others repeat the request's first slot: what a table holds past a request's end is somebody else's.
    """
    longest = int(lens.max())
    seen = torch.arange(longest) < lens[:, None]
    slots = req_to_token[:, : max(1, longest)][requests].long()
    slots = slots.clamp(min=0)  # of a token that has left a window's own pool there is none: nobody looks at it
    return torch.where(seen, slots[:, :longest], slots[:, :1]), seen


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    seen: Tensor,
    first: Tensor,
    among: Tensor | None,
    causal: bool,
    window: int,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """Attention of q [B, n, heads, K] on P cached and n (or no) new tokens -> [B, n, heads, V].

    keys, values  [B, P + n, kv_heads, .]        seen  [B, P] which of the cached ones are real
    first         [B] position of a request's first query: the cached ones are at 0 .. P - 1, the new ones from here
    among         [B, n, n] who of the new ones sees whom; None: the triangle if `causal`, else all
    """
    num_requests, num_new = q.shape[:2]
    num_prefix, num_keys = seen.shape[1], keys.shape[1]
    mask = None  # [B, 1, n, P + n]
    if num_prefix == num_keys:
        mask = seen[:, None, None]
    elif num_prefix or among is not None or window or sinks is not None:
        if causal:
            among, causal = torch.ones(1, num_new, num_new, dtype=torch.bool).tril(), False
        mask = torch.ones(num_requests, 1, num_new, num_keys, dtype=torch.bool)
        mask[..., :num_prefix] = seen[:, None, None]
        if among is not None:
            mask[..., num_prefix:] = among[:, None]
    if window:
        queries = first[:, None] + torch.arange(num_new)  # [B, n]
        cached = torch.arange(num_prefix).expand(num_requests, -1)
        positions = torch.cat([cached, first[:, None] + torch.arange(num_keys - num_prefix)], dim=1)  # [B, P + n]
        mask = mask & (positions[:, None] > queries[..., None] - window)[:, None]
    q, keys, values = (x.transpose(1, 2).to(q.dtype) for x in (q, keys, values))
    if sinks is not None:
        return _attend_with_sinks(q * scale, keys, values, mask=mask, sinks=sinks).transpose(1, 2)
    attended = scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )
    return attended.transpose(1, 2)


def _attend_with_sinks(q: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor, sinks: Tensor) -> Tensor:
    """q [B, heads, n, K] on keys [B, kv_heads, S, K], where mask [B, 1, n, S] says; -> [B, heads, n, V]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    logits = (q @ keys.mT).float().masked_fill(~mask, float("-inf"))  # [B, heads, n, S]
    sink = sinks.float()[None, :, None, None].expand(*logits.shape[:-1], 1)
    weights = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(values.dtype) @ values


def _refuse(**features: object) -> None:
    """NotImplementedError naming the features that are asked for."""
    asked = [name for name, value in features.items() if isinstance(value, Tensor) or value]
    if asked:
        raise NotImplementedError(f"extract/cpu/attention.py does not do {asked}: serve this model on a GPU")
