"""The training loss: unary and conditional cross-entropy through a frozen head, and layer-wise supervision of z."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}


@dataclass
class LossWeights:
    """Weights of the loss terms.

    unary, conditional, layer: weights of the unary CE, of the CE given the true predecessor, and of the supervision
        of z at every layer.
    distill: share of the target's own softmax in the token label; 0: the token alone, 1: the distribution alone.
    teacher_temperature: temperature of that softmax.
    total_variation: weight of the total-variation distance to the target's softmax, added to each cross-entropy.
    gamma: decay length of the slot weights exp(-(t-1)/gamma); None: by block size (4/5/7 for B = 8/10/16).
    layer_loss: "cosine" or "contrast" (cross-entropy over sharpness * cos against sampled tokens).
    """

    unary: float = 0.3
    conditional: float = 0.7
    layer: float = 0.3
    distill: float = 0.0
    teacher_temperature: float = 1.0
    total_variation: float = 0.0
    gamma: float | None = None
    layer_loss: str = "cosine"
    sharpness: float = 20.0


def slot_weights(block_size: int, gamma: float | None, device: torch.device) -> torch.Tensor:
    """exp(-(t-1)/gamma) for slots t = 1..B-1."""
    if gamma is None:
        gamma = GAMMA.get(block_size, 0.5 * block_size)
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma)


LogitShape = tuple[float, float | None, torch.Tensor | None]
"""Scale, soft-cap and bias [V] of a head: logits = cap tanh(scale (E h + bias) / cap)."""


def _shaped(raw: torch.Tensor, shape: LogitShape) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Logits of raw products [n, V] fp32, and their derivative by them."""
    scale, cap, bias = shape
    logits = scale * (raw if bias is None else raw + bias.float())
    if cap is None:
        return logits, scale
    logits = cap * torch.tanh(logits / cap)
    return logits, scale * (1 - (logits / cap).square())


def _row_terms(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None,
    row_weights: torch.Tensor,
    distill: float,
    total_variation: float,
    shape: LogitShape | None,
    trained: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Weighted loss sum, gradient with respect to hidden, hits, and gradient of the weight's last `trained` columns.

    hidden [n, d], weight [V, d], labels [n], teacher: probabilities [n, V] or None, row_weights [n].
    """
    logits, slope = (hidden @ weight.T).float(), None
    if shape is not None:
        logits, slope = _shaped(logits, shape)
    log_z = logits.logsumexp(-1, keepdim=True)
    q = torch.exp(logits - log_z)
    token = logits.gather(1, labels.unsqueeze(1)) - log_z
    hits = logits.argmax(-1) == labels
    one_hot = torch.arange(weight.shape[0], device=labels.device) == labels.unsqueeze(1)
    target = one_hot.float()
    loss = -token.squeeze(1)
    if teacher is not None and distill > 0:
        target = distill * teacher + (1 - distill) * target
        loss = (1 - distill) * loss + distill * (log_z.squeeze(1) - (teacher * logits).sum(-1))
    grad = q - target
    if teacher is not None and total_variation > 0:
        loss = loss + total_variation * 0.5 * (q - teacher).abs().sum(-1)
        sign = 0.5 * torch.sign(q - teacher)
        grad = grad + total_variation * q * (sign - (q * sign).sum(-1, keepdim=True))
    grad = grad * row_weights.unsqueeze(1)
    grad = (grad if slope is None else grad * slope).to(hidden.dtype)
    columns = (grad.T @ hidden[:, -trained:]).float() if trained else None
    return (loss * row_weights).sum(), grad @ weight, hits, columns


def _teacher_probs(
    teacher_hidden: torch.Tensor | None, weight: torch.Tensor, temperature: float, shape: LogitShape | None
) -> torch.Tensor | None:
    if teacher_hidden is None:
        return None
    logits = (teacher_hidden @ weight.T).float()
    if shape is not None:
        logits = _shaped(logits, shape)[0]
    return torch.softmax(logits / temperature, dim=-1)


def _pair_terms(unary, conditional, head, extra, labels, teacher_hidden, unary_weights, conditional_weights, settings):
    """`_row_terms` of both streams over one chunk, sharing the teacher's distribution; a missing stream gives None."""
    distill, total_variation, temperature, shape = settings
    teacher = _teacher_probs(teacher_hidden, head, temperature, shape)
    first = second = None
    if unary is not None:
        first = _row_terms(unary, head, labels, teacher, unary_weights, distill, total_variation, shape)
    if conditional is not None:
        weight = head if extra is None else torch.cat([head, extra], dim=1)
        trained = weight.shape[1] - head.shape[1]
        second = _row_terms(
            conditional, weight, labels, teacher, conditional_weights, distill, total_variation, shape, trained
        )
    return first, second


class _ChunkedLoss(torch.autograd.Function):
    """Sum of weighted row losses; gradients are formed chunk by chunk in forward, never from all logits at once."""

    @staticmethod
    def forward(
        ctx, unary, conditional, extra, head, labels, teacher, unary_weights, conditional_weights, settings, chunk, fn
    ):
        total = torch.zeros((), device=labels.device)
        grads: list[Any] = [None if x is None else torch.empty_like(x) for x in (unary, conditional)]
        grads.append(None if extra is None else torch.zeros_like(extra, dtype=torch.float32))
        hits = torch.zeros(2, labels.shape[0], dtype=torch.bool, device=labels.device)
        columns = None if extra is None else extra.to(head.dtype)
        for start in range(0, labels.shape[0], chunk):
            part = slice(start, start + chunk)
            cut = [None if x is None else x[part] for x in (unary, conditional)]
            rest = [None if x is None else x[part] for x in (labels, teacher, unary_weights, conditional_weights)]
            for i, terms in enumerate(fn(*cut, head, columns, *rest, settings)):
                if terms is not None:
                    total = total + terms[0]
                    grads[i][part] = terms[1]
                    hits[i, part] = terms[2]
                    if terms[3] is not None:
                        grads[2] += terms[3]
        ctx.present = [g is not None for g in grads]
        ctx.save_for_backward(*[g for g in grads if g is not None])
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx, grad, _):
        saved = iter(ctx.saved_tensors)
        grads = [next(saved) if present else None for present in ctx.present]
        return *[None if g is None else g * grad.to(g.dtype) for g in grads], *[None] * 8


@functools.cache
def _compiled_pair_terms() -> Any:
    """Made when it is first asked for: torch.compile imports its backend at once, which takes seconds."""
    return torch.compile(_pair_terms, dynamic=False)


def token_loss(
    unary: torch.Tensor | None,
    conditional: torch.Tensor | None,
    head: torch.Tensor,
    labels: torch.Tensor,
    unary_weights: torch.Tensor | None,
    conditional_weights: torch.Tensor | None,
    teacher: torch.Tensor | None = None,
    weights: LossWeights | None = None,
    chunk: int = 2048,
    compiled: bool = False,
    extra: tuple[torch.Tensor, torch.Tensor] | None = None,
    shape: LogitShape | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross-entropy of both streams through the frozen head, without holding the logits of all rows.

    Args:
        unary, conditional: normed states [n, d] of the two streams; either may be None.
        head: output embedding E [V, d]; it gets no gradient.
        labels: [n] token ids. unary_weights, conditional_weights: [n]; zero leaves a row out.
        teacher: the target's own normed final states at the predecessors [n, d]; needed by `distill` and
            `total_variation`.
        chunk: rows whose logits are held at once, at most.
        shape: what the head does to E h (`TargetView.logit_shape`); None: nothing.
        extra: codes [n, r] and their weight [V, r]; codes @ weight.T is added to the conditional logits. Both get
            gradients.

    Returns:
        The loss (a scalar, weighted sum) and hits [2, n]: where each stream's argmax is the label.
    """
    weights = LossWeights() if weights is None else weights
    settings = (weights.distill, weights.total_variation, weights.teacher_temperature, shape)
    if teacher is None and (settings[0] or settings[1]):
        raise ValueError("distill and total_variation need the target's final states: pass teacher=.")
    if not (settings[0] or settings[1]):
        teacher = None
    first = conditional if unary is None else unary
    if first is None:
        raise ValueError("there is nothing to score: pass unary=, conditional= or both.")
    head = head.detach().to(first.dtype)
    columns = None
    if extra is not None:
        if conditional is None:
            raise ValueError("extra= belongs to the conditional stream: pass conditional= too.")
        codes, columns = extra
        conditional = torch.cat([conditional, codes.to(conditional.dtype)], dim=-1)
    fn = _compiled_pair_terms() if compiled else _pair_terms
    rows = labels.shape[0]
    even = -(-rows // max(1, -(-rows // chunk)))  # pieces of one size, where rows divide
    return _ChunkedLoss.apply(
        unary, conditional, columns, head, labels, teacher, unary_weights, conditional_weights, settings, even, fn
    )


def feature_loss(
    features: tuple[torch.Tensor, ...],
    truth: torch.Tensor,
    row_weights: torch.Tensor,
    weights: LossWeights,
    labels: torch.Tensor,
    negatives: torch.Tensor | None = None,
    negative_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Supervision of the predicted features at every injected layer, mean over layers.

    Args:
        features: z per layer, each [n, r]. truth: phi of the true tokens [n, r]. row_weights: [n].
        negatives, negative_ids: phi [m, r] and ids [m] of sampled tokens, for `layer_loss="contrast"`.
    """
    total = truth.new_zeros(())
    rank = truth.shape[-1]
    for z in features:
        cosine = (z * truth).sum(-1) / rank
        if weights.layer_loss == "cosine":
            rows = 1 - F.cosine_similarity(z, truth, dim=-1)
        else:
            assert negatives is not None and negative_ids is not None
            scale = weights.sharpness / rank
            others = (z.to(torch.bfloat16) @ negatives.to(torch.bfloat16).T).float() * scale
            others = others.masked_fill(negative_ids.unsqueeze(0) == labels.unsqueeze(1), float("-inf"))
            positive = weights.sharpness * cosine
            rows = torch.logaddexp(others.logsumexp(-1), positive) - positive
        total = total + (rows * row_weights).sum()
    return total / max(1, len(features))
