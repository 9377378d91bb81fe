"""The hook serves DSpine drafters only, is installed once, gives way to newer ones, and is safe among threads."""

import copy
import functools
import threading

import pytest
import torch
from transformers import pipeline
from transformers.generation.utils import GenerationMixin

from dspine_hf import compat_dspine, context_dspine
from dspine_hf.compat_dspine import HOOK_PROTOCOL, FeatureTaps, install_hook
from helpers.oracle import oracle_for, prompt, small_target
from helpers.words import character_tokenizer

HOOKED = (
    "_extract_generation_mode_kwargs",
    "_validate_generation_mode",
    "_assisted_decoding",
    "_get_candidate_generator",
)


def test_each_method_is_wrapped_once_and_carries_the_protocol_number():
    before = [getattr(GenerationMixin, name) for name in HOOKED]
    install_hook()
    for name, method in zip(HOOKED, before, strict=True):
        assert getattr(GenerationMixin, name) is method
        assert method.dspine_protocol == HOOK_PROTOCOL
        assert not hasattr(method.__wrapped__, "dspine_protocol")


def copied_mixin():
    return type("Mixin", (), {name: getattr(GenerationMixin, name).__wrapped__ for name in HOOKED})


def test_a_newer_hook_replaces_an_older_one_and_an_older_one_gives_way():
    mixin = copied_mixin()
    originals = {name: getattr(mixin, name) for name in HOOKED}
    for protocol, expected in ((1, 1), (3, 3), (2, 3), (3, 3)):
        install_hook(mixin, protocol)
        for name in HOOKED:
            assert getattr(mixin, name).dspine_protocol == expected
            assert getattr(mixin, name).__wrapped__ is originals[name]


def test_a_changed_signature_fails_loudly():
    mixin = copied_mixin()
    mixin._assisted_decoding = lambda self, input_ids: None
    with pytest.raises(ImportError, match="_assisted_decoding.*transformers>=5.18"):
        install_hook(mixin)
    mixin = copied_mixin()
    del mixin._get_candidate_generator
    with pytest.raises(ImportError, match="_get_candidate_generator"):
        install_hook(mixin)


def unhooked(monkeypatch_context):
    for name in HOOKED:
        monkeypatch_context.setattr(GenerationMixin, name, getattr(GenerationMixin, name).__wrapped__)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 2},
        {"assistant": True},
        {"assistant": True, "do_sample": True},
        {"assistant_early_exit": 2},
    ],
    ids=str,
)
def test_generate_without_a_dspine_drafter_is_unchanged(options, monkeypatch):
    target = small_target()
    options = {"max_new_tokens": 12, **options}
    if options.pop("assistant", False):
        options["assistant_model"] = small_target(num_hidden_layers=1)
        options["assistant_model"].generation_config.num_assistant_tokens_schedule = "constant"

    def run():
        torch.manual_seed(0)
        return target.generate(prompt(), **options)

    hooked = run()
    with monkeypatch.context() as patch:
        unhooked(patch)
        plain = run()
    assert torch.equal(hooked, plain)


def test_errors_of_other_assistants_are_unchanged(monkeypatch):
    target, assistant = small_target(), small_target(vocab_size=70)
    messages = []
    for hooked in (True, False):
        with monkeypatch.context() as patch:
            if not hooked:
                unhooked(patch)
            with pytest.raises(ValueError) as error:
                target.generate(prompt(), assistant_model=assistant, max_new_tokens=4)
            messages.append(str(error.value))
    assert messages[0] == messages[1] and "tokenizers" in messages[0]


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_text_generation_pipeline_takes_a_drafter(do_sample):
    target, tokenizer = small_target(), character_tokenizer()
    text = tokenizer.decode(prompt()[0])
    drafter = oracle_for(target, target.generate(prompt(), max_new_tokens=60, do_sample=False)[0], 4)
    options = {"max_new_tokens": 16, "do_sample": do_sample}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    results = [drafted(text, **options), drafted([text, text + "a"], **options)]
    if not do_sample:
        assert results[0] == plain(text, **options)
        assert results[1] == plain([text, text + "a"], **options)
        drafted(text, **options)
        assert drafter.generation_stats.accepted > 0
    assert drafter.generation_stats.new_tokens == 16


def test_threads_share_a_drafter():
    target = small_target()
    prompts = [prompt(4 + i, seed=i) for i in range(6)]
    expected = [target.generate(ids, max_new_tokens=20, do_sample=False) for ids in prompts]
    drafter = oracle_for(target, expected[0][0], 4)
    found, stats, errors = [None] * 6, [None] * 6, []

    def work(i):
        try:
            for _ in range(3):
                found[i] = target.generate(prompts[i], max_new_tokens=20, do_sample=False, assistant_model=drafter)
            stats[i] = drafter.generation_stats
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert stats[0].accepted > 0
    for i in range(6):
        target.generate(prompts[i], max_new_tokens=20, do_sample=False, assistant_model=drafter)
        assert drafter.generation_stats == stats[i]


def module_state(module):
    return {k: v for k, v in vars(module).items() if k not in ("context_lengths",)}


def test_a_call_leaves_nothing_on_either_model():
    target = small_target()
    drafter = oracle_for(target, target.generate(prompt(), max_new_tokens=60, do_sample=False)[0], 4)
    target.generate(prompt(), max_new_tokens=4, do_sample=False, assistant_model=drafter)
    before = [copy.copy(module_state(m)) for m in (drafter, target)]
    weights = {k: v.clone() for k, v in drafter.state_dict().items()}
    target.generate(prompt(), max_new_tokens=20, do_sample=True, assistant_model=drafter)
    assert [module_state(m) for m in (drafter, target)] == before
    assert all(torch.equal(v, weights[k]) for k, v in drafter.state_dict().items())
    assert not context_dspine._TURNS


def test_a_failing_criterion_leaves_the_cache_as_it_was_built():
    from transformers import DynamicCache, MistralConfig, MistralForCausalLM

    target = small_target(family=(MistralConfig, MistralForCausalLM), sliding_window=8)
    drafter = oracle_for(target, target.generate(prompt(), max_new_tokens=60, do_sample=False)[0], 4)
    cache = DynamicCache(config=target.config)

    def fail(input_ids, scores, **kwargs):
        if input_ids.shape[1] > 14:
            raise KeyError("mine")
        return torch.tensor([False])

    with pytest.raises(KeyError, match="mine"):
        target.generate(
            prompt(), max_new_tokens=20, do_sample=False, past_key_values=cache, stopping_criteria=[fail],
            assistant_model=drafter,
        )  # fmt: skip
    assert "crop" not in vars(cache)
    assert not any(layer.record_past for layer in cache.layers)


def test_stats_are_none_before_the_first_call_and_plain_data_after():
    target = small_target()
    drafter = oracle_for(target)
    assert drafter.generation_stats is None
    target.generate(prompt(), max_new_tokens=1, do_sample=False, assistant_model=drafter)
    assert drafter.generation_stats.to_dict().items() >= {
        "rounds": 0, "drafted": 0, "accepted": 0, "new_tokens": 1, "acceptance_length": 1.0, "slot_acceptance": (),
    }.items()  # fmt: skip


@pytest.mark.parametrize("returned", ["embeddings first", "layers only", "every state"])
def test_taps_find_the_states_whatever_the_target_returns(returned):
    target = small_target(seed=5)
    taps = FeatureTaps(target, [1, 2], all_states=False)
    taps._index_shift = {}
    assert taps.request == [1, 2, 3]
    states = [torch.full((1, 3, 4), float(i)) for i in range(5)]  # the embeddings, then 4 layers
    if returned == "layers only":
        kept = [states[i + 1] if i in taps.request else None for i in range(4)]
    else:
        kept = [s if returned == "every state" or i in taps.request else None for i, s in enumerate(states)]
    outputs = type("Outputs", (), {"hidden_states": tuple(kept)})
    assert [int(tap[0, 0, 0]) for tap in taps.read(outputs)] == [2, 3]
    assert taps.request == ([1, 2] if returned == "layers only" else [2, 3])
    with pytest.raises(ValueError, match="hidden states"):
        taps.read(type("Outputs", (), {"hidden_states": None}))


def test_taps_are_the_outputs_of_their_layers_in_this_version():
    target = small_target(seed=5)
    seen = {}
    for i in (0, 2):
        target.model.layers[i].register_forward_hook(
            functools.partial(lambda i, module, args, output: seen.update({i: output}), i)
        )
    for all_states in (False, True, False):
        taps = FeatureTaps(target, [0, 2], all_states)
        outputs = target(prompt(), output_hidden_states=taps.request)
        for found, i in zip(taps.read(outputs), (0, 2), strict=True):
            expected = seen[i][0] if isinstance(seen[i], tuple) else seen[i]
            assert torch.equal(found, expected)


def test_version_strings_stay_in_the_compat_file():
    from pathlib import Path

    folder = Path(compat_dspine.__file__).parent
    for file in folder.glob("*_dspine.py"):
        if file.name != "compat_dspine.py":
            assert "transformers_version" not in file.read_text() and "5.24" not in file.read_text()


def test_a_superfluous_assistant_tokenizer_does_no_harm():
    target, tokenizer = small_target(), character_tokenizer()
    drafter = oracle_for(target)
    options = {"max_new_tokens": 8, "do_sample": False, "tokenizer": tokenizer}
    drafted = target.generate(prompt(), assistant_model=drafter, assistant_tokenizer=tokenizer, **options)
    assert torch.equal(drafted, target.generate(prompt(), **options))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("do_sample", [False, True])
def test_target_and_drafter_may_have_different_dtypes(dtypes, do_sample):
    target = small_target().to(dtypes[0])
    drafter = oracle_for(target, target.generate(prompt(), max_new_tokens=60, do_sample=False)[0], 4).to(dtypes[1])
    torch.manual_seed(0)
    output = target.generate(prompt(), max_new_tokens=20, do_sample=do_sample, assistant_model=drafter)
    assert output.shape == (1, 27)
    assert do_sample or drafter.generation_stats.accepted > 0


def test_a_compiled_wrapper_is_refused_with_the_cure_and_compiling_in_place_works():
    target = small_target(seed=7)
    plain = target.generate(prompt(), max_new_tokens=12, do_sample=False)
    drafter = oracle_for(target, plain[0])
    with pytest.raises(ValueError, match=r"drafter\.compile\(\)"):
        target.generate(prompt(), assistant_model=torch.compile(drafter, backend="eager"), max_new_tokens=12)
    drafter.compile(backend="eager")
    drafted = target.generate(prompt(), assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert torch.equal(plain, drafted)
    assert drafter.generation_stats.accepted > 0
