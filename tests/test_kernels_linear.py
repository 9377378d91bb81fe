"""Products of few rows: the kernels against torch, and the rewritten graphs of whole models."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.registry import lookup_backend
from transformers import Qwen3Config, Qwen3ForCausalLM

import dspine_hf
from dspine_hf import fast_linear, fast_target, kernels
from dspine_hf.ops_dspine import find_kernels

pytestmark = pytest.mark.skipif(not kernels.available("cpu"), reason=kernels.why_not("cpu"))
if kernels.available("cpu"):
    from dspine_hf.kernels import linear
    from dspine_hf.kernels._runtime import early_options
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width", "sizes"), [
    (1, 40, (24,)), (7, 33, (5, 70, 16)), (20, 300, (33, 64)), (97, 70, (33,)),
])  # fmt: skip
def test_products_of_several_weights_are_torchs(dtype, rows, width, sizes):
    x = torch.randn(rows, width).to(dtype)
    weights = [torch.randn(n, width).to(dtype) for n in sizes]
    for found, W in zip(kernels.linears(x, weights), weights, strict=True):
        exact = x.double() @ W.double().T
        assert (found.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width", "size"), [(1, 40, 24), (7, 33, 70), (20, 130, 33), (97, 70, 33)])
def test_a_gated_product_is_torchs(dtype, rows, width, size):
    x = torch.randn(1, rows, width).to(dtype)
    gate, up = (torch.randn(size, width).to(dtype) * width**-0.5 for _ in range(2))
    exact = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    found = kernels.gated_linear(x, gate, up)
    assert found.shape == exact.shape and (found.double() - exact).norm() <= 2 * TOLERANCE[dtype] * exact.norm()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="at most 128 rows"):
        kernels.linears(torch.zeros(129, 8), [torch.zeros(4, 8)])
    with pytest.raises(ValueError, match="1 to 3 weights"):
        kernels.linears(torch.zeros(2, 8), [])
    with pytest.raises(ValueError, match="one shape"):
        kernels.gated_linear(torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(5, 8))


@pytest.mark.parametrize(("shape", "gated", "early"), [
    ((576, 576), False, True), ((1536, 576), True, True), ((576, 1536), False, True), ((100, 72), True, True),
    ((4096, 4096), False, False), ((12288, 4096), True, False), ((151936, 4096), False, False),
])  # fmt: skip
def test_small_weights_alone_are_asked_for_early(shape, gated, early):
    N, K = shape
    W = torch.empty(N, K, dtype=torch.bfloat16, device="meta")
    tiles = linear.launch_shape(16, N, K, W.dtype, W.device, gated)
    AHEAD = linear.ahead([W] * (1 + gated), tiles, True)
    assert bool(AHEAD) is early and AHEAD % 8 == 0  # 16 bytes at a time
    assert 128 // tiles["BLOCK_N"] * AHEAD <= K  # inside of a row
    assert linear.ahead([W], tiles, False) == 0


def test_weights_whose_rows_do_not_begin_at_16_bytes_are_not_asked_for_early():
    whole = torch.empty(40 * 64 + 1, dtype=torch.bfloat16)
    tiles = {"BLOCK_N": 32}
    assert linear.ahead([whole[:-1].view(40, 64)], tiles, True)
    assert not linear.ahead([whole[1:].view(40, 64)], tiles, True)
    assert not linear.ahead([whole[: 40 * 60].view(40, 60)], tiles, True)
    assert not linear.ahead([torch.empty(40, 64)], tiles, True)


def test_launches_wait_first_where_torch_compile_launches_early_too(monkeypatch):
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.triton, "enable_pdl", False)
    assert early_options(False) == {"PDL": 0} and early_options(True)["PDL"] == 1
    monkeypatch.setattr(inductor.triton, "enable_pdl", True)
    assert early_options(True)["PDL"] == 2 and early_options(False) == {"PDL": 0}


def tiny(dtype, bias=False):
    shapes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shapes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "attention_bias": bias}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**shapes)).eval().to(dtype)


def calls(target, ids, monkeypatch):
    """What a graph of the target calls after it was rewritten, how often, and the logits."""
    found = {}

    def backend(module, inputs):
        for node in fast_linear.rewritten(module).graph.nodes:
            if node.op == "call_function":
                found[node.target] = found.get(node.target, 0) + 1
        return module

    torch._dynamo.reset()
    with torch.no_grad():
        logits = torch.compile(target, backend=backend, dynamic=False)(ids).logits
    package, _ = find_kernels()
    linear = sum(found.get(target, 0) for target in fast_linear.LINEARS)
    return found.get(package.linears, 0), found.get(package.gated_linear, 0), linear, logits


def test_a_models_products_share_launches_by_their_input_and_give_its_logits(monkeypatch):
    target, ids = tiny(torch.bfloat16), torch.randint(97, (1, 6))
    merged, gated, left, logits = calls(target, ids, monkeypatch)
    assert (merged, gated, left) == (2 * 3 + 1, 2, 0)  # q, k and v; o; down; and the head
    exact = target.double()(ids).logits
    assert (logits.double() - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize(("dtype", "rows", "bias", "left"), [
    (torch.float32, 6, False, 15), (torch.bfloat16, 129, False, 15), (torch.bfloat16, 6, True, 8),
])  # fmt: skip
def test_other_products_stay_as_they_are(dtype, rows, bias, left, monkeypatch):
    target, ids = tiny(dtype, bias), torch.randint(97, (1, rows))
    assert calls(target, ids, monkeypatch)[2] == left


def test_more_rows_are_taken_where_they_are_short(monkeypatch):
    target, ids = tiny(torch.bfloat16), torch.randint(97, (1, 65))
    assert calls(target, ids, monkeypatch)[2] == 0
    monkeypatch.setattr(fast_linear, "NARROW", 32)  # attention's outputs and SwiGLU's are wider
    assert calls(target, ids, monkeypatch)[2] == 2 * 2


def test_a_call_writes_the_text_of_the_plain_loop(monkeypatch):
    target = tiny(torch.bfloat16)
    settings = {"block_size": 4, "num_candidates": 4, "transfer_rank": 16, "num_hidden_layers": 2, "rewrite_layers": 1}
    drafter = dspine_hf.DSpineDraftModel.for_target(target, target_layer_ids=[0], **settings).to(torch.bfloat16)
    backend = lambda graph, inputs: lookup_backend("aot_eager")(fast_linear.rewritten(graph), inputs)  # noqa: E731
    monkeypatch.setattr(fast_target, "few_rows", backend)
    inputs = {"input_ids": torch.randint(5, 97, (1, 14)), "max_new_tokens": 6, "do_sample": False}
    torch._dynamo.reset()
    used = []
    monkeypatch.setattr(fast_linear, "_merge", lambda *args, merge=fast_linear._merge: used.append(1) or merge(*args))
    found = dspine_hf.generate(target, drafter.eval(), compiled="fused", **inputs)
    assert used and torch.equal(found, target.generate(**inputs))


def changed_between(x, w, v):
    x = x * 1
    first = F.linear(x, w)
    x.view(-1).add_(1)
    return first + F.linear(x, v)


def gate_before_a_change(x, w, v):
    x = x * 1
    gate = F.linear(x, w)
    x.mul_(2)
    return F.silu(gate) * F.linear(x, v)


def weight_changed_between(x, w, v):
    first = F.linear(x, w)
    v[:] = 0.5
    return first + F.linear(x, v)


def gate_by_keyword(x, w, v):
    return F.silu(input=F.linear(x, w)) * F.linear(x, v)


WRITERS = [changed_between, gate_before_a_change, weight_changed_between, gate_by_keyword]


@pytest.mark.parametrize("function", WRITERS, ids=lambda function: function.__name__)
def test_products_around_a_write_keep_their_numbers(function, monkeypatch):
    monkeypatch.setattr(fast_linear, "_run_on", lambda device: True)
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 16), (8, 16), (8, 16))
    inputs = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=lambda graph, example: fast_linear.rewritten(graph), dynamic=False)
    with torch.no_grad():
        found, plain = (run(*(tensor.clone() for tensor in inputs)) for run in (compiled, function))
    torch.testing.assert_close(found.float(), plain.float(), rtol=0.05, atol=0.1)
