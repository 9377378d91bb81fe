"""The fused injection and top-K give the eager results, write all of their outputs and nothing else.

The kernels run on the GPU, or on the CPU in triton's interpreter when TRITON_INTERPRET=1 (as `make test` sets it).
"""

import pytest
import torch

from dspine_hf import kernels, ops_dspine
from helpers.guards import allocations, inside  # noqa: F401

DEVICE = "cuda" if torch.cuda.is_available() and kernels.available("cuda") else "cpu"
pytestmark = pytest.mark.skipif(not kernels.available(DEVICE), reason=kernels.why_not(DEVICE))

EPS = 1e-6
# ||fused - exact|| / ||exact||; bf16 keeps 8 bits, fp16 keeps 11. The interpreter truncates bf16 where a GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in TOLERANCE]


def drawn(generator, *shape, scale=1.0):
    return torch.randn(shape, generator=generator) * scale


def injection_inputs(blocks, B, d, r, dtype, seed=0, state_scale=3.0):
    """h, anchor, w, P, A, B, b and U, each between guards."""
    g = torch.Generator().manual_seed(seed)
    h, anchor = drawn(g, *blocks, B, d, scale=state_scale), drawn(g, *blocks, r)
    w, P, A = drawn(g, d, scale=0.3) + 1, drawn(g, r, d, scale=d**-0.5), drawn(g, r, d, scale=d**-0.5)
    B_, b, U = drawn(g, r, r, scale=r**-0.5), drawn(g, r), drawn(g, d, r, scale=r**-0.5)
    rest = (inside(t.to(DEVICE, dtype)) for t in (w, P, A, B_, b, U))
    return inside(h.to(DEVICE, dtype)), inside(anchor.to(DEVICE)), *rest


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("blocks", "B", "d", "r"),
    [
        pytest.param((1, 1), 4, 48, 16, id="smallest"),
        pytest.param((2, 1), 8, 72, 20, id="d and r no powers of two"),
        pytest.param((1,), 16, 304, 64, id="one block of sixteen"),
        pytest.param((1, 3), 5, 144, 130, id="a wide transfer space"),
        pytest.param((5,), 32, 80, 70, id="more slots than a tile has rows"),
        pytest.param((1,), 2, 1104, 6, id="one written slot, d in parts"),
    ],
)
def test_the_injection_is_the_eager_one(blocks, B, d, r, dtype, allocations):  # noqa: F811
    inputs = injection_inputs(blocks, B, d, r, dtype)
    h, z = kernels.gated_injection(*inputs, EPS)
    allocations.check(h, z)
    exact_h, exact_z = ops_dspine.gated_injection(*(t.double() for t in inputs), EPS)
    assert h.shape == inputs[0].shape and h.dtype is dtype
    assert z.shape == (*blocks, B - 1, r) and z.dtype is torch.float32
    written, state = exact_h - inputs[0].double(), inputs[0].double()
    assert torch.equal(h[..., 0, :], inputs[0][..., 0, :]), "slot 0 is never written"
    assert error(h, exact_h) < TOLERANCE[dtype] and error(z, exact_z) < TOLERANCE[dtype]
    size = float(exact_h.norm() / written.norm())
    assert error(h.double() - state, written) < TOLERANCE[dtype] * size
    assert float(written.norm()) > 0.05 * float(state.norm()), "the case writes too little to show a mistake"


@pytest.mark.parametrize("change", ["the anchor", "a slot", "the last slot"])
def test_a_message_reaches_the_next_slot_of_its_block_and_no_other(change):
    inputs = list(injection_inputs((3,), 5, 48, 16, torch.float32))
    before, _ = kernels.gated_injection(*inputs, EPS)
    moved = inputs[1 if change == "the anchor" else 0] = inputs[1 if change == "the anchor" else 0].clone()
    changed = {"the anchor": [(1, 1)], "a slot": [(1, 2), (1, 3)], "the last slot": [(1, 4)]}[change]
    if change == "the anchor":
        moved[1] += 1.0
    else:
        moved[changed[0]] += torch.randn(48, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    after, _ = kernels.gated_injection(*inputs, EPS)
    touched = {tuple(at) for at in (before != after).any(-1).nonzero().tolist()}
    assert touched == set(changed)


def test_large_half_precision_states_do_not_overflow():
    inputs = injection_inputs((1,), 4, 64, 16, torch.float16, state_scale=8000.0)
    inputs = (inputs[0].clamp(-30000, 30000), *inputs[1:2], inputs[2] * 4, *inputs[3:])
    h, z = kernels.gated_injection(*inputs, EPS)
    exact_h, exact_z = ops_dspine.gated_injection(*(t.double() for t in inputs), EPS)
    assert error(h, exact_h) < 1e-3 and error(z, exact_z) < 1e-3


@pytest.mark.parametrize("name", ["h", "U"])
def test_a_tensor_of_another_dtype_is_refused(name):
    inputs = list(injection_inputs((1,), 4, 48, 16, torch.float32))
    place = {"h": 0, "U": 7}[name]
    inputs[place] = inputs[place].to(torch.float64 if name == "h" else torch.float16)
    with pytest.raises(ValueError, match=f"expected {name}"):
        kernels.gated_injection(*inputs, EPS)


# ---- top K --------------------------------------------------------------------------------------------------------


def check_topk(logits, k, allocations=None):  # noqa: F811
    values, index = kernels.topk(logits, k)
    if allocations is not None:
        allocations.check(index, *([] if bool(logits.isnan().any()) else [values]))
    expected = logits.float().topk(k, dim=-1).values
    assert values.dtype is torch.float32 and index.dtype is torch.int64
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert bool((index >= 0).all() & (index < logits.shape[-1]).all())
    assert all(len(set(row)) == k for row in index.flatten(0, -2).tolist()), "an index came twice"
    torch.testing.assert_close(logits.float().gather(-1, index), expected, rtol=0, atol=0, equal_nan=True)
    return index


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "k"),
    [((2, 3, 61), 4), ((2, 1000), 1), ((1, 2048), 16), ((3, 2049), 16), ((2, 5003), 32), ((1, 40), 32), ((1, 5), 5)],
)
def test_the_top_k_is_that_of_torch(shape, k, dtype, allocations):  # noqa: F811
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(k)).to(DEVICE, dtype)
    check_topk(inside(logits), k, allocations)


def test_of_equal_values_the_lower_index_comes_first():
    logits = torch.randint(0, 3, (2, 4100), generator=torch.Generator().manual_seed(0)).float().to(DEVICE)
    index = check_topk(logits, 16)
    assert bool((index.diff(dim=-1) > 0).all())
    signed = torch.tensor([[-0.0, 0.0, -0.0, -1.0]], device=DEVICE)
    assert check_topk(signed, 4).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("row", ["-inf", "+inf", "nan", "mostly -inf", "some nan"])
def test_rows_without_finite_values_give_indices_of_the_vocabulary(row, allocations):  # noqa: F811
    logits = torch.randn(2, 2100, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    if row in ("-inf", "+inf", "nan"):
        logits[1] = float(row)
    elif row == "mostly -inf":
        logits[1, 3:] = float("-inf")
    else:
        logits[1, [5, 2099]] = torch.tensor([float("nan"), -float("nan")], device=DEVICE)
    check_topk(inside(logits), 8, allocations)


def test_rows_that_lie_apart_are_read_where_they_lie():
    wide = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    check_topk(wide[::2, 7:207], 6)
    check_topk(wide.T[:, :4], 3)


@pytest.mark.parametrize(("k", "dtype"), [(0, torch.float32), (33, torch.float32), (9, torch.float64)])
def test_a_k_or_dtype_that_the_top_k_does_not_know_is_refused(k, dtype):
    with pytest.raises(ValueError, match="expected (k|logits)"):
        kernels.topk(torch.zeros(1, 100, dtype=dtype, device=DEVICE), k)


def test_fewer_logits_than_k_are_refused():
    with pytest.raises(ValueError, match=r"expected k in 1\.\.3"):
        kernels.topk(torch.zeros(1, 3, device=DEVICE), 4)


# ---- under torch.compile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gated_injection", "topk"])
def test_an_operation_is_one_node_of_a_compiled_graph(name):
    inputs = (*injection_inputs((2,), 4, 48, 16, torch.float32), EPS) if name == "gated_injection" else None
    inputs = inputs or (torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(0)).to(DEVICE), 4)
    operation = getattr(kernels, name)
    compiled = torch.compile(operation, backend="aot_eager", fullgraph=True)
    for found, expected in zip(compiled(*inputs), operation(*inputs), strict=True):
        assert torch.equal(found, expected)
