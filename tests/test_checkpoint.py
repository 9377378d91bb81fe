"""A drafter survives saving and loading: the same drafts, nothing of the target in the file, fp32 where it must be."""

import copy
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from drafter_cases import VOCABULARY, filled_cache, random_context, redraw, tiny_drafter, tiny_target
from dspine_hf import DSpineConfig, DSpineDraftModel

ANCHOR = torch.tensor([7])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def draft(drafter, target, rows: int = 40):
    """One block after a context long enough for rotary positions to matter.

    Drafted by a copy: weights mapped from a file lie at other addresses, and that alone may change a last bit.
    """
    drafter = copy.deepcopy(drafter)
    features, positions = random_context(rows, drafter.config, first_position=100)
    cache = filled_cache(drafter, features, positions)
    return drafter.draft_block(drafter.bind_target(target), cache, ANCHOR, torch.tensor([100 + rows]))


def assert_same_drafts(found, wanted):
    assert torch.equal(found.candidates, wanted.candidates)
    assert torch.equal(found.unary, wanted.unary)
    if wanted.transitions is not None:
        assert torch.equal(found.transitions.pairs, wanted.transitions.pairs)


CASES = {
    "every layer writes": {},
    "the last layer writes": {"injection": "last"},
    "DFlash": {"injection": "none", "selection": "independent"},
    "mask token, write before the MLP": {"mask_token_id": 3, "injection_placement": "mlp"},
    "scaled rotary": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES.keys())
def test_drafts_are_identical_after_a_load(tmp_path, target, overrides):
    drafter = tiny_drafter(target, **overrides)
    wanted = draft(drafter, target)
    drafter.save_pretrained(tmp_path)
    for loaded in (DSpineDraftModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is DSpineDraftModel and not loaded.training
        assert torch.equal(loaded.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)
        assert loaded.config.to_diff_dict() == drafter.config.to_diff_dict()
        for name, value in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value), name
        assert_same_drafts(draft(loaded, target), wanted)


def test_the_file_holds_the_drafters_tensors_and_no_others(tmp_path, target):
    drafter = tiny_drafter(target)
    drafter.check_target(target)
    features, positions = random_context(3, drafter.config)
    cache = filled_cache(drafter, features, positions)
    drafter.draft_block(drafter.bind_target(target), cache, ANCHOR, torch.tensor([3]))  # its work adds nothing to save
    drafter.save_pretrained(tmp_path)
    own = {name for name, _ in drafter.named_parameters()} | {"transfer.W", "transfer.c", "fingerprint"}
    files = list(tmp_path.glob("*.safetensors"))
    assert [f.name for f in files] == ["model.safetensors"]
    with safe_open(files[0], "pt") as saved:
        assert set(saved.keys()) == own
        shapes = {name: saved.get_slice(name).get_shape() for name in saved.keys()}
    assert not any(VOCABULARY in shape for shape in shapes.values())
    assert not any("embed_tokens" in name or "lm_head" in name for name in shapes)
    numbers = sum(value.numel() * value.element_size() for value in drafter.state_dict().values())
    assert numbers <= files[0].stat().st_size < numbers + 16_384


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_target_changes_nothing_in_the_file(tmp_path, tied):
    target = tiny_target(tie_word_embeddings=tied)
    shared = target.get_output_embeddings().weight is target.get_input_embeddings().weight
    assert shared == tied
    drafter = tiny_drafter(target)
    assert not drafter.config.tie_word_embeddings
    wanted = draft(drafter, target)
    drafter.save_pretrained(tmp_path)
    loaded = DSpineDraftModel.from_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(drafter.state_dict())
    assert_same_drafts(draft(loaded, target), wanted)


def test_a_bf16_load_keeps_the_transfer_space_in_fp32(tmp_path, target):
    drafter = tiny_drafter(target)
    drafter.save_pretrained(tmp_path)
    loaded = DSpineDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == loaded.fc.weight.dtype == loaded.layers[0].injection.P.weight.dtype == torch.bfloat16
    for name in ("W", "c"):
        value = getattr(loaded.transfer, name)
        assert value.dtype == torch.float32
        assert torch.equal(value, getattr(drafter.transfer, name))
    assert loaded.rotary_emb.inv_freq.dtype == torch.float32
    assert_same_drafts(draft(loaded, target), draft(copy.deepcopy(drafter).to(torch.bfloat16), target))


def test_a_bf16_drafter_is_saved_with_its_transfer_space_in_fp32(tmp_path, target):
    drafter = tiny_drafter(target).to(torch.bfloat16)
    wanted = draft(drafter, target)
    drafter.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["transfer.W"].dtype == saved["transfer.c"].dtype == torch.float32
    assert saved["fc.weight"].dtype == torch.bfloat16
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.fc.weight.dtype == torch.bfloat16
    assert_same_drafts(draft(loaded, target), wanted)


def test_shards_load_to_the_same_drafts(tmp_path, target):
    drafter = tiny_drafter(target)
    drafter.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_drafts(draft(DSpineDraftModel.from_pretrained(tmp_path), target), draft(drafter, target))


def test_a_config_survives_its_json_file(tmp_path, target):
    config = tiny_drafter(target, injection="last", context_window=7, logit_softcap=5.0, logit_scale=0.5).config
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is DSpineConfig
    assert loaded.to_diff_dict() == config.to_diff_dict()
    assert (loaded.injection, loaded.context_window, loaded.logit_softcap, loaded.logit_scale) == ("last", 7, 5.0, 0.5)


def test_a_fresh_drafter_drafts_like_the_same_backbone_without_injections(target):
    """U starts at zero, so that training begins from plain block drafting."""
    torch.manual_seed(3)
    fresh = DSpineDraftModel.for_target(target, num_hidden_layers=2, transfer_rank=6, num_candidates=4, block_size=5)
    for layer in fresh.layers:
        assert not layer.injection.U.weight.any()
        assert layer.injection.P.weight.any() and layer.injection.A.weight.any() and layer.injection.B.weight.any()
    plain = DSpineDraftModel.for_target(
        target, num_hidden_layers=2, num_candidates=4, block_size=5, injection="none", selection="independent"
    )
    backbone = {k: v for k, v in fresh.state_dict().items() if k in plain.state_dict() and "transfer" not in k}
    plain.load_state_dict(backbone, strict=False)
    assert torch.equal(draft(fresh, target).unary, draft(plain, target).unary)


def test_a_fresh_drafter_has_finite_weights_of_the_initial_size(target):
    torch.manual_seed(3)
    drafter = DSpineDraftModel.for_target(target, num_hidden_layers=2, transfer_rank=6, initializer_range=0.05)
    for name, value in drafter.named_parameters():
        assert bool(value.isfinite().all()), name
        if value.dim() == 2 and not name.endswith("U.weight"):
            assert 0.03 < value.std() < 0.07, name
        elif name.endswith("norm.weight"):
            assert bool((value == 1).all()), name
    mean = target.get_input_embeddings().weight.mean(0)
    torch.testing.assert_close(drafter.mask_embedding.detach(), mean)


def test_weights_missing_from_a_file_are_initialised(tmp_path, target):
    """A plain block drafter's file in a drafter with injections: the backbone loads, the injections start afresh."""
    drafter = tiny_drafter(target)
    drafter.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    kept = {k: v for k, v in load_file(path).items() if ".injection." not in k and k != "mask_embedding"}
    save_file(kept, path, metadata={"format": "pt"})
    loaded, report = DSpineDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == set(drafter.state_dict()) - set(kept)
    for name, value in loaded.state_dict().items():
        assert bool(value.isfinite().all()) and value.abs().max() < 100, name
        if name in kept:
            assert torch.equal(value, kept[name])
    assert not any(layer.injection.U.weight.any() for layer in loaded.layers)
    assert all(bool((layer.injection.norm.weight == 1).all()) for layer in loaded.layers)
    assert bool((loaded.mask_embedding != 0).any())


def test_drafts_are_identical_after_a_copy_and_a_pickle(target):
    drafter = tiny_drafter(target)
    with pytest.warns(UserWarning, match="another target"):
        drafter.check_target(tiny_target(seed=5))
    wanted = draft(drafter, target)
    assert_same_drafts(draft(copy.deepcopy(drafter), target), wanted)
    assert_same_drafts(draft(pickle.loads(pickle.dumps(drafter)), target), wanted)
    assert len(pickle.dumps(drafter)) < 4 * sum(v.numel() * 4 for v in drafter.state_dict().values())


def test_binding_a_target_leaves_nothing_on_the_drafter(target):
    drafter = redraw(DSpineDraftModel.for_target(target, num_hidden_layers=2, transfer_rank=6), seed=4)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    modules, attributes = len(list(drafter.modules())), set(vars(drafter))
    drafter.check_target(target)
    features, positions = random_context(3, drafter.config)
    cache = filled_cache(drafter, features, positions)
    drafter.draft_block(drafter.bind_target(target), cache, ANCHOR, torch.tensor([3]))
    assert len(list(drafter.modules())) == modules and set(vars(drafter)) == attributes
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())


def test_a_cast_drafter_keeps_its_rotary_positions(target):
    drafter = tiny_drafter(target)
    cast = copy.deepcopy(drafter).to(torch.bfloat16)
    positions = torch.arange(4000, 4050).unsqueeze(0)
    for found, wanted in zip(
        cast.rotary_emb(torch.zeros(1), positions), drafter.rotary_emb(torch.zeros(1), positions), strict=True
    ):
        assert torch.equal(found, wanted)
