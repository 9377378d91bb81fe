"""The fast loop as a call: stops, streamers, figures, outputs, and what it refuses."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

import dspine_hf
from helpers.batch_oracle import batch_oracle, padded
from helpers.families import RECURRENT, family_target
from helpers.oracle import oracle_for, prompt, small_target
from helpers.words import character_tokenizer

NEW = 24


@pytest.fixture(scope="module")
def target():
    return small_target(seed=7)


@pytest.fixture
def case(target):
    texts = [prompt(7, seed=1), prompt(3, seed=2), prompt(1, seed=3)]
    references = [target.generate(text, max_new_tokens=60)[0] for text in texts]
    return batch_oracle(target, references), texts, references


class Stop(StoppingCriteria):
    """Stops a row after the first of these tokens; keeps the lengths that it saw."""

    def __init__(self, tokens):
        self.tokens, self.lengths = torch.tensor(tokens), []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize("place", range(7))
def test_a_criterion_stops_a_row_at_its_token_wherever_that_lies_in_a_block(target, case, place):
    drafter, texts, references = case
    drafter.miss_every = 100
    token = int(references[0][7 + place])
    seen = [Stop([token]), Stop([token])]
    plain = target.generate(texts[0], max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([seen[0]]))
    out = dspine_hf.generate(
        target, drafter, texts[0], max_new_tokens=NEW, stopping_criteria=StoppingCriteriaList([seen[1]])
    )
    assert torch.equal(out, plain) and seen[0].lengths == seen[1].lengths


def test_rows_stop_one_by_one_and_are_padded(target, case):
    drafter, texts, references = case
    ids, mask = padded(texts)
    ends = [int(references[0][7 + 4]), int(references[1][3 + 9])]
    options = {"attention_mask": mask, "max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    assert torch.equal(dspine_hf.generate(target, drafter, ids, **options), plain)
    assert len({int((row == 0).sum()) for row in plain}) > 1  # otherwise no row stopped early
    stop = StoppingCriteriaList([Stop(ends)])
    options = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    out = dspine_hf.generate(target, drafter, ids, stopping_criteria=stop, **options)
    assert torch.equal(out, plain)


@pytest.mark.parametrize("where", ["argument", "config", "model"])
def test_stop_strings_end_a_text_where_plain_generate_ends_it(target, case, where):
    drafter, texts, references = case
    tokenizer = character_tokenizer()
    strings = [tokenizer.decode(references[0][7 + 5 : 7 + 7])]
    options = {"max_new_tokens": NEW, "tokenizer": tokenizer}
    plain = target.generate(texts[0], stop_strings=strings, **options)
    if where == "argument":
        options["stop_strings"] = strings
    elif where == "config":
        options["generation_config"] = GenerationConfig(stop_strings=strings, max_new_tokens=NEW)
        del options["max_new_tokens"]
    else:
        target.generation_config.stop_strings = strings
    try:
        assert torch.equal(dspine_hf.generate(target, drafter, texts[0], **options), plain)
    finally:
        target.generation_config.stop_strings = None
    assert plain.shape[1] < 7 + NEW
    with pytest.raises(ValueError, match="tokenizer"):
        dspine_hf.generate(target, drafter, texts[0], stop_strings=strings, max_new_tokens=NEW)


class Collector(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], False

    def put(self, value):
        self.values.append(value)

    def end(self):
        self.ended = True


@pytest.mark.parametrize("options", [{}, {"eos_token_id": 9, "pad_token_id": 0}, {"no_repeat_ngram_size": 2}], ids=str)
def test_a_streamer_sees_what_plain_generate_shows_it(target, case, options):
    drafter, texts, _ = case
    plain, fast = Collector(), Collector()
    target.generate(texts[0], max_new_tokens=NEW, streamer=plain, **options)
    dspine_hf.generate(target, drafter, texts[0], max_new_tokens=NEW, streamer=fast, **options)
    assert fast.ended and len(fast.values) == len(plain.values)
    assert all(torch.equal(a, b) for a, b in zip(fast.values, plain.values, strict=True))


@pytest.mark.parametrize("options", [{}, {"eos_token_id": 9, "pad_token_id": 0}, {"max_new_tokens": 1}], ids=str)
def test_figures_are_those_of_a_drafted_generate(target, case, options):
    _, texts, references = case
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    batched, single = batch_oracle(target, references[:1]), oracle_for(target, references[0])
    dspine_hf.generate(target, batched, texts[0], **options)
    target.generate(texts[0], assistant_model=single, **options)
    found, wanted = batched.generation_stats, single.generation_stats
    assert found == wanted


def test_figures_of_a_batch_are_sums_over_its_rows(target, case):
    drafter, texts, references = case
    ids, mask = padded(texts)
    drafter.miss_every = 1000
    dspine_hf.generate(target, drafter, ids, attention_mask=mask, max_new_tokens=NEW)
    whole = drafter.generation_stats
    parts = []
    for text, reference in zip(texts, references, strict=True):
        alone = batch_oracle(target, [reference], miss_every=1000)
        dspine_hf.generate(target, alone, text, max_new_tokens=NEW)
        parts.append(alone.generation_stats)
    assert whole.new_tokens == 3 * NEW
    for name in ("rounds", "accepted"):
        assert getattr(whole, name) == pytest.approx(sum(getattr(part, name) for part in parts), abs=3)


def test_outputs_come_as_an_object_when_asked_for(target, case):
    drafter, texts, references = case
    out = dspine_hf.generate(target, drafter, texts[0], max_new_tokens=NEW, return_dict_in_generate=True)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert torch.equal(out.sequences[0], references[0][: 7 + NEW])


def test_the_target_keeps_its_attention_cache_and_config(target, case):
    drafter, texts, _ = case
    before = target.config.to_dict(), target.config._attn_implementation, target.generation_config.to_dict()
    dspine_hf.generate(target, drafter, texts[0], max_new_tokens=NEW)
    after = target.config.to_dict(), target.config._attn_implementation, target.generation_config.to_dict()
    assert before == after


def test_an_error_in_the_middle_gives_the_attention_back(target, case):
    drafter, texts, _ = case

    def fail(*args, **kwargs):
        raise RuntimeError("in the middle")

    drafter.draft_block = fail
    with pytest.raises(RuntimeError, match="in the middle"):
        dspine_hf.generate(target, drafter, texts[0], max_new_tokens=NEW)
    assert target.config._attn_implementation == "sdpa"


def test_fewer_drafted_tokens_are_kept_to(target, case):
    drafter, texts, references = case
    out = dspine_hf.generate(target, drafter, texts[0], max_new_tokens=NEW, num_assistant_tokens=2)
    assert torch.equal(out[0], references[0][: 7 + NEW])
    assert max(len(drafter.generation_stats.slot_trials), 1) == 2


REFUSED = {
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "num_beams": {"num_beams": 2},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 3, 32)},
    "past_key_values|cache": {"past_key_values": "a cache"},
    "padding on the left": {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0]])},
    "guidance_scale": {"guidance_scale": 1.5},
    "cache_implementation": {"cache_implementation": "quantized"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_by_name(target, case, name):
    drafter, texts, _ = case
    options = dict(REFUSED[name])
    if "past_key_values" in options:
        options["past_key_values"] = DynamicCache(config=target.config)
    with pytest.raises(ValueError, match=name):
        dspine_hf.generate(target, drafter, texts[0], max_new_tokens=NEW, **options)


def test_a_batch_has_no_streamer(target, case):
    drafter, texts, _ = case
    with pytest.raises(ValueError, match="streamer"):
        dspine_hf.generate(target, drafter, texts[0].repeat(2, 1), max_new_tokens=NEW, streamer=Collector())


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_targets_are_refused_with_a_way_out(family):
    recurrent = family_target(family)
    with pytest.raises(ValueError, match="keep|state|position"):
        dspine_hf.generate(recurrent, None, prompt(5), max_new_tokens=4)


def test_a_drafter_of_another_target_is_refused(target):
    other = batch_oracle(small_target(seed=7, hidden_size=16))
    with pytest.raises(ValueError, match="hidden_size"):
        dspine_hf.generate(target, other, prompt(), max_new_tokens=4)
