"""Rounds that are launched before the host has read the last one: order, texts, figures, and what must wait."""

import functools
from itertools import pairwise

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import dspine_hf
from dspine_hf import decoding, fast_call, static_cache
from dspine_hf.fast_call import FastCall, Options
from dspine_hf.fast_reports import Launched
from helpers.batch_oracle import batch_oracle, padded
from helpers.oracle import prompt, small_target
from test_decoding_graphs import Recorder

NEW = 40


class Watched(Recorder):
    """Notes which graphs are replayed, as "launch", between the reports that the host reads."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __call__(self, run, pool):
        recording = super().__call__(run, pool)
        replay = recording.replay

        def noted():
            if isinstance(recording.result, torch.Tensor):  # a report: the second half of a round, or all of it
                self.events.append("launch")
            replay()

        recording.replay = noted
        return recording


@pytest.fixture
def recorder(monkeypatch):
    found, read = Watched(), Launched.read

    def noted(launched, confidence):
        found.events.append("read")
        return read(launched, confidence)

    monkeypatch.setattr(Launched, "read", noted)
    monkeypatch.setattr(decoding, "Options", functools.partial(Options, recorder=found))
    return found


@pytest.fixture
def case():
    target = small_target(seed=2)
    texts = [prompt(7, seed=20), prompt(2, seed=21), prompt(5, seed=22)]
    references = [target.generate(text, max_new_tokens=NEW)[0] for text in texts]
    return target, batch_oracle(target, references), padded(texts)


def events_of(recorder, run):
    """What happens in a call whose graphs were recorded by one before."""
    run()
    recorder.events.clear()
    run()
    return recorder.events


def ran_ahead(events):
    return any(pair == ("launch", "launch") for pair in pairwise(events)) or events[:2] == ["launch", "read"]


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("do_sample", [False, True])
def test_every_round_is_launched_before_the_last_one_is_read(case, recorder, drafted, do_sample):
    target, drafter, (ids, mask) = case
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": do_sample}
    drafter = drafter if drafted else None
    events = events_of(recorder, lambda: dspine_hf.generate(target, drafter, ids, **options))
    rounds = events.count("read") - 1  # one report is the prompt's
    assert events[: 2 * rounds] == ["launch", "read"] * rounds and rounds > 5
    assert events[2 * rounds :] in (["launch", "read"], ["read"])
    if drafter is None:  # the limit is foreseen: nothing runs in vain
        assert events[2 * rounds :] == ["read"] and rounds == NEW - 1


def test_a_round_that_must_be_recorded_first_waits_for_the_report(case, recorder):
    target, drafter, (ids, mask) = case
    dspine_hf.generate(target, drafter, ids, attention_mask=mask, max_new_tokens=NEW)
    assert recorder.events[:2] == ["read", "launch"] and ran_ahead(recorder.events)
    recorder.events.clear()
    recorder.recorded = 0
    dspine_hf.generate(target, drafter, ids, attention_mask=mask, max_new_tokens=1)
    assert recorder.events == ["read"] and not recorder.recorded


@pytest.mark.parametrize("nodes", [None, 9])
@pytest.mark.parametrize(
    "options",
    [{}, {"eos_token_id": [5, 9, 30], "pad_token_id": 0}, {"max_new_tokens": 3}, {"repetition_penalty": 1.3}],
    ids=str,
)
def test_texts_and_figures_are_those_of_rounds_one_by_one(case, recorder, monkeypatch, nodes, options):
    target, drafter, (ids, mask) = case
    monkeypatch.setattr(static_cache, "FIRST_BUCKET", 8)  # every bound of the columns that is too low would show
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "tree_nodes": nodes, **options}
    plain = target.generate(ids, **{name: value for name, value in options.items() if name != "tree_nodes"})
    with monkeypatch.context() as patch:
        patch.setattr(FastCall, "_run_ahead", lambda call, unread: None)
        assert torch.equal(dspine_hf.generate(target, drafter, ids, **options), plain)
    figures = drafter.generation_stats
    for _ in range(2):
        recorder.events.clear()
        found = dspine_hf.generate(target, drafter, ids, return_dict_in_generate=True, **options)
        assert torch.equal(found.sequences, plain) and drafter.generation_stats == figures
    assert ran_ahead(recorder.events)
    dspine_hf.generate(target, drafter, ids, use_graphs=False, **options)
    assert drafter.generation_stats.acceptance_length == figures.acceptance_length
    options["tree_nodes"] = None
    for _ in range(2):
        recorder.events.clear()
        assert torch.equal(dspine_hf.generate(target, None, ids, **options), plain)
    assert ran_ahead(recorder.events)


def test_rows_of_a_batch_end_apart(case, recorder):
    target, drafter, (ids, mask) = case
    plain = target.generate(ids, attention_mask=mask, max_new_tokens=NEW)
    ends = plain[:2, [ids.shape[1] + 3, ids.shape[1] + 20]].diagonal().tolist()
    options = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    for _ in range(2):
        assert torch.equal(dspine_hf.generate(target, drafter, ids, **options), plain)
    assert ran_ahead(recorder.events)


def test_a_seed_gives_the_text_that_it_gives_without_running_ahead(case, recorder, monkeypatch):
    target, drafter, (ids, mask) = case
    texts = []
    for ahead in (True, True, False):
        if not ahead:
            monkeypatch.setattr(FastCall, "_run_ahead", lambda call, unread: None)
        torch.manual_seed(3)
        recorder.events.clear()
        texts.append(dspine_hf.generate(target, drafter, ids, attention_mask=mask, max_new_tokens=NEW, do_sample=True))
        assert ran_ahead(recorder.events) == ahead
    assert torch.equal(texts[1], texts[2])


class Stops(StoppingCriteria):
    """Stops a text of so many columns."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize(
    "options",
    [{"stopping_criteria": [Stops(20)]}, {"max_time": 600.0}, {"adaptive": True}],
    ids=["criterion", "time", "adaptive"],
)
def test_what_the_host_decides_waits_for_every_report(case, recorder, options):
    target, drafter, (ids, mask) = case
    plain = {name: value for name, value in options.items() if name != "adaptive"}
    expected = target.generate(ids, attention_mask=mask, max_new_tokens=NEW, **plain)
    out = None

    def run():
        nonlocal out
        out = dspine_hf.generate(target, drafter, ids, attention_mask=mask, max_new_tokens=NEW, **options)

    events = events_of(recorder, run)
    assert torch.equal(out, expected)
    assert events == ["read", *["launch", "read"] * (len(events) // 2)] and len(events) > 4


def test_a_target_whose_positions_bound_the_drafts_waits_for_every_report(recorder):
    target = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=4, n_head=4)).eval()
    ids = prompt(5, seed=1)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    plain = target.generate(ids, **options)
    out = []
    events = events_of(recorder, lambda: out.append(dspine_hf.generate(target, None, ids, **options)))
    assert all(torch.equal(found, plain) for found in out)
    assert events == ["read", *["launch", "read"] * 19]


class Broken(BaseStreamer):
    """Notes the tokens that it is given, and stops the call at one of them."""

    def __init__(self, last, error=KeyboardInterrupt):
        self.values, self._last, self._error = [], last, error

    def put(self, value):
        self.values.extend(value.flatten().tolist())
        if len(self.values) == self._last:
            raise self._error

    def end(self):
        self.values.append("end")


def test_a_streamer_sees_the_text_in_order_to_its_end(case, recorder):
    target, drafter, (ids, _) = case
    options = {"max_new_tokens": NEW, "do_sample": False}
    plain = target.generate(ids[:1], **options)
    for _ in range(2):
        streamer = Broken(None)
        dspine_hf.generate(target, drafter, ids[:1], streamer=streamer, **options)
        assert streamer.values == [*plain[0].tolist(), "end"]
    assert ran_ahead(recorder.events)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_call_that_is_interrupted_leaves_its_graphs_to_the_next(case, recorder, error):
    target, drafter, (ids, _) = case
    options = {"max_new_tokens": NEW, "do_sample": False}
    plain = target.generate(ids[:1], **options)
    dspine_hf.generate(target, drafter, ids[:1], **options)
    figures, recorded = drafter.generation_stats, recorder.recorded
    for last in (ids.shape[1] + 1, ids.shape[1] + 9):
        with pytest.raises(error):
            dspine_hf.generate(target, drafter, ids[:1], streamer=Broken(last, error), **options)
        assert torch.equal(dspine_hf.generate(target, drafter, ids[:1], **options), plain)
        assert drafter.generation_stats == figures and recorder.recorded == recorded


def test_capture_that_fails_later_on_goes_on_without(case, recorder, monkeypatch):
    target, drafter, (ids, mask) = case
    monkeypatch.setattr(static_cache, "FIRST_BUCKET", 32)
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
    plain = target.generate(ids, **options)

    def failing(run, pool):
        if recorder.recorded == 3:  # the second half of a round over more columns
            raise RuntimeError("out of memory")
        return recorder(run, pool)

    monkeypatch.setattr(decoding, "Options", functools.partial(fast_call.Options, recorder=failing))
    with pytest.warns(UserWarning, match="out of memory"):
        assert torch.equal(dspine_hf.generate(target, drafter, ids, **options), plain)
    assert ran_ahead(recorder.events)
