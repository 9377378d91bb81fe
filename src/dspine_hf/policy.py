"""How many drafted tokens a round verifies: as many as pay for themselves, and none while drafting does not pay.

Lossless by construction. Whether slot t + 1 is kept depends on the drafter's confidence in it, which the tokens of
slots 1..t alone decide, and on the outcomes and the times of earlier rounds; never on a token that would be cut.
"""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BINS = 8
PRIOR = 4.0  # rounds' worth of trust in the drafter's own confidence
LEARNING_ROUNDS = 4  # whole drafts before any is cut
PLAIN_ROUNDS = 2  # passes without a draft at the start, to know their cost
REFRESH_ROUNDS = 64  # drafted rounds between two more of them
JUDGED_ROUNDS = 12  # drafted rounds before a verdict on drafting
EARLY_ROUNDS, EARLY_VERDICT = 6, 0.75  # fewer where drafting is this much slower than plain decoding
FIRST_PAUSE, LAST_PAUSE = 32, 1024  # passes without a draft after a bad verdict


def longest_draft(drafter: Any, config: Any) -> int:
    """The longest draft that the drafter and both configs allow."""
    own = getattr(getattr(drafter, "generation_config", None), "num_assistant_tokens", None)
    limits = (drafter.config.num_draft_slots, config.num_assistant_tokens, own)
    return min(int(limit) for limit in limits if limit is not None)


@dataclass
class Average:
    """An exponential moving average that begins as a plain one; outliers count at most twice the average."""

    rate: float = 0.1
    value: float = 0.0
    count: int = 0

    def add(self, x: float, capped: bool = False) -> None:
        self.count += 1
        if capped and self.count > 2:
            x = min(x, 2 * self.value)
        self.value += (x - self.value) * max(self.rate, 1 / self.count)


@dataclass
class Calibration:
    """
    How often drafts of a slot were accepted, once their earlier slots were, by the drafter's confidence.

    Args:
        slots: the longest draft.
    """

    slots: int
    _hits: list[list[float]] = field(init=False)
    _trials: list[list[float]] = field(init=False)
    _means: list[Average] = field(init=False)

    def __post_init__(self) -> None:
        self._hits = [[0.0] * BINS for _ in range(self.slots)]
        self._trials = [[0.0] * BINS for _ in range(self.slots)]
        self._means = [Average() for _ in range(self.slots)]

    def add(self, slot: int, confidence: float, accepted: bool) -> None:
        """One outcome of `slot`, counted from 0."""
        place = _bin(confidence)
        self._trials[slot][place] += 1
        self._hits[slot][place] += accepted
        self._means[slot].add(float(accepted))

    def probability(self, slot: int, confidence: float) -> float:
        """That the target accepts a draft of this confidence, if it accepts those before it."""
        place = _bin(confidence)
        return (self._hits[slot][place] + PRIOR * confidence) / (self._trials[slot][place] + PRIOR)

    def mean(self, slot: int) -> float:
        """The same whatever the confidence."""
        return self._means[slot].value if self._means[slot].count else 0.5


def _bin(confidence: float) -> int:
    return min(BINS - 1, max(0, int(confidence * BINS)))


class Policy:
    """
    Chooses the length of every draft of one call.

    Args:
        lengths: the numbers of drafted tokens that a pass may verify, ascending, the longest draft last.
        clock: seconds, from any origin.
    """

    def __init__(self, lengths: list[int], clock: Callable[[], float] = time.perf_counter):
        self._lengths = sorted({0, *lengths})
        self._clock = clock
        self.calibration = Calibration(self._lengths[-1])
        self._seconds: dict[int, Average] = {}  # of a drafted round, by how many drafts it verified
        self._plain = Average()  # seconds of a pass without a draft
        self._gain, self._round = Average(), Average()  # tokens a row took in a drafted round, and its seconds
        self._passes = self._drafted = self._since_plain = 0
        self._resume = 0
        self._pause = FIRST_PAUSE
        self._began = clock()

    @property
    def key(self) -> tuple:
        """What another policy must share to go on from here."""
        return tuple(self._lengths), self._clock

    def begin(self) -> None:
        """A round begins now."""
        self._began = self._clock()

    def wants_draft(self) -> bool:
        """Whether this round drafts at all."""
        due = self._passes < PLAIN_ROUNDS or self._since_plain >= REFRESH_ROUNDS
        return not due and self._passes >= self._resume

    def cut(self, confidence: list[list[float]], limit: int) -> int:
        """
        How many tokens of the drafts to verify.

        Args:
            confidence: for every unfinished row, the drafter's confidence in each slot.
            limit: at most so many.
        """
        lengths = [length for length in self._lengths if length <= limit]
        if self._drafted < LEARNING_ROUNDS or not self._round.value:
            return lengths[-1]
        price = len(confidence) * self._gain.value / self._round.value  # tokens that a second is worth
        reach = [1.0] * len(confidence)
        kept = 0
        for length in lengths[1:]:
            gain = 0.0
            for row, values in enumerate(confidence):
                chance = reach[row]
                for slot in range(kept, length):
                    known = slot == kept  # slots behind it hang on tokens that may be cut
                    chance *= self._chance(slot, values[slot] if known else None)
                    gain += chance
            if gain <= price * (self.seconds(length) - self.seconds(kept)):
                break
            for row, values in enumerate(confidence):
                for slot in range(kept, length):
                    reach[row] *= self._chance(slot, values[slot])
            kept = length
        return kept

    def _chance(self, slot: int, confidence: float | None) -> float:
        if confidence is None:
            return self.calibration.mean(slot)
        return self.calibration.probability(slot, confidence)

    def seconds(self, drafts: int) -> float:
        """What a drafted round costs that verifies so many drafts; the unmeasured are drawn in, optimistically."""
        if drafts in self._seconds:
            return self._seconds[drafts].value
        known = {0: self._plain.value, **{n: average.value for n, average in self._seconds.items()}}
        below = max((n for n in known if n < drafts), default=0)
        above = min((n for n in known if n > drafts), default=None)
        if above is None:
            return known[below]
        share = (drafts - below) / (above - below)
        return known[below] + share * (known[above] - known[below])

    def end(self, drafted: bool, verified: int, outcomes: list[tuple[list[float], int, int]]) -> None:
        """
        A round ended now.

        Args:
            drafted: whether it drafted.
            verified: how many drafts it verified.
            outcomes: for every row that was unfinished, its confidences, accepted drafts and tokens taken.
        """
        seconds = self._clock() - self._began
        self._passes += 1
        if not drafted:
            self._plain.add(seconds, capped=True)
            self._since_plain = 0
            return
        self._drafted += 1
        self._since_plain += 1
        self._seconds.setdefault(verified, Average()).add(seconds, capped=True)
        self._round.add(seconds, capped=True)
        self._gain.add(sum(taken for *_, taken in outcomes) / max(1, len(outcomes)))
        for confidence, agreed, _ in outcomes:
            for slot in range(min(verified, agreed + 1)):
                self.calibration.add(slot, confidence[slot], slot < agreed)
        self._judge()

    @property
    def speedup(self) -> float | None:
        """Tokens per second of drafted rounds over those of plain passes; None while either is unknown."""
        if not self._plain.count or not self._round.count or not self._round.value:
            return None
        return self._gain.value * self._plain.value / self._round.value

    def _judge(self) -> None:
        """Stops drafting for a while, twice as long each time, once it has been slower than plain decoding."""
        if self.speedup is None or self._round.count < EARLY_ROUNDS:
            return
        if self._round.count < JUDGED_ROUNDS and self.speedup >= EARLY_VERDICT:
            return
        if self.speedup >= 1:
            self._pause = FIRST_PAUSE
            return
        self._resume = self._passes + self._pause
        self._pause = min(LAST_PAUSE, 2 * self._pause)
        self._gain, self._round = Average(), Average()


# By drafter, by target, by shape of call: what earlier calls learned. Kept outside of the models, which may be copied.
_LEARNED: "weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict]]" = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def take_policy(drafter: Any, target: Any, call: tuple, fresh: Policy) -> Policy:
    """The policy of the last call of this kind, which is this call's alone until it is given back; else `fresh`."""
    with _LOCK:
        return _LEARNED.get(drafter, {}).get(target, {}).pop((call, fresh.key), fresh)


def give_back_policy(drafter: Any, target: Any, call: tuple, policy: Policy) -> None:
    """Leaves a policy for the next call of this kind."""
    with _LOCK:
        by_target = _LEARNED.setdefault(drafter, weakref.WeakKeyDictionary())
        by_target.setdefault(target, {})[(call, policy.key)] = policy
