"""The unified transfer space (PCA-whitened output embeddings) and the transition cache over candidates."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .ops_dspine import rms

ROWS_AT_ONCE = 8192  # of the embedding in fp64, so that a fit needs little more memory than the embedding itself


def fit_whitening(
    embedding: torch.Tensor, rank: int, token_weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit W and c so that W E[v] + c has zero mean and unit covariance over the vocabulary.

    Args:
        embedding: output embedding E [V, d]; any dtype, computed in fp64.
        rank: r, how many leading principal directions are kept.
        token_weights: non-negative weight of each token [V] (e.g. its frequency); None: all alike.

    Returns:
        W [r, d] and c [r], fp32. The sign of each direction makes its largest component positive.

    Raises:
        ValueError: negative or all-zero weights, or `rank` above d.
    """
    E = embedding.detach().cpu()
    if rank > E.shape[1]:
        raise ValueError(f"transfer rank {rank} exceeds the embedding width {E.shape[1]}: choose a smaller rank.")
    w = torch.ones(len(E), dtype=torch.float64) if token_weights is None else token_weights.to("cpu", torch.float64)
    if w.shape != E.shape[:1] or bool((w < 0).any()) or not bool(w.sum() > 0):
        raise ValueError(f"token_weights must be {E.shape[0]} non-negative numbers with a positive sum.")
    w = w / w.sum()
    pieces = range(0, len(E), ROWS_AT_ONCE)
    mu = sum(w[i : i + ROWS_AT_ONCE] @ E[i : i + ROWS_AT_ONCE].double() for i in pieces)
    covariance = torch.zeros(E.shape[1], E.shape[1], dtype=torch.float64)
    for i in pieces:
        centred = E[i : i + ROWS_AT_ONCE].double() - mu
        covariance.addmm_(centred.T, centred * w[i : i + ROWS_AT_ONCE, None])
    values, vectors = torch.linalg.eigh(covariance)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    largest = vectors.abs().argmax(dim=0)
    signs = torch.sign(vectors[largest, torch.arange(rank)])
    signs[signs == 0] = 1.0
    floor = values[0].clamp_min(torch.finfo(torch.float64).tiny) * 1e-10
    W = (vectors * signs).T / values.clamp_min(floor).sqrt()[:, None]
    return W.float(), (-W @ mu).float()


class Fp32Buffers(nn.Module):
    """A module whose buffers stay fp32 under any cast of the model."""

    def _apply(self, fn, recurse=True):
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, old in kept.items():
            new = self._buffers[name]
            if new is not None and new.dtype != torch.float32 and old.device.type != "meta":
                self._buffers[name] = old.to(new.device)
        return self


class TransferSpace(Fp32Buffers):
    """phi(v) = rms(W E[v] + c). W [r, d] and c [r] are fp32 buffers and stay fp32 under any cast of the model."""

    W: torch.Tensor
    c: torch.Tensor

    def __init__(self, rank: int, hidden_size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.register_buffer("W", torch.zeros(rank, hidden_size, dtype=torch.float32))
        self.register_buffer("c", torch.zeros(rank, dtype=torch.float32))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Features of output-embedding rows: [.., d] -> [.., r], fp32."""
        with torch.autocast(rows.device.type, enabled=False):
            return rms(rows.float() @ self.W.T + self.c, self.eps)

    def fit(self, embedding: torch.Tensor, token_weights: torch.Tensor | None = None) -> None:
        """Fit W and c to a target's output embedding [V, d]; see [`fit_whitening`]."""
        W, c = fit_whitening(embedding, self.W.shape[0], token_weights)
        self.W.copy_(W)
        self.c.copy_(c)


def predecessor_keys(unary: torch.Tensor, noise: torch.Tensor, temperature: Any = 1.0) -> torch.Tensor:
    """By what candidates are chosen as cached predecessors: the largest is what the walk would draw from `unary`.

    A walk draws the argmax of p / noise from every slot. The rows of those that come first if the slot's unary logits
    are its scores will most often hold the row of the token that the true scores choose. Which rows are cached then
    depends on the noise of a slot, never on that of the slots after it: what is drawn there has the law q, the softmax
    of the row in use, and a walk stays exact.

    Args:
        unary, noise: [.., S], logits and exponential variables.
        temperature: of the walk, a number or a tensor without dimensions.
    """
    return unary.float() / temperature - noise.clamp_min(1e-30).log()


@dataclass
class TransitionCache:
    """Scores of every candidate given the cached candidates of the slot before it, for all slots of a block.

    first: [batch, S], slot 1 given the anchor. pairs: [batch, slots - 1, R, S], slots 2.. given a predecessor. Both
    fp32 logits. rows: which of the R rows to use after each of the S candidates of the slot before, [batch, slots - 1,
    S]; None: R is S, row i after candidate i.
    """

    first: torch.Tensor
    pairs: torch.Tensor
    rows: torch.Tensor | None = None

    def scores(self, slot: int, previous: torch.Tensor | None) -> torch.Tensor:
        """Logits [batch, S] of the candidates of `slot` (from 1), given the index of its predecessor [batch]."""
        if slot == 1:
            return self.first
        assert previous is not None, "slots after the first have a predecessor"
        rows, place = self.pairs[:, slot - 2], self.row_after(slot, previous.unsqueeze(1))
        return rows.gather(1, place.unsqueeze(-1).expand(-1, -1, rows.shape[-1])).squeeze(1)

    def row_after(self, slot: int, index: torch.Tensor) -> torch.Tensor:
        """Which of the R rows of `slot` (from 2) follows candidate `index` of the slot before: both [batch, 1]."""
        return index if self.rows is None else self.rows[:, slot - 2].gather(1, index)
