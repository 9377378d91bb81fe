"""DSpineConfig takes its shapes from the target's config, and refuses values that cannot work together."""

import json

import pytest
import transformers

from dspine_hf import DSpineConfig
from dspine_hf.cli import app
from dspine_hf.commands import train
from dspine_hf.commands.common import parse_fields
from dspine_hf.configuration_dspine import spread_layer_ids

SMALL = {
    "hidden_size": 64,
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_target_layers": 8,
    "target_layer_ids": [1, 3],
    "transfer_rank": 8,
    "num_candidates": 4,
    "block_size": 4,
}

REFUSED = {
    "no predecessor to condition on": ({"injection": "none", "selection": "transition"}, 'selection="independent"'),
    "unknown injection": ({"injection": "first"}, "all, last, none"),
    "unknown selection": ({"selection": "beam"}, "transition, independent"),
    "unknown placement": ({"injection_placement": "attention"}, "layer, mlp"),
    "no slot to draft": ({"block_size": 1}, "2 or more"),
    "block size that is no number": ({"block_size": None}, "2 or more"),
    "heads that do not divide": ({"num_attention_heads": 6, "num_key_value_heads": 4}, "multiple"),
    "odd heads": ({"head_dim": 15}, "even"),
    "transfer space wider than the model": ({"transfer_rank": 65}, "at most 64"),
    "more candidates than tokens": ({"num_candidates": 101}, "at most 100"),
    "the last target layer": ({"target_layer_ids": [1, 7]}, r"0\.\.6"),
    "a negative target layer": ({"target_layer_ids": [-1]}, r"0\.\.6"),
    "a target layer twice": ({"target_layer_ids": [1, 1]}, "distinct"),
    "no target layer": ({"target_layer_ids": []}, "distinct"),
    "mask token outside the vocabulary": ({"mask_token_id": 100}, "None to learn"),
    "no width": ({"hidden_size": 0}, "positive integer"),
    "no candidates": ({"num_candidates": 0}, "positive integer"),
    "no candidates to sample from": ({"num_sampled_candidates": 0}, "or None for K"),
    "candidates to sample from that are no number": ({"num_sampled_candidates": "all"}, "or None for K"),
    "no window": ({"context_window": 0}, "at least 1, or None"),
    "no cap": ({"logit_softcap": 0.0}, "positive, or None"),
    "more rewritten layers than there are": ({"rewrite_layers": 2}, r"0\.\.1"),
    "rewritten layers without injection": ({"rewrite_layers": 1, "injection": "last"}, 'injection="all"'),
}


@pytest.mark.parametrize("overrides, cure", REFUSED.values(), ids=REFUSED.keys())
def test_inconsistent_values_are_refused_with_the_cure(overrides, cure):
    DSpineConfig(**SMALL)
    with pytest.raises(ValueError, match=cure):
        DSpineConfig(**{**SMALL, **overrides})


def test_a_config_file_with_inconsistent_values_is_refused(tmp_path):
    DSpineConfig(**SMALL).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"transfer_rank": 8', '"transfer_rank": 80'))
    with pytest.raises(ValueError, match="transfer_rank=80"):
        DSpineConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "injection, selection",
    [
        ("all", "transition"),
        ("last", "transition"),
        ("all", "independent"),
        ("last", "independent"),
        ("none", "independent"),
    ],
)
def test_every_other_pair_of_switches_is_accepted(injection, selection):
    config = DSpineConfig(**{**SMALL, "injection": injection, "selection": selection})
    wanted = {"all": [True, True], "last": [False, True], "none": [False, False]}[injection]
    assert [config.injects(i) for i in range(2)] == wanted


def test_defaults_are_consistent():
    config = DSpineConfig()
    assert config.target_layer_ids == [1, 9, 17, 25, 33]
    assert config.num_draft_slots == config.block_size - 1
    assert (config.injection, config.selection) == ("all", "transition")


@pytest.mark.parametrize("count", [1, 2, 5, 6])
def test_tapped_layers_are_distinct_sorted_and_never_the_last(count):
    for layers in range(2, 90):
        ids = spread_layer_ids(layers, count)
        assert ids == sorted(set(ids)) and 0 <= ids[0] and ids[-1] <= layers - 2
        assert len(ids) == min(count, layers - 1)
    assert spread_layer_ids(8, 5) == [0, 2, 3, 4, 6]
    with pytest.raises(ValueError, match="at least 2"):
        spread_layer_ids(1, count)


TARGETS = {
    "llama": (
        transformers.LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            max_position_embeddings=131072,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "transfer_rank": 256},
        ("llama3", 500000.0),
    ),
    "qwen2": (
        transformers.Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        {"head_dim": 64, "num_attention_heads": 14, "num_key_value_heads": 2, "transfer_rank": 128},
        ("default", 1e6),
    ),
    "qwen3": (
        transformers.Qwen3Config(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        {"head_dim": 128, "intermediate_size": 3072, "transfer_rank": 128},
        ("default", 1e6),
    ),
    "mistral": (
        transformers.MistralConfig(sliding_window=4096),
        {"hidden_size": 4096, "num_key_value_heads": 8, "intermediate_size": 14336},
        ("default", 10000.0),
    ),
    "gemma2": (
        transformers.Gemma2Config(final_logit_softcapping=30.0),
        {"hidden_size": 2304, "head_dim": 256, "logit_softcap": 30.0, "embedding_scale": 1.0},
        ("default", 10000.0),
    ),
    "gemma3": (
        transformers.Gemma3Config(),
        {"hidden_size": 2304, "head_dim": 256, "num_target_layers": 26, "logit_softcap": None},
        ("default", 1e6),
    ),
    "phi3": (
        transformers.Phi3Config(
            partial_rotary_factor=0.5,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        {"head_dim": 96, "hidden_size": 3072},
        ("default", 10000.0),
    ),
    "granite": (
        transformers.GraniteConfig(logits_scaling=16.0, embedding_multiplier=12.0),
        {"logit_scale": 1 / 16, "embedding_scale": 12.0},
        ("default", 10000.0),
    ),
    "cohere": (
        transformers.CohereConfig(logit_scale=0.0625),
        {"logit_scale": 0.0625, "rms_norm_eps": 1e-5},
        ("default", 500000.0),
    ),
}


@pytest.mark.parametrize("target, wanted, rope", TARGETS.values(), ids=TARGETS.keys())
def test_shapes_follow_from_the_targets_config(target, wanted, rope):
    config, text = DSpineConfig.for_target(target), target.get_text_config(decoder=True)
    assert config.hidden_size == text.hidden_size
    assert config.vocab_size == text.vocab_size
    assert config.num_target_layers == text.num_hidden_layers
    assert config.num_attention_heads == text.num_attention_heads
    assert config.num_hidden_layers == 5
    assert config.target_layer_ids == spread_layer_ids(text.num_hidden_layers, 5)
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert (config.rope_parameters["rope_type"], config.rope_parameters["rope_theta"]) == rope
    assert "partial_rotary_factor" not in config.rope_parameters


def test_a_scaled_rotary_is_taken_over_whole():
    target = TARGETS["llama"][0]
    assert DSpineConfig.for_target(target).rope_parameters == dict(target.rope_parameters)


def test_an_override_wins_over_the_target():
    config = DSpineConfig.for_target(
        TARGETS["qwen3"][0], block_size=8, intermediate_size=512, num_hidden_layers=3, head_dim=32, rms_norm_eps=1e-3
    )
    assert (config.block_size, config.intermediate_size, config.head_dim) == (8, 512, 32)
    assert config.target_layer_ids == spread_layer_ids(28, 3) and config.rms_norm_eps == 1e-3


def test_the_transfer_rank_is_never_above_the_width():
    target = transformers.LlamaConfig(hidden_size=48, num_attention_heads=4, num_hidden_layers=4, vocab_size=10)
    config = DSpineConfig.for_target(target)
    assert config.transfer_rank == 48 and config.num_candidates == 10


def test_an_encoder_decoder_target_is_refused():
    with pytest.raises(ValueError, match="decoder-only"):
        DSpineConfig.for_target(transformers.T5Config())


@pytest.mark.parametrize("asked, found", [(None, 4), (3, 4), (4, 4), (50, 50), (256, 100)])
def test_a_slot_is_sampled_from_at_least_k_candidates_and_at_most_the_vocabulary(asked, found):
    assert DSpineConfig(**SMALL, num_sampled_candidates=asked).sampling_width == found


def test_a_config_file_of_before_there_was_a_number_of_sampled_candidates_takes_the_default(tmp_path):
    DSpineConfig(**SMALL, num_sampled_candidates=None).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    assert DSpineConfig.from_pretrained(tmp_path).num_sampled_candidates is None
    del fields["num_sampled_candidates"]
    path.write_text(json.dumps(fields))
    assert DSpineConfig.from_pretrained(tmp_path).num_sampled_candidates == 256


@pytest.mark.parametrize(
    "words, values",
    [
        (["block_size=8", "injection=last"], {"block_size": 8, "injection": "last"}),
        (["logit_scale=2", "rms_norm_eps=1e-5"], {"logit_scale": 2, "rms_norm_eps": 1e-5}),
        (["context_window=null", "target_layer_ids=[1, 3]"], {"context_window": None, "target_layer_ids": [1, 3]}),
        (['rope_parameters={"rope_theta": 5.0}'], {"rope_parameters": {"rope_theta": 5.0}}),
        (["use_fused_kernels=true"], {"use_fused_kernels": True}),
    ],
    ids=str,
)
def test_fields_on_the_command_line_are_json_or_words(words, values):
    assert parse_fields(words) == values


@pytest.mark.parametrize(
    "word, message",
    [
        (
            "block_sze=8",
            r"found 'block_sze'\. Did you mean 'block_size'\? The fields are: .*, block_size, .*size",
        ),
        ("zzz=8", r"found 'zzz'\. The fields are: attention_bias"),
        ("_auto_class=x", "found '_auto_class'"),
        ("block_size", "name=value; found 'block_size'"),
        ("block_size=abc", r"a whole number as --config block_size; found 'abc'"),
        ("block_size=8.5", "a whole number as --config block_size; found '8.5'"),
        ("block_size=true", "a whole number as --config block_size; found 'true'"),
        ("logit_softcap=None", "a number or null as --config logit_softcap; found 'None'"),
        ("target_layer_ids=[1, x]", r"a list like \[1, 2\] or null as --config target_layer_ids; found '\[1, x\]'"),
        ('target_layer_ids=["a"]', r"a list like"),
        ("injection=3", "a word as --config injection; found '3'"),
        ("use_fused_kernels=True", "true or false as --config use_fused_kernels; found 'True'"),
    ],
)
def test_a_mistyped_field_or_value_is_refused(word, message):
    with pytest.raises(ValueError, match=message):
        parse_fields(["num_candidates=4", word])


def test_a_mistyped_field_is_refused_before_the_target_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "load_quietly", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="Did you mean 'block_size'"):
        words = ["--data", "x", "--config", "block_sze=8", "--use-cpu", "--output-dir", str(tmp_path / "out")]
        app(args=["train", *words], standalone_mode=False)
    assert not (tmp_path / "out").exists()
