"""What a call to generate() drafted and what of it was accepted; kept per drafter, readable from any thread."""

import threading
import weakref
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GenerationStats:
    """
    The figures of one call.

    Attributes:
        rounds: target verification passes; prefill is none, a pass with an empty draft is one.
        drafted: draft tokens that were put before the target, of trees every node.
        accepted: those of them that stand in the output.
        new_tokens: tokens in the output after the prompt.
        acceptance_length: (new tokens - 1) / rounds; 1.0 when prefill alone decided the output.
        slot_acceptance: for each slot, the share accepted among the drafts whose earlier slots were all accepted; a
            tree counts as one draft, accepted at a slot where one of its nodes there is.
        slot_trials: for each slot, how many drafts those are.
        round_starts: for each round, the index among the new tokens that its first draft token was proposed for.
    """

    rounds: int
    drafted: int
    accepted: int
    new_tokens: int
    acceptance_length: float
    slot_acceptance: tuple[float, ...]
    slot_trials: tuple[int, ...] = ()
    round_starts: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as a plain dictionary."""
        return asdict(self)


class DraftLog:
    """Collects the drafts of one call on their device, and counts when the text is known: one transfer per call."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.drafts: list[torch.Tensor] = []
        self.rounds: list[int] = []

    def add(self, start: int, tokens: torch.Tensor | None) -> None:
        """A verification pass begins: draft `tokens` `[1, n]` are proposed from position `start` on."""
        self.rounds.append(start)
        if tokens is not None:
            self.starts.append(start)
            self.drafts.append(tokens[0])

    def count(self, sequence: torch.Tensor, prompt_length: int) -> GenerationStats:
        """
        Args:
            sequence: `[length]`, the final output, prompt included.
            prompt_length: tokens before the first new one.
        """
        text = sequence.tolist()
        drafts = torch.cat(self.drafts).tolist() if self.drafts else []
        reached: list[int] = []
        passed: list[int] = []
        offset = 0
        for start, tokens in zip(self.starts, self.drafts, strict=True):
            draft = drafts[offset : offset + len(tokens)]
            offset += len(tokens)
            for slot, token in enumerate(draft[: len(text) - start]):
                if slot == len(reached):
                    reached.append(0)
                    passed.append(0)
                reached[slot] += 1
                if token != text[start + slot]:
                    break
                passed[slot] += 1
        new_tokens = len(text) - prompt_length
        return GenerationStats(
            rounds=len(self.rounds),
            drafted=len(drafts),
            accepted=sum(passed),
            new_tokens=new_tokens,
            acceptance_length=(new_tokens - 1) / len(self.rounds) if self.rounds else 1.0,
            slot_acceptance=tuple(p / r for p, r in zip(passed, reached, strict=True)),
            slot_trials=tuple(reached),
            round_starts=tuple(start - prompt_length for start in self.rounds),
        )


_OF_THREAD = threading.local()
_LATEST: "weakref.WeakKeyDictionary[Any, GenerationStats]" = weakref.WeakKeyDictionary()


def store_stats(drafter: Any, stats: GenerationStats) -> None:
    """Keeps the stats of a finished call for the calling thread, and as the drafter's latest."""
    if not hasattr(_OF_THREAD, "stats"):
        _OF_THREAD.stats = weakref.WeakKeyDictionary()
    _OF_THREAD.stats[drafter] = stats
    _LATEST[drafter] = stats


def load_stats(drafter: Any) -> GenerationStats | None:
    """The calling thread's last call; in a thread that made none, the last call that finished in any."""
    mine = getattr(_OF_THREAD, "stats", None)
    stats = None if mine is None else mine.get(drafter)
    return _LATEST.get(drafter) if stats is None else stats
