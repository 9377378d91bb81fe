"""Graphs after something changed: a recorder traces the operations, so that a replay repeats what it saw then."""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.fx.experimental.proxy_tensor import make_fx

import dspine_hf
from drafter_cases import redraw
from dspine_hf import DSpineDraftModel, decoding, graphs
from dspine_hf.fast_call import Options
from dspine_hf.fast_walk import Chain
from dspine_hf.graphs import Recording
from helpers.batch_oracle import padded
from helpers.oracle import prompt, small_target

NEW = 8
SHAPES = {"num_hidden_layers": 2, "block_size": 4, "transfer_rank": 6, "num_candidates": 5, "intermediate_size": 16}


class Tracer:
    """Records like CUDA: host values, modules and branches are those of the recording, tensors stay where they are."""

    recorded = 0

    def __call__(self, run, pool):
        self.recorded += 1
        found = []

        def traced(nothing):
            found.append(run())
            return [found[-1]] if isinstance(found[-1], torch.Tensor) else list(tensors_of(found[-1]).values())

        graph = make_fx(traced, _allow_non_fake_inputs=True)(torch.zeros(0))
        results = [tensor.clone() for tensor in graph(torch.zeros(0))]

        def replay():
            for kept, fresh in zip(results, graph(torch.zeros(0)), strict=True):
                kept.copy_(fresh)

        if isinstance(found[0], torch.Tensor):
            return Recording(replay, results[0])
        return Recording(replay, Chain(**dict(zip(tensors_of(found[0]), results, strict=True))))


def tensors_of(chain):
    return {name: tensor for name, tensor in vars(chain).items() if tensor is not None}


@pytest.fixture
def tracer(monkeypatch):
    found = Tracer()
    monkeypatch.setattr(decoding, "Options", functools.partial(Options, recorder=found))
    return found


@pytest.fixture
def case():
    """A target, a drafter, and a call of two prompts."""
    target = small_target(seed=2)
    torch.manual_seed(0)
    drafter = redraw(DSpineDraftModel.for_target(target, **SHAPES).eval().requires_grad_(False), seed=3)
    ids, mask = padded([prompt(7, seed=20), prompt(2, seed=21)])
    return target, drafter, {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}


def chain_of(target, drafter, call):
    """The text, and the chain of the last draft."""
    text = dspine_hf.generate(target, drafter, **call)
    recordings = [r for entry in graphs._KEPT[target].values() for r in entry.recordings.values()]
    return text, [r.result for r in recordings if isinstance(r.result, Chain)][-1]


CHANGES = {"num_candidates": 3, "selection": "independent", "logit_softcap": 2.0, "context_window": 2}


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_drafter_is_recorded_anew(case, tracer, field):
    target, drafter, call = case
    _, first = chain_of(target, drafter, call)
    count = tracer.recorded
    setattr(drafter.config, field, CHANGES[field])
    _, changed = chain_of(target, drafter, call)
    assert tracer.recorded > count
    graphs.release(target)
    _, fresh = chain_of(target, drafter, call)
    assert torch.equal(changed.confidence, fresh.confidence)
    assert changed.confidence.shape == first.confidence.shape and not torch.equal(changed.confidence, first.confidence)


@pytest.mark.filterwarnings("ignore:use_fused_kernels")
def test_other_operations_are_recorded_anew(case, tracer):
    target, drafter, call = case
    plain = dspine_hf.generate(target, drafter, **call)
    count = tracer.recorded
    drafter.config.use_fused_kernels = True
    assert torch.equal(dspine_hf.generate(target, drafter, **call), plain)
    assert tracer.recorded > count


def test_adapters_are_followed(case, tracer):
    target, drafter, call = case
    options = {"r": 4, "target_modules": ["q_proj", "up_proj", "down_proj"], "init_lora_weights": False}
    torch.manual_seed(1)
    model = get_peft_model(target, LoraConfig(**options)).eval()
    model.add_adapter("other", LoraConfig(**options))

    def same():
        plain = model.generate(**call)
        assert torch.equal(dspine_hf.generate(model, drafter, **call), plain)
        return plain.tolist()

    texts = [same()]
    with model.disable_adapter():
        texts.append(same())
    model.set_adapter("other")
    texts.append(same())
    for module in model.modules():
        if "other" in getattr(module, "lora_A", {}):
            module.scaling["other"] = 7.0
    texts.append(same())
    model.merge_adapter()
    same()
    model.unmerge_adapter()
    model.set_adapter("default")
    assert same() == texts[0]
    assert len({str(text) for text in texts}) == 4


def test_a_call_that_ended_in_nan_does_not_spoil_the_next(case, tracer):
    target, drafter, call = case
    plain = target.generate(**call)
    weight = target.model.layers[1].mlp.down_proj.weight
    kept = weight.clone()
    dspine_hf.generate(target, drafter, **call)
    weight.fill_(float("nan"))
    dspine_hf.generate(target, drafter, **call)
    weight.copy_(kept)
    count = tracer.recorded
    text, chain = chain_of(target, drafter, call)
    assert torch.equal(text, plain) and bool(chain.confidence.isfinite().all())
    assert tracer.recorded == count  # otherwise there was nothing to spoil
