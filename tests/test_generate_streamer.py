"""Streamers get the same values, one token at a time and never past the stop."""

import threading

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from helpers.oracle import oracle_for, prompt, small_target
from helpers.words import character_tokenizer
from test_generate_stops import StopAtLength


class Recorder(BaseStreamer):
    def __init__(self):
        self.values = []

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.values.append("end")


@pytest.fixture(scope="module")
def target():
    return small_target(seed=7)


@pytest.fixture(scope="module")
def drafter(target):
    return oracle_for(target, target.generate(prompt(), max_new_tokens=60, do_sample=False)[0], 1000)


@pytest.mark.parametrize("new_tokens", [1, 2, 7, 20])
def test_a_streamer_gets_what_it_gets_from_plain_generate(target, drafter, new_tokens):
    recorders = []
    for assistant in ({}, {"assistant_model": drafter}):
        recorders.append(Recorder())
        target.generate(prompt(), max_new_tokens=new_tokens, do_sample=False, streamer=recorders[-1], **assistant)
    assert recorders[0].values == recorders[1].values
    assert recorders[1].values[-1] == "end" and len(recorders[1].values) == new_tokens + 2


@pytest.mark.parametrize("length", range(8, 16))
def test_a_streamer_gets_nothing_past_a_criterion(target, drafter, length):
    recorders = []
    for assistant in ({}, {"assistant_model": drafter}):
        recorders.append(Recorder())
        target.generate(
            prompt(), max_new_tokens=20, do_sample=False, streamer=recorders[-1],
            stopping_criteria=[StopAtLength(length)], **assistant,
        )  # fmt: skip
    assert recorders[0].values == recorders[1].values


def test_text_streams_from_another_thread_and_the_reader_sees_the_stats(target, drafter):
    tokenizer = character_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {"max_new_tokens": 20, "do_sample": False}
    fresh = oracle_for(target, drafter.reference, 1000)
    worker = threading.Thread(
        target=target.generate, args=(prompt(),), kwargs={**options, "streamer": streamer, "assistant_model": fresh}
    )
    worker.start()
    text = "".join(streamer)
    worker.join()
    assert text == tokenizer.decode(target.generate(prompt(), **options)[0, 7:])
    assert fresh.generation_stats.accepted > 0
    assert torch.is_tensor(prompt())
