"""With `compiled`, every pass of the fast loop is one graph of torch.compile, with fused kernels too."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper

import dspine_hf
from dspine_hf import fast_target
from dspine_hf.fast_walk import walk_batch
from helpers.batch_oracle import batch_block

SHAPES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "initializer_range": 0.3,
}
TARGETS = {
    "full": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPES)),
    "mixed windows": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPES, sliding_window=8, query_pre_attn_scalar=16)),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_a_compiled_call_breaks_no_graph_and_writes_the_same_text(name, fused, monkeypatch):
    torch.manual_seed(2)
    target = TARGETS[name]().eval()
    settings = {"block_size": 4, "num_candidates": 4, "transfer_rank": 16, "num_hidden_layers": 3}
    drafter = dspine_hf.DSpineDraftModel.for_target(target, **settings, use_fused_kernels=fused).eval()
    torch._dynamo.reset()
    counters.clear()
    genuine = torch.compile
    monkeypatch.setattr(fast_target.torch, "compile", lambda call, **more: genuine(call, backend="aot_eager", **more))
    inputs = {"input_ids": torch.randint(5, 97, (1, 14)), "max_new_tokens": 4, "do_sample": False}
    found = dspine_hf.generate(target, drafter, compiled=True, fused_attention=fused, **inputs)
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert counters["frames"]["ok"] >= 3
    assert torch.equal(found, target.generate(**inputs))


def test_compiled_without_graphs_a_pass_is_compiled_once_for_all_rounds(monkeypatch):
    torch.manual_seed(3)
    target = TARGETS["full"]().eval()
    compiled = []
    genuine = torch.compile

    def counting(call, **more):
        return genuine(call, backend=lambda graph, inputs: compiled.append(1) or graph, **more)

    monkeypatch.setattr(fast_target.torch, "compile", counting)
    torch._dynamo.reset()
    inputs = {"input_ids": torch.randint(5, 97, (1, 14)), "max_new_tokens": 9, "do_sample": False}
    assert torch.equal(dspine_hf.generate(target, None, compiled=True, **inputs), target.generate(**inputs))
    assert len(compiled) == 1


def test_a_compiled_call_that_samples_breaks_no_graph_and_draws_the_same_text(monkeypatch):
    torch.manual_seed(4)
    target = TARGETS["full"]().eval()
    settings = {"block_size": 4, "num_candidates": 4, "transfer_rank": 16, "num_hidden_layers": 3}
    drafter = dspine_hf.DSpineDraftModel.for_target(target, **settings, num_sampled_candidates=40).eval()
    torch._dynamo.reset()
    counters.clear()
    genuine = torch.compile
    monkeypatch.setattr(fast_target.torch, "compile", lambda call, **more: genuine(call, backend="eager", **more))
    inputs = {"input_ids": torch.randint(5, 97, (2, 14)), "max_new_tokens": 6, "do_sample": True, "temperature": 0.7}
    texts = []
    for compiled in (True, False):
        torch.manual_seed(5)
        texts.append(dspine_hf.generate(target, drafter, compiled=compiled, **inputs))
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert torch.equal(*texts)


def test_another_temperature_compiles_no_draft_again(monkeypatch):
    torch.manual_seed(7)
    target = TARGETS["full"]().eval()
    settings = {"block_size": 4, "num_candidates": 4, "transfer_rank": 16, "num_hidden_layers": 1}
    drafter = dspine_hf.DSpineDraftModel.for_target(target, **settings, num_sampled_candidates=40).eval()
    drafts = []
    genuine = torch.compile

    def counting(call, **more):
        name = call.__code__.co_name
        return genuine(call, backend=lambda graph, inputs: drafts.append(name) or graph, **more)

    monkeypatch.setattr(fast_target.torch, "compile", counting)
    torch._dynamo.reset()
    inputs = {"input_ids": torch.randint(5, 97, (1, 14)), "max_new_tokens": 6, "do_sample": True}
    for temperature in (1.0, 0.7, 1.3):
        dspine_hf.generate(target, drafter, compiled=True, temperature=temperature, **inputs)
    assert drafts.count("draft_block") == 1


def test_a_walk_over_few_cached_predecessors_is_one_graph():
    torch.manual_seed(6)
    block = batch_block(torch.randn(2, 3, 20), torch.randn(2, 20, 20), 9, kept=3)
    block.noise = torch.empty(2, 3, 9).exponential_()

    def tokens_and_q():
        chain = walk_batch(block, [TemperatureLogitsWarper(0.7)], None, True)
        return chain.tokens, chain.q

    compiled = torch.compile(tokens_and_q, fullgraph=True, backend="eager")
    for found, plain in zip(compiled(), tokens_and_q(), strict=True):
        torch.testing.assert_close(found, plain)
