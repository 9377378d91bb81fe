"""RMSNorms, rotated heads and SwiGLUs in one launch each: the eager results, rounded where the eager ones are."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, apply_rotary_pos_emb

from dspine_hf import DSpineConfig, kernels, ops_dspine
from helpers.borders import bordered
from helpers.guards import allocations, inside  # noqa: F401

DEVICE = "cuda" if torch.cuda.is_available() and kernels.available("cuda") else "cpu"
pytestmark = pytest.mark.skipif(not kernels.available(DEVICE), reason=kernels.why_not(DEVICE))

EPS = 1e-6
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in kernels._runtime.DTYPES]
BITS = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}  # of a number's fraction
ULPS = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}  # sums have an order, and rsqrt differs


def rounded(x, dtype):
    """x as a kernel rounds it: the interpreter cuts bf16 off, a GPU takes the nearest."""
    if dtype is torch.bfloat16 and DEVICE == "cpu":
        return (x.float().view(torch.int32) & -65536).view(torch.float32)
    return x.to(dtype).float()


def rms_norm(x, w, eps):
    n = rounded(ops_dspine.rms(x, eps), x.dtype)
    return rounded(n * w.float(), x.dtype)


def rotated_heads(x, w, eps, cos, sin):
    dtype, half = x.dtype, len(w) // 2
    n = rms_norm(x.unflatten(-1, (-1, len(w))), w, eps)
    turned = torch.cat([-n[..., half:], n[..., :half]], dim=-1)
    parts = [rounded(part * t.float().unsqueeze(2), dtype) for part, t in ((n, cos), (turned, sin))]
    return rounded(parts[0] + parts[1], dtype).transpose(1, 2)


def swiglu(gate, up):
    return rounded(rounded(F.silu(gate.float()), gate.dtype) * up.float(), gate.dtype)


def assert_within_ulps(found, expected, dtype, size=None):
    """`size`: the numbers whose last places count; by default the expected ones."""
    assert found.dtype is dtype and found.shape == expected.shape
    ulp = torch.finfo(dtype).tiny + 2.0 ** (1 - BITS[dtype]) * (expected if size is None else size).abs().float()
    assert bool(((found.float() - expected.float()).abs() <= ULPS[dtype] * ulp).all())


def drawn(*shape, seed=0, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return inside((torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype))


def angles(batch, rows, head_dim, dtype):
    at = (drawn(batch, rows, head_dim // 2, seed=5).repeat(1, 1, 2) * 100).float()
    return inside(at.cos().to(dtype)), inside(at.sin().to(dtype))


# ---- the operations ----------------------------------------------------------------------------------------------

WIDTHS = [(3, 24), (1, 1), (2, 4, 576), (2, 1000), (1, 5, 8192), (1, 65536), (2, 2, 3, 40)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*WIDTHS, (1500, 24), (1100, 1, 70)], ids=str)
def test_a_norm_is_the_eager_one(shape, dtype, allocations):  # noqa: F811
    x, w = drawn(*shape, scale=3.0, dtype=dtype), drawn(shape[-1], seed=1, dtype=dtype)
    found = kernels.rms_norm(x, w, EPS)
    allocations.check(found)
    assert found.is_contiguous()
    assert_within_ulps(found, rms_norm(x, w, EPS), dtype)
    exact = w.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    assert (found.double() - exact).norm() <= 4 * 2.0 ** -BITS[dtype] * exact.norm()


HEADS = [(1, 8, 9, 64), (2, 3, 3, 64), (1, 1, 1, 16), (2, 5, 32, 128), (3, 2, 5, 24), (1, 300, 2, 16), (1, 2, 40, 128)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_rotated_heads_are_the_eager_ones(shape, dtype, allocations):  # noqa: F811
    batch, rows, heads, head_dim = shape
    x, w = drawn(batch, rows, heads * head_dim, scale=3.0, dtype=dtype), drawn(head_dim, seed=1, dtype=dtype)
    cos, sin = angles(batch, rows, head_dim, dtype)
    found = kernels.rotated_heads(x, w, EPS, cos, sin)
    allocations.check(found)
    expected = rotated_heads(x, w, EPS, cos, sin)
    assert found.is_contiguous() and found.shape == (batch, heads, rows, head_dim)
    n = rms_norm(x.unflatten(-1, (-1, head_dim)), w, EPS).abs().transpose(1, 2)
    assert_within_ulps(found, expected, dtype, size=n + n.roll(head_dim // 2, -1))  # of what is added up
    exact = ops_dspine.rotated_heads(*(t.double() for t in (x, w)), EPS, cos.double(), sin.double())
    assert (found.double() - exact).norm() <= 4 * 2.0 ** -BITS[dtype] * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8, 1536), (3, 1000), (7,), (2, 3, 1, 24)], ids=str)
def test_a_swiglu_is_the_eager_one(shape, dtype, allocations):  # noqa: F811
    gate, up = drawn(*shape, scale=5.0, dtype=dtype), drawn(*shape, seed=1, dtype=dtype)
    found = kernels.swiglu(gate, up)
    allocations.check(found)
    assert_within_ulps(found, swiglu(gate, up), dtype)
    exact = F.silu(gate.double()) * up.double()
    assert (found.double() - exact).norm() <= 3 * 2.0 ** -BITS[dtype] * exact.norm()


def test_a_swiglu_of_numbers_without_bounds_is_the_eager_one():
    gate = torch.tensor([-1e4, -200.0, -90.0, -0.0, 0.0, 90.0, 1e4, float("inf"), float("nan")], device=DEVICE)
    torch.testing.assert_close(
        kernels.swiglu(gate, torch.full_like(gate, 2.0)), 2 * F.silu(gate), rtol=1e-6, atol=1e-36, equal_nan=True
    )


def test_large_half_precision_rows_do_not_overflow():
    x, w = (drawn(2, 576, dtype=torch.float16) * 15000).clamp(-60000, 60000), drawn(576, seed=1, dtype=torch.float16)
    found = kernels.rms_norm(x, w, EPS)
    assert bool(found.isfinite().all())
    assert_within_ulps(found, rms_norm(x, w, EPS), torch.float16)


def test_a_row_of_zeros_stays_zero_and_eps_counts():
    x, w = torch.stack([torch.zeros(40), torch.full((40,), 1e-3)]).to(DEVICE), torch.ones(40, device=DEVICE)
    found = kernels.rms_norm(x, w, 1e-6)
    assert not found[0].any()
    torch.testing.assert_close(found[1], torch.full_like(found[1], 0.5**0.5), rtol=1e-6, atol=0)


def test_inputs_are_read_where_they_lie():
    whole, w = drawn(3, 6, 40), drawn(40, seed=1)
    for view in (whole[:, 1:], whole[:, ::2], bordered(whole), whole.transpose(0, 1), whole[:, :1].expand(3, 4, 40)):
        assert torch.equal(kernels.rms_norm(view, w, EPS), kernels.rms_norm(view.contiguous(), w, EPS))
    wide, head_w, (cos, sin) = drawn(2, 6, 3 * 64), drawn(16, seed=1), angles(2, 6, 16, torch.float32)
    expected = kernels.rotated_heads(wide[:, 1:, 64:128].contiguous(), head_w, EPS, cos[:, 1:], sin[:, 1:])
    tables = [(cos[:, 1:], sin[:, 1:]), (bordered(cos[:, 1:]), bordered(sin[:, 1:]))]
    tables.append(tuple(t[:, 1:].transpose(1, 2).contiguous().transpose(1, 2) for t in (cos, sin)))
    for own in tables:
        assert torch.equal(kernels.rotated_heads(wide[:, 1:, 64:128], head_w, EPS, *own), expected)
    for table in (cos[:1], cos[:, :1], cos[:1, :1]):  # for all batch rows, or all rows, alike
        found = kernels.rotated_heads(wide, head_w, EPS, table, table)
        full = table.expand(2, 6, 16).contiguous()
        assert torch.equal(found, kernels.rotated_heads(wide, head_w, EPS, full, full))
    gate, up = wide.chunk(3, -1)[:2]
    assert torch.equal(kernels.swiglu(gate, up), kernels.swiglu(gate.contiguous(), up.contiguous()))


def test_without_rows_there_is_nothing_to_do():
    w, (cos, sin) = torch.ones(16, device=DEVICE), angles(2, 1, 16, torch.float32)
    assert kernels.rms_norm(torch.zeros(2, 0, 16, device=DEVICE), w, EPS).shape == (2, 0, 16)
    empty = torch.zeros(2, 0, 48, device=DEVICE)
    assert kernels.rotated_heads(empty, w, EPS, cos[:, :0], sin[:, :0]).shape == (2, 3, 0, 16)
    assert kernels.swiglu(empty, empty).shape == empty.shape


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rms_norm", ((2, 8), (7,)), r"expected x \[.., d\] and w \[d\]"),
        ("rms_norm", ((2, 8), (2, 8)), r"expected x \[.., d\] and w \[d\]"),
        ("rms_norm", ((), (1,)), r"expected x \[.., d\] and w \[d\]"),
        ("rms_norm", ((1, 65537), (65537,)), r"d in 1\.\.65536"),
        ("rotated_heads", ((2, 3, 24), (5,), (2, 3, 5)), "even head_dim"),
        ("rotated_heads", ((2, 3, 24), (16,), (2, 3, 16)), "expected x"),
        ("rotated_heads", ((2, 24), (8,), (2, 8)), "expected x"),
        ("rotated_heads", ((2, 3, 24), (8,), (2, 2, 8)), "cos and sin"),
        ("rotated_heads", ((2, 3, 24), (8,), (3, 8)), "cos and sin"),
        ("swiglu", ((2, 3), (3, 2)), "one shape"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(name, arguments, message):
    tensors = [torch.ones(shape, device=DEVICE) for shape in arguments]
    if name == "rotated_heads":
        tensors = [*tensors[:2], EPS, tensors[2], tensors[2]]
    with pytest.raises(ValueError, match=message):
        getattr(kernels, name)(*tensors, *([EPS] if name == "rms_norm" else []))


@pytest.mark.parametrize("place", range(4), ids=["x", "w", "cos", "sin"])
def test_a_tensor_of_another_dtype_is_refused(place):
    x, w, (cos, sin) = drawn(1, 2, 32), drawn(16), angles(1, 2, 16, torch.float32)
    tensors = [x, w, cos, sin]
    tensors[place] = tensors[place].to(torch.float64 if place == 0 else torch.float16)
    x, w, cos, sin = tensors
    with pytest.raises(ValueError, match="expected (x|w|cos|sin) "):
        kernels.rotated_heads(x, w, EPS, cos, sin)
    if place < 2:
        with pytest.raises(ValueError, match="expected (x|w) "):
            kernels.rms_norm(x[..., :16], w, EPS)
        with pytest.raises(ValueError, match="expected (gate|up) "):
            kernels.swiglu(*(t.flatten()[:8] for t in (x, w)))


def calls():
    """Inputs of every operation."""
    cos, sin = angles(2, 3, 16, torch.float32)
    yield "rms_norm", (drawn(2, 3, 24), drawn(24, seed=1), EPS)
    yield "rotated_heads", (drawn(2, 3, 48), drawn(16, seed=1), EPS, cos, sin)
    yield "swiglu", (drawn(2, 3, 24), drawn(2, 3, 24, seed=1))


@pytest.mark.parametrize(("name", "inputs"), list(calls()), ids=ops_dspine.SIMPLE)
def test_an_operation_is_one_node_of_a_compiled_graph_and_registered_as_it_behaves(name, inputs):
    operation, targets = getattr(kernels, name), []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes if "dspine" in str(node.target))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(operation, backend=backend, fullgraph=True)
    assert torch.equal(compiled(*inputs), operation(*inputs))
    assert targets == [f"dspine.{name}.default"] or targets == [f"dspine.{name}"]
    torch.library.opcheck(getattr(kernels._ops.ops, name), inputs)


# ---- the eager ones ----------------------------------------------------------------------------------------------


def qwen3_heads(norm, x, cos, sin):
    heads = norm(x.unflatten(-1, (-1, len(norm.weight))))
    return apply_rotary_pos_emb(heads, heads, cos, sin, unsqueeze_dim=2)[0].transpose(1, 2)


def with_gradients(call, *tensors):
    """What the call gives, and the gradients of some random weighting of it."""
    out = call()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    return out, *torch.autograd.grad((out.float() * weights).sum(), tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_eager_operations_and_their_gradients_are_transformers_own_bit_for_bit(dtype):
    config = DSpineConfig(hidden_size=24, intermediate_size=40, vocab_size=61, transfer_rank=6)
    x, mlp = drawn(2, 3, 24, dtype=dtype).requires_grad_(), Qwen3MLP(config).to(DEVICE, dtype)
    norm, head_norm = (Qwen3RMSNorm(n, eps=1e-5) for n in (24, 8))
    for i, module in enumerate((norm, head_norm)):
        module.weight.data = drawn(len(module.weight), seed=i + 1, dtype=dtype)
    w, head_w, (cos, sin) = norm.weight, head_norm.weight, angles(2, 3, 8, dtype)
    pairs = [
        (lambda: ops_dspine.rms_norm(x, w, 1e-5), lambda: norm(x), (x, w)),
        (lambda: ops_dspine.rotated_heads(x, head_w, 1e-5, cos, sin), lambda: qwen3_heads(head_norm, x, cos, sin),
         (x, head_w)),
        (lambda: mlp.down_proj(ops_dspine.swiglu(mlp.gate_proj(x), mlp.up_proj(x))), lambda: mlp(x),
         (x, *mlp.parameters())),
    ]  # fmt: skip
    for own, theirs, tensors in pairs:
        for found, expected in zip(with_gradients(own, *tensors), with_gradients(theirs, *tensors), strict=True):
            assert torch.equal(found, expected)
