"""What a drafter needs of its target: input embeddings, output head, and the check that it is the right one."""

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_dspine import DSpineConfig
from .transfer_dspine import TransferSpace

FINGERPRINT_ROWS = 16
FINGERPRINT_CORRELATION = 0.8


class TargetView:
    """The target's embedding and head as the drafter uses them. Made per call; never a submodule, never saved.

    Args:
        model: the target causal LM.
        config: the drafter's config (logit scale, soft-cap and embedding scale).
        transfer: the drafter's transfer space.
        dtype, device: where the drafter computes.
    """

    def __init__(
        self, model: nn.Module, config: DSpineConfig, transfer: TransferSpace, dtype: torch.dtype, device: torch.device
    ):
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._config = config
        self._transfer = transfer
        self._dtype, self._device = dtype, device

    @property
    def head_weight(self) -> torch.Tensor:
        """The output embedding E [V, d]."""
        return self._head.weight

    @property
    def logit_shape(self) -> tuple[float, float | None, torch.Tensor | None] | None:
        """Scale, soft-cap and bias [V] that turn E h into logits; None when logits are E h."""
        bias = getattr(self._head, "bias", None)
        shape = (self._config.logit_scale, self._config.logit_softcap, None if bias is None else bias.to(self._device))
        return None if shape == (1.0, None, None) else shape

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings of ids [..], scaled as the target scales them: [.., d]."""
        rows = self._embedding(ids.to(self._embedding.weight.device)) * self._config.embedding_scale
        return rows.to(device=self._device, dtype=self._dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Output-embedding rows E[ids]: [..] -> [.., d], in the head's dtype, on the drafter's device."""
        weight = self._head.weight
        return F.embedding(ids.to(weight.device), weight).to(self._device)

    def phi(self, ids: torch.Tensor) -> torch.Tensor:
        """Transfer features of tokens: [..] -> [.., r], fp32."""
        return self._transfer(self.rows(ids))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores over the whole vocabulary: [.., d] -> [.., V], fp32, on the drafter's device."""
        weight = self._head.weight
        raw = self._head(hidden.to(device=weight.device, dtype=weight.dtype))
        return self._finish(raw.to(self._device).float(), None)

    def row_logits(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Scores of given tokens: hidden [.., m, d], ids [.., n] -> [.., m, n], fp32; the same numbers as `logits`."""
        rows = self.rows(ids)
        raw = torch.matmul(hidden.to(rows.dtype), rows.transpose(-1, -2)).float()
        bias = getattr(self._head, "bias", None)
        if bias is not None:
            raw = raw + bias.to(self._device).float()[ids].unsqueeze(-2)
        return self._finish(raw, ids)

    def _finish(self, raw: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        if self._config.logit_scale != 1.0:
            raw = raw * self._config.logit_scale
        cap = self._config.logit_softcap
        return raw if cap is None else torch.tanh(raw / cap) * cap


def embedding_fingerprint(weight: torch.Tensor) -> torch.Tensor:
    """Pairwise cosines of some fixed rows of an output embedding [V, d]: [16, 16], fp32.

    A cast or quantised copy of the same embedding has nearly the same cosines; another embedding has not.
    """
    count = min(FINGERPRINT_ROWS, weight.shape[0])
    ids = torch.linspace(0, (weight.shape[0] - 1) * 0.9, count, device=weight.device).long()
    rows = F.normalize(F.embedding(ids, weight.detach()).float(), dim=-1)
    cosines = torch.zeros(FINGERPRINT_ROWS, FINGERPRINT_ROWS, device=weight.device)
    cosines[:count, :count] = rows @ rows.T
    return cosines


def same_fingerprint(stored: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether two fingerprints belong to one embedding; an empty stored fingerprint matches anything."""
    if not bool(stored.any()):
        return True
    index = torch.triu_indices(FINGERPRINT_ROWS, FINGERPRINT_ROWS, offset=1)
    pairs = torch.stack([stored.cpu()[index[0], index[1]], found.cpu()[index[0], index[1]]])
    if bool((pairs[0] - pairs[1]).abs().max() < 1e-3):
        return True
    return bool(torch.corrcoef(pairs)[0, 1] > FINGERPRINT_CORRELATION)


def refuse_wrong_shapes(config: DSpineConfig, model: nn.Module) -> None:
    """Raise ValueError, naming the cure, unless `model` has the shapes this drafter was made for."""
    head, text = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
    if head is None or getattr(head, "weight", None) is None:
        raise ValueError(
            f"{type(model).__name__} has no output embedding; a DSpine drafter needs a causal LM as target."
        )
    vocab, width = head.weight.shape
    layers = text.num_hidden_layers
    wanted = (config.hidden_size, config.vocab_size, config.num_target_layers)
    if (width, vocab, layers) != wanted:
        raise ValueError(
            f"this drafter was trained for hidden_size={wanted[0]}, vocab_size={wanted[1]} and {wanted[2]} layers; "
            f"the target has {width}, {vocab} and {layers}. Load the drafter that belongs to it, or train one with "
            "'dspine train --target ...'."
        )
