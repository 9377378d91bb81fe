"""What a drafter borrows of its target is what the target computes, and the wrong target is noticed."""

import copy
import gc
import warnings
import weakref

import pytest
import torch

import dspine_hf
from drafter_cases import tiny_drafter, tiny_target
from dspine_hf import DSpineDraftModel, target_dspine
from helpers.families import FAMILIES, OTHER_INPUTS, RECURRENT, VOCABULARY, family_target

# FalconH1 is refused as a target of generate(); its head has a scale of its own all the same.
HEADS = {**FAMILIES, "FalconH1": {**RECURRENT["FalconH1"], "lm_head_multiplier": 0.3}}


@pytest.mark.parametrize("family", HEADS)
def test_embeddings_and_scores_are_those_that_the_target_computes(family):
    model, ids = family_target(family, **HEADS[family]), torch.tensor([[5, 9, 3, 44]])
    out = model(ids, output_hidden_states=True)
    drafter = DSpineDraftModel.for_target(model)
    drafter.check_target(model)
    view = drafter.bind_target(model)
    if family not in OTHER_INPUTS:
        torch.testing.assert_close(view.embed(ids), out.hidden_states[0], rtol=0, atol=1e-5)
    last = out.hidden_states[-1]
    torch.testing.assert_close(view.logits(last), out.logits, rtol=0, atol=1e-5)
    picked = torch.tensor([[7, VOCABULARY - 1, 0]])
    torch.testing.assert_close(view.row_logits(last, picked), out.logits[:, :, picked[0]], rtol=0, atol=1e-5)
    assert view.logits(last).dtype == view.row_logits(last, picked).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_target_and_an_fp32_drafter_meet(dtype):
    target = tiny_target().to(dtype)
    drafter = tiny_drafter(target)
    view = drafter.bind_target(target)
    ids = torch.tensor([[5, 9]])
    assert view.embed(ids).dtype == torch.float32
    assert view.phi(ids).dtype == view.logits(view.embed(ids)).dtype == torch.float32
    cast = copy.deepcopy(drafter).to(torch.bfloat16)
    cache = cast.new_cache()
    cast.extend_context(cache, torch.randn(1, 5, 2 * drafter.config.hidden_size, dtype=dtype), torch.arange(5)[None])
    block = cast.draft_block(cast.bind_target(target), cache, torch.tensor([7]), torch.tensor([5]))
    assert block.unary.dtype == block.transitions.pairs.dtype == block.transitions.first.dtype == torch.float32


WRONG_SHAPES = {
    "width": ({"hidden_size": 32}, "hidden_size=24.* 32,"),
    "vocabulary": ({"vocab_size": 64}, "vocab_size=61.* 64 "),
    "depth": ({"num_hidden_layers": 7}, "8 layers.* 7\\."),
}


@pytest.mark.parametrize("overrides, message", WRONG_SHAPES.values(), ids=WRONG_SHAPES.keys())
def test_a_target_of_other_shapes_is_refused_with_the_cure(overrides, message):
    drafter = tiny_drafter(tiny_target())
    with pytest.raises(ValueError, match=message) as refusal:
        drafter.check_target(tiny_target(**overrides))
    assert "Load the drafter that belongs to it" in str(refusal.value)


def test_a_model_without_output_embedding_is_refused():
    target = tiny_target()
    with pytest.raises(ValueError, match="causal LM"):
        tiny_drafter(target).check_target(target.model)
    with pytest.raises(ValueError, match="causal LM"):
        DSpineDraftModel.for_target(target.model)


def warnings_of(drafter, *targets) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for target in targets:
            drafter.check_target(target)
    return [str(w.message) for w in caught]


def test_another_target_of_the_same_shapes_warns_once():
    target, other, third = (tiny_target(seed) for seed in (0, 5, 6))
    drafter = tiny_drafter(target)
    assert warnings_of(drafter, target, target) == []
    (message,) = warnings_of(drafter, other, target, other)
    assert "another target" in message and "Load the drafter" in message
    assert warnings_of(drafter, other) == []
    assert len(warnings_of(drafter, third, other)) == 1
    assert len(warnings_of(tiny_drafter(target), other)) == 1


def test_another_target_is_noticed_behind_a_common_mean():
    """Rows that share a large mean have cosines near 1 in every model."""
    target, other = tiny_target(0), tiny_target(5)
    for model in (target, other):
        model.get_output_embeddings().weight.add_(3.0)
    drafter = tiny_drafter(target)
    assert warnings_of(drafter, target) == []
    assert len(warnings_of(drafter, other)) == 1


def quantised(model, bits: int):
    """Every weight matrix rounded to `bits` bits with one scale for each 8 weights."""
    copied = copy.deepcopy(model)
    for weight in copied.parameters():
        if weight.dim() == 2:
            groups = weight.view(-1, 8)
            scale = groups.abs().amax(1, keepdim=True).clamp_min(1e-9) / (2 ** (bits - 1) - 1)
            weight.copy_(((groups / scale).round() * scale).view_as(weight))
    return copied


def finetuned(model):
    copied = copy.deepcopy(model)
    for weight in copied.parameters():
        weight.add_(torch.randn_like(weight) * 0.05 * weight.std())
    return copied


def scaled_head(model):
    copied = copy.deepcopy(model)
    copied.get_output_embeddings().weight.mul_(3.0)
    return copied


COPIES = {
    "bf16": lambda model: copy.deepcopy(model).to(torch.bfloat16),
    "fp16": lambda model: copy.deepcopy(model).to(torch.float16),
    "8 bits": lambda model: quantised(model, 8),
    "4 bits": lambda model: quantised(model, 4),
    "fine-tuned": finetuned,
    "scaled": scaled_head,
}


@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES.keys())
def test_a_copy_of_the_right_target_does_not_warn(copy_of):
    for seed in range(5):
        target = tiny_target(seed)
        assert warnings_of(tiny_drafter(target), copy_of(target)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_drafter_still_knows_its_target(tmp_path, dtype):
    target = tiny_target()
    tiny_drafter(target).save_pretrained(tmp_path)
    drafter = DSpineDraftModel.from_pretrained(tmp_path, dtype=dtype)
    assert warnings_of(drafter, target, copy.deepcopy(target).to(torch.bfloat16), quantised(target, 4)) == []
    assert len(warnings_of(drafter, tiny_target(5))) == 1


def test_a_drafter_without_fingerprint_accepts_any_target_of_its_shapes():
    """A converted checkpoint does not know which target it was trained for."""
    drafter = tiny_drafter(tiny_target())
    drafter.fingerprint.zero_()
    assert warnings_of(drafter, tiny_target(5)) == []


def test_a_table_of_features_is_that_of_the_weights_as_they_are_now(monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    ids = torch.tensor([[3, 0], [5, 5]])
    assert drafter.bind_target(target).tabulated()._table is None  # a CPU computes them
    monkeypatch.setattr(target_dspine, "TABLE_DEVICES", ("cpu",))
    monkeypatch.setattr(target_dspine, "TABLE_ROWS", 7)
    assert drafter.bind_target(target).tabulated(most=1)._table is None
    view = drafter.bind_target(target).tabulated()
    torch.testing.assert_close(view.phi(ids), drafter.bind_target(target).phi(ids), rtol=1e-5, atol=1e-5)
    assert drafter.bind_target(target).tabulated()._table is view._table is target_dspine.table_of(drafter)
    with torch.no_grad():
        target.get_output_embeddings().weight.mul_(-1)
    for model in (target, tiny_target()):  # changed in place; another one
        found, exact = drafter.bind_target(model).tabulated().phi(ids), drafter.bind_target(model).phi(ids)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    assert not torch.equal(drafter.bind_target(target).tabulated().phi(ids), view.phi(ids))
    half = drafter.to(torch.bfloat16)
    assert half.bind_target(target).tabulated()._table.dtype is torch.bfloat16


def test_the_fast_loop_with_a_table_drafts_the_same(monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    ids = torch.randint(5, 40, (1, 6))
    texts, rounds = [], []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(target_dspine, "TABLE_DEVICES", devices)
        texts.append(dspine_hf.generate(target, drafter, ids, max_new_tokens=12, do_sample=False))
        rounds.append(drafter.generation_stats.acceptance_length)
    assert target_dspine.table_of(drafter) is not None
    assert torch.equal(*texts) and rounds[0] == rounds[1]


def test_a_check_keeps_no_target_alive():
    drafter, other = tiny_drafter(tiny_target()), tiny_target(5)
    assert len(warnings_of(drafter, other)) == 1
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
