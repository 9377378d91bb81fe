"""However a target was loaded (offloaded, cast, quantised, resized, adapted, compiled), the text is its own."""

import copy
import threading

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from drafter_cases import tiny_target
from dspine_hf import DSpineDraftModel
from dspine_hf.loading import load_drafter
from helpers.oracle import oracle_for, prompt, small_target

OPTIONS = {"max_new_tokens": 16, "do_sample": False}


def assert_plain_text(target, ids=None, **drafter_options):
    """Greedy text is the plain one and drafts are accepted; the oracle."""
    ids = prompt() if ids is None else ids
    text = target.generate(ids, **{**OPTIONS, "max_new_tokens": 24})
    drafter = oracle_for(target, text[0], **drafter_options)
    drafted = target.generate(ids, assistant_model=drafter, **OPTIONS)
    assert torch.equal(drafted, text[:, : ids.shape[1] + 16])
    assert drafter.generation_stats.accepted > 3
    return drafter


def offloaded(how: str, folder, tied: bool):
    target = small_target(tie_word_embeddings=tied)
    if how == "everything":
        return cpu_offload(target, execution_device=torch.device("cpu"))
    devices = {f"model.layers.{i}": "cpu" if i % 2 else "disk" for i in range(4)}
    devices |= {"model.norm": "cpu", "model.rotary_emb": "cpu"}
    where = "disk" if how == "embeddings and odd layers" else "cpu"
    devices |= {"model.embed_tokens": where, "lm_head": where}
    return dispatch_model(target, devices, main_device="cpu", offload_dir=str(folder), force_hooks=True)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("how", ["odd layers", "embeddings and odd layers", "everything"])
def test_offloaded_targets_draft(how, tied, tmp_path):
    whole = small_target(tie_word_embeddings=tied)
    target = offloaded(how, tmp_path, tied)
    if how != "odd layers":
        assert target.get_output_embeddings().weight.device.type == "meta"
    drafter = assert_plain_text(target)
    ids = prompt()
    assert torch.equal(target.generate(ids, **OPTIONS), whole.generate(ids, **OPTIONS))
    drafter.check_target(target)
    view, same = drafter.bind_target(target), drafter.bind_target(whole)
    hidden = torch.randn(1, 2, 32)
    assert torch.equal(view.logits(hidden), same.logits(hidden))
    assert torch.equal(view.row_logits(hidden, ids[:, :3]), same.row_logits(hidden, ids[:, :3]))
    assert torch.equal(view.embed(ids), same.embed(ids)) and torch.equal(view.phi(ids), same.phi(ids))


def test_a_target_without_values_is_refused():
    target = small_target()
    drafter = oracle_for(target)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(target.config)
    for call in (drafter.check_target, drafter.bind_target, DSpineDraftModel.for_target):
        with pytest.raises(ValueError, match="meta device.*from_pretrained"):
            call(empty)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations_draft(implementation):
    assert_plain_text(small_target(attn_implementation=implementation))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_generation_inside_a_grad_context_drafts(context):
    target = small_target().requires_grad_(True)
    with context():
        assert_plain_text(target)


def test_a_turn_may_begin_in_inference_mode_and_go_on_outside():
    target = small_target()
    ids = prompt()
    drafter = oracle_for(target, target.generate(ids, max_new_tokens=30, do_sample=False)[0])
    with torch.inference_mode():
        first = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **OPTIONS)
    longer = torch.cat([first.sequences, prompt(3, seed=5)], dim=1)
    again = target.generate(longer, assistant_model=drafter, past_key_values=first.past_key_values, **OPTIONS)
    assert torch.equal(again, target.generate(longer, **OPTIONS))


def test_padded_vocabularies_and_resized_embeddings_draft():
    target = small_target()
    old = oracle_for(target)
    target.resize_token_embeddings(70, pad_to_multiple_of=16)
    assert target.get_output_embeddings().weight.shape[0] == 80
    with pytest.raises(ValueError, match="vocab_size=61 .* 80 "):
        target.generate(prompt(), assistant_model=old, **OPTIONS)
    drafter = assert_plain_text(target, torch.tensor([[65, 3, 68, 9]]))
    assert drafter.config.vocab_size == 80


def adapted(**options):
    model = get_peft_model(small_target(), LoraConfig(r=4, init_lora_weights=False, **options))
    return model.eval().requires_grad_(False)


ADAPTERS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_targets_wrapped_by_peft_draft(name):
    torch.manual_seed(0)
    target = adapted(**ADAPTERS[name])
    ids = prompt()
    text = target.generate(input_ids=ids, **{**OPTIONS, "max_new_tokens": 24})
    drafter = oracle_for(target, text[0])
    drafted = target.generate(input_ids=ids, assistant_model=drafter, **OPTIONS)
    assert torch.equal(drafted, text[:, :23])
    assert drafter.generation_stats.accepted > 3
    out = target(ids, output_hidden_states=True)
    view = drafter.bind_target(target)
    torch.testing.assert_close(view.logits(out.hidden_states[-1]), out.logits)
    torch.testing.assert_close(view.embed(ids), out.hidden_states[0])


def test_compiled_targets_draft():
    """The wrapper of torch.compile, and compiled layers inside the target."""
    target = small_target()
    for layer in target.model.layers:
        layer.mlp.compile(backend="eager", dynamic=True)
    assert_plain_text(torch.compile(target, backend="eager"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_drafter_loads_in_the_dtype_of_its_target(dtype, tmp_path):
    target = small_target().to(dtype)
    DSpineDraftModel.for_target(target, num_hidden_layers=2, block_size=5).save_pretrained(tmp_path)
    drafter = load_drafter(tmp_path, target)
    assert drafter.dtype == dtype and drafter.transfer.W.dtype == torch.float32
    target.generate(prompt(), assistant_model=drafter, **OPTIONS)
    assert drafter.generation_stats.new_tokens == 16


def packed_head(kind: str):
    """A target whose head holds packed weights, as quantised linear layers do."""
    target = tiny_target()
    head = target.get_output_embeddings()
    if kind == "uint8":  # bitsandbytes, 4 bits
        head.weight = torch.nn.Parameter(torch.zeros(head.weight.numel() // 2, 1, dtype=torch.uint8), False)
    elif kind == "int8":
        head.weight = torch.nn.Parameter(head.weight.to(torch.int8), False)
    elif kind == "no weight":  # GPTQ, AWQ, HQQ
        head.register_buffer("qweight", torch.zeros(3, 61, dtype=torch.int32))
        del head.weight
    else:
        target = torch.ao.quantization.quantize_dynamic(target, {torch.nn.Linear}, torch.qint8)
    return target


@pytest.mark.parametrize("kind", ["uint8", "int8", "no weight", "dynamic"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_quantised_head_is_refused_with_the_cure(kind):
    drafter, target = oracle_for(tiny_target()), packed_head(kind)
    for call in (drafter.check_target, DSpineDraftModel.for_target):
        with pytest.raises(ValueError, match="quantised.*lm_head.*llm_int8_skip_modules"):
            call(target)


def test_layers_of_quantised_activations_draft():
    """Their scale hangs on every row of a pass, so the text may part from the plain one."""
    target, ids = small_target(), prompt()
    for layer in target.model.layers:
        layer.mlp = torch.ao.quantization.quantize_dynamic(layer.mlp, {torch.nn.Linear}, torch.qint8)
    drafter = oracle_for(target, target.generate(ids, **OPTIONS)[0])
    assert target.generate(ids, assistant_model=drafter, **OPTIONS).shape == (1, 23)
    assert drafter.generation_stats.accepted > 0


def linear_layers(module, name):
    return isinstance(module, torch.nn.Linear) and name != "lm_head"


@pytest.mark.parametrize("scale", ["PerRow", "PerTensor"])
def test_int8_activations_of_torchao_draft(scale):
    """With a scale per tensor, a row's result hangs on the other rows of its pass, so that the text may differ."""
    torchao = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    target, ids = small_target(), prompt()
    config = torchao.Int8DynamicActivationInt8WeightConfig(granularity=getattr(torchao, scale)())
    torchao.quantize_(target, config, linear_layers)
    layer, rows = target.model.layers[0].mlp.up_proj, torch.randn(1, 5, 32)
    among_others = layer(torch.cat([rows, 50 * torch.randn(1, 1, 32)], dim=1))[:, :5]
    assert torch.equal(layer(rows), among_others) == (scale == "PerRow")
    drafter = oracle_for(target, target.generate(ids, **OPTIONS)[0])
    assert target.generate(ids, assistant_model=drafter, **OPTIONS).shape == (1, 23)
    assert drafter.generation_stats.accepted > (3 if scale == "PerRow" else 0)


def test_int8_weights_of_torchao_draft_and_a_head_of_them_is_refused():
    torchao = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    target, config = small_target(), torchao.Int8WeightOnlyConfig()
    torchao.quantize_(target, config, linear_layers)
    assert_plain_text(target)
    torchao.quantize_(target, config, lambda m, name: name == "lm_head")
    with pytest.raises(ValueError, match="quantised.*lm_head"):
        DSpineDraftModel.for_target(target)


def test_a_drafter_serves_several_targets_in_threads():
    targets = [small_target(), small_target(tie_word_embeddings=True), copy.deepcopy(small_target()).double()]
    ids = prompt()
    texts = [target.generate(ids, **OPTIONS) for target in targets]
    drafter = oracle_for(targets[0], texts[0][0])
    found, failures = {}, []

    def work(i):
        try:
            found[i] = targets[i % 3].generate(ids, assistant_model=drafter, **OPTIONS)
        except Exception as error:  # shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(torch.equal(found[i], texts[i % 3]) for i in range(6))
