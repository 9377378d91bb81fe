"""Rounds that were launched, and how their reports come to the host while the device goes on."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Draft:
    """
    What a round begins with.

    Attributes:
        slots: how many tokens may be verified, 0 where nothing was drafted.
        processors: the processors that are active in this round.
        fast: whether they run on the device.
        counts: tokens that are each row's own, where they do not.
        confidence: `[batch][slots]` once the host has read it.
    """

    slots: int
    processors: list[Any]
    fast: bool
    counts: list[int]
    confidence: list[list[float]] | None = None


@dataclass
class Launched:
    """
    A round that the device runs.

    Attributes:
        report: what [`Rows.append`] returned, `[batch, 3 + n]`; on the host, or on its way there.
        draft: what the round began with.
        kept: how many drafted tokens it verifies.
        arrived: the event after which the report is on the host; None: it lies on the device.
        following: the next round's draft, where that was launched already.
    """

    report: torch.Tensor
    draft: Draft
    kept: int
    arrived: Any = None
    following: Draft | None = None

    def read(self, confidence: torch.Tensor | None) -> list[list[int]]:
        """
        Waits for the report and returns it.

        Args:
            confidence: the following draft's `[batch, slots]`, which is noted there and comes in the same copy.
        """
        if self.following is None or confidence is None:
            if self.arrived is not None:
                self.arrived.synchronize()
            return self.report.tolist()
        width = self.report.shape[1]
        packed = torch.cat([self.report.double(), confidence.double()], dim=1).tolist()
        self.following.confidence = [values[width:] for values in packed]
        return [[int(value) for value in values[:width]] for values in packed]


class Reports:
    """
    Sends reports to the host. Two places take turns: a report must be read before the second one after it is sent.

    Args:
        size: how many numbers the longest report has.
        pinned: whether to copy without waiting for the device; it must be a CUDA device. Else reports stay there.
    """

    def __init__(self, size: int, pinned: bool):
        self._places = [torch.empty(size, dtype=torch.long, pin_memory=True) for _ in range(2)] if pinned else []

    def send(self, report: torch.Tensor, draft: Draft, kept: int) -> Launched:
        """A round whose `report` the device is about to write."""
        if not self._places:
            return Launched(report, draft, kept)
        self._places.reverse()
        place = self._places[0][: report.numel()].view(report.shape)
        place.copy_(report, non_blocking=True)
        return Launched(place, draft, kept, torch.cuda.current_stream(report.device).record_event())
