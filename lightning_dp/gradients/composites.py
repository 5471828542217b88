"""Functions of torch that hold parameters and samples at once, made of simpler ones or run whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dp.gradients.record_calls import CallRecorder
from lightning_dp.gradients.recurrent import RECURRENT
from lightning_dp.gradients.vmap import is_sample, outside, rows

__all__ = ["COMPOSITES"]


def _attention(
    recorder: CallRecorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Call fused attention on all samples, as on any batch.

    Dimensions are (heads, T, width) or (b, heads, T, width) for one sample.
    """
    n, dims = recorder.n, query.dim()
    if dims not in (3, 4) or key.dim() != dims or value.dim() != dims:
        return NotImplemented
    if any(x.requires_grad and not is_sample(x) for x in (query, key, value)):
        return NotImplemented
    if attn_mask is not None and (attn_mask.requires_grad or is_sample(attn_mask)):
        if not is_sample(attn_mask) or attn_mask.dim() not in (2, dims):
            return NotImplemented
    elif attn_mask is not None and attn_mask.dim() == 4 and len(attn_mask) > 1:
        return NotImplemented
    with outside():

        def batch(x: Tensor) -> Tensor:
            x = rows(x) if is_sample(x) else x.expand(n, *x.shape)
            return x if dims == 3 else x.flatten(0, 1)

        query, key, value = batch(query), batch(key), batch(value)
        each = len(query) // n
        if attn_mask is not None and is_sample(attn_mask):
            attn_mask = rows(attn_mask)
            if attn_mask.dim() == 3:  # (n, L, S), the same for all heads
                attn_mask = attn_mask.unsqueeze(1)
                attn_mask = attn_mask.repeat_interleave(each, 0) if dims == 4 else attn_mask
            elif dims == 4:
                attn_mask = attn_mask.expand(n, each, *attn_mask.shape[2:]).flatten(0, 1)
        with sdpa_kernel(SDPBackend.MATH) if recorder.along else nullcontext():
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, **options
            )
        out = out if dims == 3 else out.view(n, each, *out.shape[1:])
    return recorder.sample(out)


def _multi_head_attention(
    recorder: CallRecorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Return what ``F.multi_head_attention_forward`` does, from linear layers and products.

    query (L, b, E) and key, value (S, b, E), or without b.
    """
    if static_k is not None or static_v is not None:
        return NotImplemented
    with recorder:
        has_batch = query.dim() == 3
        if not has_batch:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        length, b, width = query.shape
        if use_separate_proj_weight:
            weights = [q_proj_weight, k_proj_weight, v_proj_weight]
        else:
            assert in_proj_weight is not None
            weights = list(in_proj_weight.chunk(3))
        biases = [None] * 3 if in_proj_bias is None else list(in_proj_bias.chunk(3))
        if not use_separate_proj_weight and query is key and key is value:
            assert in_proj_weight is not None
            q, k, v = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
        else:
            q, k, v = (
                F.linear(x, w, bias)  # type: ignore[arg-type]
                for x, w, bias in zip((query, key, value), weights, biases, strict=True)
            )
        if bias_k is not None and bias_v is not None:
            k = torch.cat([k, bias_k.expand(1, b, -1)])
            v = torch.cat([v, bias_v.expand(1, b, -1)])
            attn_mask, key_padding_mask = _wider(attn_mask, 1), _wider(key_padding_mask, 1)
        q, k, v = (x.reshape(x.shape[0], b, num_heads, -1).permute(1, 2, 0, 3) for x in (q, k, v))
        if add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            attn_mask, key_padding_mask = _wider(attn_mask, 1), _wider(key_padding_mask, 1)
        mask = _added(attn_mask, q)
        if mask is not None and mask.dim() == 3:
            mask = mask.view(b, num_heads, *mask.shape[1:])
        if key_padding_mask is not None:
            hidden = _added(key_padding_mask, q)
            assert hidden is not None
            hidden = hidden.view(b, 1, 1, -1)
            mask = hidden if mask is None else mask + hidden
        p = dropout_p if training else 0.0
        if not need_weights:
            if mask is not None and mask.dim() == 4:
                mask = mask.expand(b, num_heads, length, k.shape[2])
            out = F.scaled_dot_product_attention(q, k, v, mask, p)
            shares = None
        else:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            shares = (scores if mask is None else scores + mask).softmax(-1)
            shares = F.dropout(shares, p) if p else shares
            out = shares @ v
        out = out.permute(2, 0, 1, 3).reshape(length, b, width)
        out = F.linear(out, out_proj_weight, out_proj_bias)
        if shares is not None and average_attn_weights:
            shares = shares.mean(1)
        if not has_batch:
            out = out.squeeze(1)
            shares = None if shares is None else shares.squeeze(0)
    return out, shares


def _wider(mask: Tensor | None, by: int) -> Tensor | None:
    return None if mask is None else F.pad(mask, (0, by))


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return a mask as what is added to scores: where it is True, nothing is looked at."""
    if mask is None or mask.is_floating_point():
        return mask
    none = torch.zeros((), dtype=like.dtype, device=like.device)
    return torch.where(mask, none - torch.inf, none)


def _negative_log(
    func: Callable[..., Tensor],
    recorder: CallRecorder,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Call a loss of classes on all samples, and take each one's mean over its own targets."""
    are_samples = is_sample(input) and is_sample(target)
    is_constant = weight is None or not (weight.requires_grad or is_sample(weight))
    if not (are_samples and is_constant and size_average is None and reduce is None):
        return NotImplemented
    shape = torch.Size() if input.dim() == 1 else input.shape[:1] + input.shape[2:]
    with outside():
        x, t = rows(input), rows(target)
        if input.dim() > 1:
            x, t = x.flatten(0, 1), t.flatten(0, 1)
        total = func(x, t, weight, ignore_index=ignore_index, reduction="none", **options)
        if reduction == "none":
            return recorder.sample(total.view(recorder.n, *shape))
        has_several = shape.numel() != 1
        if has_several:
            total = total.view(recorder.n, -1).sum(1)
        if reduction == "sum":
            return recorder.sample(total)
        if t.is_floating_point():  # shares of classes
            return recorder.sample(total / max(1, shape.numel()))
        counts = counted = t != ignore_index
        if weight is not None:
            counts = weight.take(t.masked_fill(~counted, 0)).masked_fill(~counted, 0.0)
        if has_several:
            counts = counts.view(recorder.n, -1).sum(1)
        return recorder.sample(total / counts)


COMPOSITES: Mapping[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _multi_head_attention,
    "cross_entropy": partial(_negative_log, F.cross_entropy),
    "nll_loss": partial(_negative_log, F.nll_loss),
    **RECURRENT,
}
