"""On equal weights, ("none", "independent") is DFlash: each round drafts what the dflash package drafts."""

from dataclasses import dataclass

import pytest
import torch
from transformers import Qwen3Config

from drafter_cases import tiny_drafter, tiny_target

dflash = pytest.importorskip("dflash.model", reason="needs dflash 0.1.0: pip install --no-deps dflash==0.1.0")

TOLERANCE = 1e-5
MASK = 3
CONFIGS = {
    "grouped queries": {},
    "five layers, sixteen slots": {"num_hidden_layers": 5, "block_size": 16, "target_layer_ids": [0, 1, 3, 5, 6]},
    "one layer, two slots": {"num_hidden_layers": 1, "block_size": 2, "target_layer_ids": [4]},
    "attention bias": {"attention_bias": True},
    "wide heads": {"head_dim": 10, "num_key_value_heads": 4},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 32,
        },
        "max_position_embeddings": 128,
    },
}


@dataclass
class Round:
    """One draft of the dflash loop: what its model was given, and the states that it returned."""

    features: torch.Tensor
    embeds: torch.Tensor
    positions: torch.Tensor
    hidden: torch.Tensor


def dflash_twin(drafter):
    """The dflash package's model with the drafter's weights."""
    c = drafter.config
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("intermediate_size", "rms_norm_eps", "attention_bias", "rope_parameters", "vocab_size")
    config = Qwen3Config(
        **{name: getattr(c, name) for name in names}, max_position_embeddings=c.max_position_embeddings
    )
    config.num_target_layers = c.num_target_layers
    config.dflash_config = {
        "mask_token_id": c.mask_token_id,
        "block_size": c.block_size,
        "target_layer_ids": c.target_layer_ids,
    }
    config._attn_implementation = "sdpa"
    twin = dflash.DFlashDraftModel(config).eval()
    ours = {k: v for k, v in drafter.state_dict().items() if not k.startswith("transfer.") and k != "fingerprint"}
    twin.load_state_dict(ours, strict=True)
    return twin


def record_rounds(twin, target, temperature, prompt_length=9, new_tokens=40):
    """Run the dflash package's own generation loop; keep what went into and out of every draft pass."""
    rounds = []

    def keep(module, args, kwargs, output):
        features, embeds, positions = (kwargs[k] for k in ("target_hidden", "noise_embedding", "position_ids"))
        rounds.append(Round(*(x.clone() for x in (features, embeds, positions, output))))

    handle = twin.register_forward_hook(keep, with_kwargs=True)
    torch.manual_seed(5)
    prompt = torch.randint(4, target.config.vocab_size, (1, prompt_length))
    text = twin.spec_generate(target, prompt, new_tokens, stop_token_ids=None, temperature=temperature)
    handle.remove()
    return text, rounds


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS.keys())
def test_plain_drafts_equal_those_of_the_dflash_package(overrides, temperature):
    target = tiny_target()
    target.get_output_embeddings().weight.mul_(0.2)  # flat distributions, so that sampled drafts are often accepted
    drafter = tiny_drafter(target, injection="none", selection="independent", mask_token_id=MASK, **overrides)
    text, rounds = record_rounds(dflash_twin(drafter), target, temperature)
    view, cache, size = drafter.bind_target(target), drafter.new_cache(), drafter.config.block_size
    kept = []
    for expected in rounds:
        block = expected.embeds.shape[1]
        new = expected.positions.shape[1] - block
        kept.append(new)
        drafter.extend_context(cache, expected.features, expected.positions[:, :new])
        places = expected.positions[:, new:]
        anchor = text[:, places[0, 0]]
        embeds = drafter.block_embeds(view, anchor.view(1, 1), block - 1)
        torch.testing.assert_close(embeds[:, 0], expected.embeds, rtol=0, atol=0)
        output = drafter(embeds, view.phi(anchor.view(1, 1)), places.unsqueeze(1), cache)
        torch.testing.assert_close(drafter.norm(output.hidden)[:, 0], expected.hidden, rtol=0, atol=TOLERANCE)
        logits = target.get_output_embeddings()(expected.hidden[:, 1:])
        draft = drafter.draft_block(view, cache, anchor, places[:, 0], num_slots=block - 1)
        wanted = logits.topk(drafter.config.num_candidates, dim=-1)
        torch.testing.assert_close(draft.unary, wanted.values, rtol=0, atol=TOLERANCE)
        assert draft.candidates.tolist() == wanted.indices.tolist()
        for slot in range(1, block):
            torch.testing.assert_close(draft.row(slot, anchor), logits[:, slot - 1], rtol=0, atol=TOLERANCE)
    assert len(rounds) > 3 and kept[0] == 9
    if temperature > 0:
        assert max(kept[1:]) > 1, "no round accepted a draft, so the cached context only ever grew by single rows"
    assert max(block_sizes(rounds)) == size


def block_sizes(rounds) -> list[int]:
    return [r.embeds.shape[1] for r in rounds]


def test_the_comparison_fails_on_other_weights():
    target = tiny_target()
    drafter = tiny_drafter(target, injection="none", selection="independent", mask_token_id=MASK)
    twin = dflash_twin(drafter)
    other = tiny_drafter(target, seed=8, injection="none", selection="independent", mask_token_id=MASK)
    features, positions = torch.randn(1, 6, 2 * drafter.config.hidden_size), torch.arange(11).unsqueeze(0)
    anchor = torch.tensor([[7]])
    view, states = drafter.bind_target(target), []
    for model in (drafter, other):
        cache = model.new_cache()
        model.extend_context(cache, features, positions[:, :6])
        embeds = model.block_embeds(view, anchor, 4)
        states.append(model.norm(model(embeds, view.phi(anchor), positions[:, 6:].unsqueeze(1), cache).hidden)[:, 0])
    wanted = twin(position_ids=positions, noise_embedding=embeds[:, 0], target_hidden=features)
    torch.testing.assert_close(states[0], wanted, rtol=0, atol=TOLERANCE)
    assert (states[1] - wanted).abs().max() > 0.1


def test_the_default_layers_are_those_of_dflash():
    """For every drafter at most half as deep as its target; DFlash has no rule of its own below."""
    from dspine_hf.configuration_dspine import spread_layer_ids

    for layers in range(10, 100):
        assert spread_layer_ids(layers, 5) == dflash.build_target_layer_ids(layers, 5)
    assert spread_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert spread_layer_ids(30, 5) == [1, 8, 14, 20, 27]
    assert spread_layer_ids(24, 1) == dflash.build_target_layer_ids(24, 1)
