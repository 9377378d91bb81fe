"""Generation stops at the token at which it stops without a drafter, wherever in a block that token lies."""

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from dspine_hf import rounds_dspine
from helpers.oracle import greedy_pair, oracle_for, prompt, small_target
from helpers.words import character_tokenizer

NEW = 20


@pytest.fixture(scope="module")
def target():
    return small_target(seed=7)


@pytest.fixture(scope="module")
def text(target):
    return target.generate(prompt(), max_new_tokens=60, do_sample=False)[0]


def first_seen_at(text, place):
    """The first place at or after `place` (counted after the prompt) whose token did not occur before it."""
    new = text[7:].tolist()
    return next(i for i in range(place, len(new)) if new[i] not in new[:i])


def both(target, text, miss_every=1000, cache=None, **options):
    drafter = oracle_for(target, text, miss_every)
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    made = {name: options.pop(name) for name in ("criteria",) if name in options}
    results = []
    for assistant in ({}, {"assistant_model": drafter}):
        if made:
            options["stopping_criteria"] = StoppingCriteriaList([made["criteria"]()])
        results.append(target.generate(prompt(), **options, **assistant))
    return *results, drafter


@pytest.mark.parametrize("place", range(8))
def test_greedy_text_equals_plain_generate_when_eos_falls_anywhere_in_a_block(target, text, place):
    eos = int(text[7 + place])
    for ids in (eos, [0, eos], [eos, int(text[-1])]):
        plain, drafted, _ = both(target, text, eos_token_id=ids)
        assert torch.equal(plain, drafted)


class StopAtLength(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((1,), input_ids.shape[1] == self.length)


class CountCalls(StoppingCriteria):
    """Stops at its n-th call, and keeps what it saw."""

    def __init__(self, calls):
        self.calls, self.seen = calls, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return torch.tensor([len(self.seen) >= self.calls])


class StopOnConfidence(StoppingCriteria):
    """Stops when the mean log-probability of what was generated exceeds a limit; reads every score."""

    def __init__(self, limit):
        self.limit, self.seen = limit, []

    def __call__(self, input_ids, scores, **kwargs):
        new = input_ids[0, -len(scores) :]
        mean = sum(s.log_softmax(-1)[0, t] for s, t in zip(scores, new, strict=True)) / len(scores)
        self.seen.append(float(mean))
        return torch.tensor([bool(mean > self.limit)])


class StopOnPython(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= 12


@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("miss_every", [1000, 4])
def test_a_criterion_true_at_one_token_only_is_not_missed(target, text, place, miss_every):
    plain, drafted, drafter = both(target, text, miss_every, criteria=lambda: StopAtLength(7 + place))
    assert torch.equal(plain, drafted) and drafted.shape[1] == 7 + place
    assert drafter.generation_stats.new_tokens == place


def test_stateful_criteria_see_every_prefix_once_and_in_order(target, text):
    made = []

    def criterion():
        made.append(CountCalls(9))
        return made[-1]

    plain, drafted, _ = both(target, text, criteria=criterion)
    assert torch.equal(plain, drafted)
    assert made[0].seen == made[1].seen and len(made[1].seen) == 9


def test_score_reading_criteria_get_the_scores_of_plain_generate(target, text):
    made = []

    def criterion(limit=1e9):
        made.append(StopOnConfidence(limit))
        return made[-1]

    options = {"return_dict_in_generate": True, "output_scores": True}
    both(target, text, criteria=criterion, **options)
    torch.testing.assert_close(made[0].seen, made[1].seen, atol=1e-5, rtol=1e-5)
    seen = made[0].seen
    stop = next(i for i in range(3, NEW) if seen[i] > max(seen[:i]))
    limit = (seen[stop] + max(seen[:stop])) / 2
    plain, drafted, _ = both(target, text, criteria=lambda: criterion(limit), **options)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert len(drafted.scores) == drafted.sequences.shape[1] - 7 == len(made[3].seen) == stop + 1 < NEW
    torch.testing.assert_close(made[2].seen, made[3].seen, atol=1e-5, rtol=1e-5)


def test_criteria_may_return_python_booleans(target, text):
    drafter = oracle_for(target, text, 1000)
    criteria = StoppingCriteriaList([StopOnPython()])
    drafted = target.generate(
        prompt(), max_new_tokens=NEW, do_sample=False, stopping_criteria=criteria, assistant_model=drafter
    )
    assert torch.equal(drafted[0], text[:12])


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("place", range(2, 9))
def test_stop_strings_inside_a_block_end_the_text_where_plain_generate_ends_it(target, text, place, length):
    tokenizer = character_tokenizer()
    stop = tokenizer.decode(text[7 + place : 7 + place + length])
    assert len(stop) == length
    plain, drafted, _ = both(target, text, stop_strings=[stop, "never"], tokenizer=tokenizer)
    assert torch.equal(plain, drafted)
    assert drafted.shape[1] < 7 + NEW


def test_the_users_own_length_and_eos_criteria_count(target, text):
    plain, drafted, _ = both(target, text, criteria=lambda: MaxLengthCriteria(16))
    assert torch.equal(plain, drafted) and drafted.shape[1] == 16
    eos = int(text[7 + first_seen_at(text, 3)])
    plain, drafted, _ = both(target, text, criteria=lambda: EosTokenCriteria(eos), pad_token_id=0)
    assert torch.equal(plain, drafted) and int(drafted[0, -1]) == eos


def test_max_time_stops_after_one_more_token(target, text, monkeypatch):
    class Clock:
        """One second passes with every pass of the target."""

        now = 0.0

        def time(self):
            return self.now

    clock = Clock()
    for module in (stopping_criteria, rounds_dspine):
        monkeypatch.setattr(module, "time", clock)

    def tick(module, args, output):
        clock.now += 1.0

    hook = target.register_forward_hook(tick)
    try:
        plain, drafted, drafter = both(target, text, max_time=2.5)
    finally:
        hook.remove()
    assert plain.shape[1] == 7 + 3
    assert drafter.generation_stats.rounds == 2
    assert torch.equal(drafted[0], text[: 7 + 1 + 6 + 1])


def test_text_after_the_stop_does_not_stay_in_a_users_cache(target, text):
    from transformers import DynamicCache

    for place in range(1, 8):
        caches = []
        for assistant in ({}, {"assistant_model": oracle_for(target, text, 1000)}):
            caches.append(DynamicCache())
            target.generate(
                prompt(), past_key_values=caches[-1], do_sample=False, max_new_tokens=NEW,
                stopping_criteria=[StopAtLength(7 + place)], **assistant,
            )  # fmt: skip
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == 6 + place
        for plain, drafted in zip(caches[0].layers, caches[1].layers, strict=True):
            torch.testing.assert_close(plain.keys, drafted.keys, atol=1e-5, rtol=1e-4)


def test_random_drafters_stop_alike():
    target = small_target(seed=9)
    plain, drafted, _ = greedy_pair(target, prompt(5), 3, stopping_criteria=[StopAtLength(11)])
    assert torch.equal(plain, drafted)
