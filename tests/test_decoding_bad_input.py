"""Unusual and wrong input to the fast loop: the text of plain generate(), or an error before the target runs."""

import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LogitsProcessorList

import dspine_hf
from dspine_hf import DSpineDraftModel, decoding
from helpers.batch_oracle import batch_oracle, padded
from helpers.families import family_target
from helpers.oracle import oracle_for, prompt, small_target

OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(scope="module")
def drafter(target):
    return batch_oracle(target)


def refused(target, drafter, error, message, ids, **options):
    passes = []
    hook = target.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises(error, match=message):
            dspine_hf.generate(target, drafter, ids, **{**OPTIONS, **options})
    finally:
        hook.remove()
    assert not passes


def with_token(token):
    ids = prompt()
    ids[0, 2] = token
    return ids


NOTHING = torch.zeros(1, 4, dtype=torch.long)
WRONG = {
    "a token behind the vocabulary": (with_token(61), {}, r"token ids in 0\.\.60.*found 61.*tokenizer"),
    "a negative token": (with_token(-1), {}, r"token ids in 0\.\.60.*found -1.*tokenizer"),
    "an empty prompt": (NOTHING[:, :0], {}, "at least one token.*Pass input_ids"),
    "padding alone": (NOTHING, {"attention_mask": NOTHING}, "a token in every row.*padding_side"),
    "dola": (prompt(), {"dola_layers": "low"}, "dola_layers='low'.*Drop"),
    "forced words": (prompt(), {"force_words_ids": [[5, 6]], "num_beams": 2}, "force_words_ids.*Drop"),
    "constraints": (prompt(), {"constraints": [object()]}, "constraints.*Drop"),
    "groups of beams": (prompt(), {"num_beam_groups": 2, "num_beams": 4}, "num_beam_groups=2.*Drop"),
    "contrastive search": (prompt(), {"penalty_alpha": 0.6, "top_k": 4}, "CONTRASTIVE_SEARCH.*greedy|penalty_alpha"),
    "prompt lookup": (prompt(), {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3.*Drop"),
    "early exit": (prompt(), {"assistant_early_exit": 2}, "assistant_early_exit=2.*Drop"),
    "several samples": (prompt(), {"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2.*Drop"),
    "no cache": (prompt(), {"use_cache": False}, "use_cache=True"),
    "an unknown mode": (prompt(), {"compiled": "fast"}, 'compiled=.fast.: expected True.*"fused".*max-autotune'),
    "another recipe": (prompt(), {"custom_generate": "someone/recipe"}, "custom_generate.*second argument"),
}


@pytest.mark.parametrize(("ids", "options", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_refused_before_any_pass(target, drafter, ids, options, message):
    refused(target, drafter, ValueError, message, ids, **options)


def test_a_row_of_padding_alone_in_a_batch_is_refused(target, drafter):
    ids, mask = padded([prompt(4), prompt(3)])
    mask[1] = 0
    refused(target, drafter, ValueError, "a token in every row", ids, attention_mask=mask)


def test_another_assistant_or_no_drafter_at_all_is_refused(target, drafter):
    refused(target, drafter, ValueError, "assistant_model.*second argument", prompt(), assistant_model=drafter)
    refused(target, target, TypeError, "a DSpine drafter or None.*found LlamaForCausalLM", prompt())
    refused(target, "someone/drafter", TypeError, "found str", prompt())


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"max_new_tokens": -1}, {"max_new_tokens": None, "max_length": 3}], ids=str
)
def test_no_room_for_a_new_token_is_the_error_of_plain_generate(target, drafter, options):
    with pytest.raises(ValueError) as plain:
        target.generate(prompt(), **{**OPTIONS, **options})
    with pytest.raises(ValueError) as fast:
        dspine_hf.generate(target, drafter, prompt(), **{**OPTIONS, **options})
    assert str(plain.value) == str(fast.value)


def only_five(ids, scores):
    scores = torch.full_like(scores, float("-inf"))
    scores[:, 5] = 0
    return scores


SAME = {
    "no prompt at all": (None, {}),
    "a forced end": (prompt(), {"forced_eos_token_id": 5}),
    "a forced beginning": (prompt(1), {"forced_bos_token_id": 5}),
    "one token allowed": (prompt(), {"logits_processor": LogitsProcessorList([only_five])}),
    "one new token": (prompt(), {"max_new_tokens": 1}),
}


@pytest.mark.parametrize(("ids", "options"), SAME.values(), ids=SAME.keys())
def test_text_is_plain_text(target, ids, options):
    plain = target.generate(ids, **{**OPTIONS, **options})
    drafter = batch_oracle(target, plain)
    assert torch.equal(dspine_hf.generate(target, drafter, ids, **{**OPTIONS, **options}), plain)


def test_rotary_positions_have_no_end():
    target = small_target(max_position_embeddings=16)
    plain = target.generate(prompt(20), **OPTIONS)
    drafter = batch_oracle(target, plain)
    assert torch.equal(dspine_hf.generate(target, drafter, prompt(20), **OPTIONS), plain)
    assert drafter.generation_stats.accepted > 0


@pytest.mark.parametrize("family", ["GPT2", "OPT", "GPTJ"])
def test_text_that_outgrows_a_table_of_positions_is_an_error_and_never_another_text(family):
    """Plain generate() fails too, but without saying why; clamped positions would go on with other text."""
    size = {"n_positions": 24, "max_position_embeddings": None} if family != "OPT" else {"max_position_embeddings": 24}
    target = family_target(family, **size)
    fast, drafted = batch_oracle(target), oracle_for(target)
    with pytest.raises((IndexError, RuntimeError)):
        target.generate(prompt(20), **OPTIONS)
    message = r"positions in 0\.\.23.*found 24.*Shorten the prompt"
    for model in (fast, None):
        with pytest.raises(ValueError, match=message):
            dspine_hf.generate(target, model, prompt(20), **OPTIONS)
    with pytest.raises(ValueError, match=message):
        target.generate(prompt(20), assistant_model=drafted, **OPTIONS)
    fits = {**OPTIONS, "max_new_tokens": 5}  # the last token is never run
    assert torch.equal(dspine_hf.generate(target, fast, prompt(20), **fits), target.generate(prompt(20), **fits))
    too_long = prompt(25)
    refused(target, fast, ValueError, r"positions in 0\.\.23.*found 24", too_long)
    with pytest.raises(ValueError, match=message):
        target.generate(too_long, assistant_model=drafted, **OPTIONS)
    padding = torch.nn.functional.pad(prompt(15), (12, 0)), torch.tensor([[0] * 12 + [1] * 15])
    plain = target.generate(padding[0], attention_mask=padding[1], **fits)
    assert torch.equal(dspine_hf.generate(target, fast, padding[0], attention_mask=padding[1], **fits), plain)


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 1}, {"repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_cost_speed_and_never_text(target, value, options, tmp_path):
    DSpineDraftModel.for_target(target, num_hidden_layers=2, block_size=5).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["layers.1.self_attn.o_proj.weight"].fill_(value)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    drafter = DSpineDraftModel.from_pretrained(tmp_path)
    ids, mask = padded([prompt(7), prompt(3)])
    options = {**OPTIONS, "attention_mask": mask, **options}
    plain = target.generate(ids, **options)
    assert torch.equal(dspine_hf.generate(target, drafter, ids, **options), plain)


def test_a_tree_beyond_the_kernels_is_warned_of_once_and_none_within():
    target = small_target()
    drafter, options = batch_oracle(target), {"max_new_tokens": 4, "do_sample": False}
    decoding._warn_of_large_trees.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for nodes in (63, 64, 65):
            dspine_hf.generate(target, drafter, prompt(), tree_nodes=nodes, **options)
            found = [w for w in caught if "tree_nodes above 63" in str(w.message)]
            assert len(found) == (nodes > 63)
    assert found[0].filename == __file__ and "seldom pay" in str(found[0].message)
