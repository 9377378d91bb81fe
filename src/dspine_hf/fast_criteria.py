"""Stopping criteria in the fast loop: length and end of sequence on the device, all others per token on the host."""

import time
from typing import Any

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria


class HostCriteria:
    """
    Splits a call's criteria.

    Args:
        criteria: what generate() prepared.
        prompt_length: columns of the prompts.

    Attributes:
        max_length: columns at which a row ends.
        eos: every end-of-sequence id `[n]`, or None.
    """

    def __init__(self, criteria: Any, prompt_length: int):
        lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        if not lengths:
            raise ValueError("expected a limit of length; found none. Pass `max_new_tokens`.")
        self.max_length = max(min(lengths), prompt_length + 1)
        ids = [c.eos_token_id.view(-1).cpu() for c in criteria if type(c) is EosTokenCriteria]
        self.eos = torch.cat(ids).unique() if ids else None
        self._times = [criterion for criterion in criteria if type(criterion) is MaxTimeCriteria]
        known = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)
        self._replayed = [criterion for criterion in criteria if type(criterion) not in known]

    @property
    def needs_text(self) -> bool:
        """Whether any criterion reads the text on the host."""
        return bool(self._replayed or self._times)

    def stop(self, ids: torch.Tensor, length: int, count: int) -> int | None:
        """
        After how many of a row's `count` new tokens a criterion stops it; None if none does.

        Args:
            ids: the row `[1, capacity]`.
            length: its columns before the new tokens.
        """
        if count and any(time.time() - c.initial_timestamp > c.max_time for c in self._times):
            return 1
        for new in range(1, count + 1) if self._replayed else ():
            prefix = ids[:, : length + new]
            if any(bool(torch.as_tensor(criterion(prefix, None)).all()) for criterion in self._replayed):
                return new
        return None
