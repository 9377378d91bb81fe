"""Unusual and wrong input: the text of plain generate(), or an error that names the cure before the target runs."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessorList, StoppingCriteriaList

from dspine_hf import DSpineDraftModel
from helpers.oracle import greedy_pair, oracle_for, prompt, small_target

OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module")
def drafter(target):
    return oracle_for(target)


@pytest.fixture
def saved(target, tmp_path):
    DSpineDraftModel.for_target(target, num_hidden_layers=2, block_size=5).save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder, change):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refused(target, drafter, error, message, ids, **options):
    passes = []
    hook = target.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises(error, match=message):
            target.generate(ids, assistant_model=drafter, **{**OPTIONS, **options})
    finally:
        hook.remove()
    assert not passes


@pytest.mark.parametrize("bad", [61, 1000, -1])
def test_token_ids_outside_the_vocabulary_are_refused_before_any_pass(target, drafter, bad):
    ids = prompt()
    ids[0, 2] = bad
    refused(target, drafter, ValueError, rf"token ids in 0\.\.60.*found {bad}.*tokenizer", ids)


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"max_new_tokens": -1}, {"max_new_tokens": None, "max_length": 3}]
)
def test_no_room_for_a_new_token_is_the_error_of_plain_generate(target, drafter, options):
    with pytest.raises(ValueError) as plain:
        target.generate(prompt(), **{**OPTIONS, **options})
    with pytest.raises(ValueError) as drafted:
        target.generate(prompt(), assistant_model=drafter, **{**OPTIONS, **options})
    assert str(plain.value) == str(drafted.value)


def test_an_empty_prompt_is_refused_or_starts_at_the_first_token(target):
    text = target.generate(**{**OPTIONS, "max_new_tokens": 30})
    drafter = oracle_for(target, text[0])
    assert torch.equal(target.generate(assistant_model=drafter, **OPTIONS), text[:, :13])
    assert drafter.generation_stats.accepted > 0
    empty = torch.empty(1, 0, dtype=torch.long)
    refused(target, drafter, ValueError, "at least one token.*bos_token_id", empty)


def test_a_prompt_of_padding_alone_gives_the_plain_text(target):
    ids = torch.zeros(1, 4, dtype=torch.long)
    mask = torch.zeros(1, 4, dtype=torch.long)
    drafter = oracle_for(target)
    plain = target.generate(ids, attention_mask=mask, **OPTIONS)
    assert torch.equal(target.generate(ids, attention_mask=mask, assistant_model=drafter, **OPTIONS), plain)


def test_a_prompt_longer_than_the_targets_positions_gives_the_plain_text():
    target = small_target(max_position_embeddings=16)
    plain, drafted, drafter = greedy_pair(target, prompt(20))
    assert torch.equal(plain, drafted)
    assert drafter.generation_stats.accepted > 0


def learned_positions(count: int, **overrides):
    shapes = {
        "vocab_size": 61,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": count,
        "initializer_range": 0.4,
    }
    torch.manual_seed(0)
    config = GPT2Config(**{**shapes, "bos_token_id": 1, "eos_token_id": None, **overrides})
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


def test_drafts_end_at_the_last_learned_position():
    """The text ends one token before the positions do; a draft beyond them would fail."""
    ids = prompt(5)
    text = learned_positions(64).generate(ids, max_new_tokens=30, do_sample=False)
    target = learned_positions(24)
    target.transformer.load_state_dict(
        {k: v[:24] if k == "wpe.weight" else v for k, v in learned_positions(64).transformer.state_dict().items()}
    )
    drafter = oracle_for(target, text[0], miss_every=1000)
    stop = StoppingCriteriaList([lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 24])])
    options = {"max_new_tokens": 50, "do_sample": False, "stopping_criteria": stop}
    plain = target.generate(ids, **options)
    assert plain.shape == (1, 24)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)
    assert drafter.generation_stats.accepted > 0


LENGTH_DEPENDENT = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0, 5.0, 7.0, 9.0],
    },
}


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_text_is_plain_where_rotary_positions_hang_on_the_length(kind):
    """A pass that reaches over the boundary would rotate every row of it as if the text were longer."""
    limit = 64 if kind == "longrope" else 16
    for seed in range(3):
        target = small_target(seed, rope_parameters=LENGTH_DEPENDENT[kind], max_position_embeddings=limit)
        for length in (7, 9, 20):
            plain, drafted, drafter = greedy_pair(target, prompt(length), miss_every=1000)
            assert torch.equal(plain, drafted)
            assert drafter.generation_stats.accepted > 0 or length == 20


def test_an_eos_list_ends_the_text_at_either_token(target):
    text = target.generate(prompt(), max_new_tokens=40, do_sample=False)[0]
    for ends in ([int(text[12]), int(text[15])], [int(text[15]), 60]):
        plain, drafted, _ = greedy_pair(target, prompt(), miss_every=1000, eos_token_id=ends)
        assert torch.equal(plain, drafted)


CANNOT_MIX = {
    "dola": {"dola_layers": "low"},
    "constraints": {"force_words_ids": [[5, 6]], "num_beams": 2},
}


@pytest.mark.parametrize("name", CANNOT_MIX)
def test_modes_that_cannot_mix_are_refused_before_any_pass(target, drafter, name):
    refused(target, drafter, ValueError, "num_beams|dola|force_words_ids|onstrain", prompt(), **CANNOT_MIX[name])


def test_a_config_without_its_shapes_is_refused(saved):
    edit_config(saved, lambda content: content.pop("hidden_size"))
    with pytest.raises(ValueError, match=r"hidden_size.*Save the drafter again"):
        DSpineDraftModel.from_pretrained(saved)


def test_an_unknown_field_of_a_config_changes_nothing(saved, target):
    edit_config(saved, lambda content: content.update(a_field_of_tomorrow=3))
    drafter = DSpineDraftModel.from_pretrained(saved)
    assert torch.equal(
        target.generate(prompt(), assistant_model=drafter, **OPTIONS), target.generate(prompt(), **OPTIONS)
    )


def test_weights_of_other_shapes_than_the_config_says_are_refused(saved):
    edit_config(saved, lambda content: content.update(intermediate_size=40))
    with pytest.raises(ValueError, match=r"shapes that config.json says.*Save the drafter again"):
        DSpineDraftModel.from_pretrained(saved)


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_broken_weight_file_is_refused_with_the_cure(saved, damage):
    path = saved / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "garbage": b"\xff" * 200, "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"whole safetensors.*Save the drafter again"):
        DSpineDraftModel.from_pretrained(saved)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_cost_speed_and_never_text(saved, target, value, do_sample):
    path = saved / "model.safetensors"
    weights = load_file(path)
    weights["layers.1.self_attn.o_proj.weight"].fill_(value)
    save_file(weights, path, metadata={"format": "pt"})
    drafter = DSpineDraftModel.from_pretrained(saved)
    options = {**OPTIONS, "do_sample": do_sample, **({"top_k": 1} if do_sample else {})}
    assert torch.equal(
        target.generate(prompt(), assistant_model=drafter, **options), target.generate(prompt(), **OPTIONS)
    )
    penalised = {**options, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    plain = target.generate(prompt(), **{**penalised, "do_sample": False, "top_k": None})
    assert torch.equal(target.generate(prompt(), assistant_model=drafter, **penalised), plain)


def test_processors_that_forbid_everything_but_one_token_are_followed(target, drafter):
    def only_five(ids, scores):
        scores = torch.full_like(scores, float("-inf"))
        scores[:, 5] = 0
        return scores

    drafted = target.generate(
        prompt(), assistant_model=drafter, logits_processor=LogitsProcessorList([only_five]), **OPTIONS
    )
    assert drafted[0, 7:].tolist() == [5] * 12
