"""The policy: drafts as long as they pay, none while drafting is slower than plain decoding, by the test's clock."""

import functools
from dataclasses import dataclass, field

import pytest
import torch

import dspine_hf
from dspine_hf import decoding, policy
from dspine_hf.fast_call import Options
from dspine_hf.policy import (
    EARLY_ROUNDS,
    JUDGED_ROUNDS,
    LEARNING_ROUNDS,
    PLAIN_ROUNDS,
    REFRESH_ROUNDS,
    Calibration,
    Policy,
)
from helpers.batch_oracle import batch_oracle, padded
from helpers.oracle import prompt, small_target

SLOTS = 7


@dataclass
class Machine:
    """Rounds that cost what the test says: `draft + verify[n]` with n drafts, `plain` without."""

    draft: float
    slope: float
    lengths: list = field(default_factory=lambda: list(range(1, SLOTS + 1)))
    now: float = 0.0

    def __post_init__(self):
        self.policy = Policy(self.lengths, clock=lambda: self.now)
        self.chosen = []

    def round(self, confidence, accepted, limit=SLOTS):
        """One round of one row whose drafts are accepted up to `accepted`."""
        self.policy.begin()
        drafted = self.policy.wants_draft()
        kept = self.policy.cut([confidence], limit) if drafted else 0
        self.chosen.append(kept if drafted else None)
        self.now += 1.0 + (self.draft if drafted else 0.0) + self.slope * kept
        agreed = min(accepted, kept)
        self.policy.end(drafted, kept, [(confidence, agreed, agreed + 1)])
        return kept


def test_long_drafts_are_kept_where_they_are_accepted_and_rows_cost_little():
    machine = Machine(draft=0.3, slope=0.02)
    for _ in range(60):
        machine.round([0.95] * SLOTS, SLOTS)
    assert machine.chosen[-20:].count(SLOTS) >= 19


def test_drafts_are_cut_where_rows_cost_more_than_they_bring():
    machine = Machine(draft=0.1, slope=0.4)
    for i in range(150):
        machine.round([0.9, 0.9, 0.2, 0.2, 0.2, 0.2, 0.2], 2 if i % 4 else 1)
    lengths = [kept for kept in machine.chosen[-40:] if kept]
    assert lengths and max(lengths) <= 3 and lengths.count(2) > len(lengths) / 2


def test_confidence_decides_between_two_drafts_of_one_call():
    machine = Machine(draft=0.1, slope=0.3)
    kept = {True: [], False: []}
    for i in range(200):
        sure = i % 2 == 0
        length = machine.round([0.97 if sure else 0.1] * SLOTS, SLOTS if sure else 0)
        kept[sure].append(length)
    assert sum(kept[True][-20:]) > 3 * sum(kept[False][-20:])


def test_a_slot_is_judged_without_the_confidence_of_later_slots():
    machine = Machine(draft=0.1, slope=0.3)
    for i in range(40):
        machine.round([0.8, 0.5, 0.8, 0.3, 0.8, 0.5, 0.5], i % 5)
    for stop in range(1, SLOTS):
        choices = {
            min(stop, machine.policy.cut([[0.7] * stop + [later] * (SLOTS - stop)], SLOTS))
            for later in (0.0, 0.5, 1.0)
        }
        assert len(choices) <= 2  # whether the slot after `stop` is kept may hang on its own confidence
        before = {
            machine.policy.cut([[0.7] * stop + [0.6] + [later] * (SLOTS - stop - 1)], SLOTS) > stop
            for later in (0.0, 0.5, 1.0)
        }
        assert len(before) == 1


def test_drafting_pauses_while_it_is_slower_than_plain_and_is_tried_again_ever_later():
    machine = Machine(draft=1.5, slope=0.0)
    for _ in range(400):
        machine.round([0.3] * SLOTS, 0)
    probes = [i for i, kept in enumerate(machine.chosen) if kept is not None]
    gaps = [b - a for a, b in zip(probes, probes[1:], strict=False) if b - a > 2]
    assert gaps == sorted(gaps) and len(gaps) >= 2 and gaps[1] > 1.5 * gaps[0]
    assert len(probes) < 5 * JUDGED_ROUNDS
    for _ in range(1200):
        machine.round([0.9] * SLOTS, SLOTS)
    assert machine.chosen[-50:].count(None) < 5  # the text changed, and drafting is back


def test_plain_passes_are_timed_at_the_start_and_now_and_then():
    machine = Machine(draft=0.1, slope=0.0)
    for _ in range(3 * REFRESH_ROUNDS):
        machine.round([0.9] * SLOTS, SLOTS)
    assert machine.chosen[:PLAIN_ROUNDS] == [None] * PLAIN_ROUNDS
    assert 2 <= machine.chosen[PLAIN_ROUNDS:].count(None) <= 3
    assert machine.policy.speedup == pytest.approx(8 / 1.1, rel=0.02)


def test_whole_drafts_are_verified_until_there_is_experience():
    machine = Machine(draft=0.1, slope=5.0)
    for _ in range(PLAIN_ROUNDS + LEARNING_ROUNDS):
        machine.round([0.1] * SLOTS, 0)
    assert machine.chosen[PLAIN_ROUNDS:] == [SLOTS] * LEARNING_ROUNDS


def test_a_limit_and_the_allowed_lengths_are_kept_to():
    machine = Machine(draft=0.1, slope=0.01, lengths=[1, 3, SLOTS])
    for i in range(80):
        machine.round([0.9] * SLOTS, SLOTS, limit=(SLOTS, 5, 2, 1)[i % 4])

    for i, kept in enumerate(machine.chosen):
        assert kept is None or (kept <= (SLOTS, 5, 2, 1)[i % 4] and kept in (0, 1, 3, SLOTS))


def test_calibration_learns_what_a_confidence_is_worth():
    table = Calibration(2)
    assert table.probability(0, 0.7) == pytest.approx(0.7)
    for i in range(200):
        table.add(0, 0.9, i % 4 == 0)
        table.add(0, 0.3, i % 2 == 0)
    assert table.probability(0, 0.9) == pytest.approx(0.25, abs=0.03)
    assert table.probability(0, 0.3) == pytest.approx(0.5, abs=0.03)
    assert table.probability(1, 0.9) == pytest.approx(0.9)


def test_a_drafter_that_is_much_slower_is_given_up_early():
    machine = Machine(draft=3.0, slope=0.0)
    for _ in range(40):
        machine.round([0.3] * SLOTS, 0)
    assert len([kept for kept in machine.chosen[:30] if kept is not None]) == EARLY_ROUNDS


def test_what_a_call_learned_the_next_one_knows():
    target, text = small_target(seed=2), prompt(7, seed=20)
    drafter = batch_oracle(target, [target.generate(text, max_new_tokens=40)[0]])
    rounds = []
    for _ in range(2):
        dspine_hf.generate(target, drafter, text, max_new_tokens=30, adaptive=True)
        rounds.append(drafter.generation_stats.slot_trials)
    (learned,) = policy._LEARNED[drafter][target].values()
    assert learned.calibration._trials[0] and sum(learned.calibration._trials[0]) == sum(t[0] for t in rounds if t)
    dspine_hf.generate(target, drafter, text.repeat(2, 1), max_new_tokens=30, adaptive=True)
    assert len(policy._LEARNED[drafter][target]) == 2  # another batch, other costs


@pytest.mark.parametrize("cost", [0.0, 0.5, 3.0])
def test_adaptive_text_is_plain_text(cost, monkeypatch):
    """Whatever the clock says: here rounds take longer and longer the more often it is read."""
    target = small_target(seed=2)
    texts = [prompt(7, seed=20), prompt(2, seed=21)]
    references = [target.generate(text, max_new_tokens=140)[0] for text in texts]
    drafter, (ids, mask) = batch_oracle(target, references, miss_every=3), padded(texts)
    ticks = iter(range(10**6))
    monkeypatch.setattr(decoding, "Options", functools.partial(Options, clock=lambda: next(ticks) ** (1 + cost)))
    monkeypatch.setattr(policy, "FIRST_PAUSE", 5)
    out = dspine_hf.generate(target, drafter, ids, attention_mask=mask, max_new_tokens=140, adaptive=True)
    for row, reference in zip(out, references, strict=True):
        assert torch.equal(row[-len(reference) :], reference)
    assert drafter.generation_stats.accepted > 10
