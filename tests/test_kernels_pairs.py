"""The write and the scores of candidate pairs: the fused operations are the eager ones, nearer to exact arithmetic."""

import pytest
import torch

from dspine_hf import kernels, ops_dspine
from helpers.borders import bordered
from helpers.guards import allocations  # noqa: F401

DEVICE = "cuda" if torch.cuda.is_available() and kernels.available("cuda") else "cpu"
if not kernels.available(DEVICE):
    pytest.skip(kernels.why_not(DEVICE), allow_module_level=True)

from dspine_hf.kernels import pairs as fused  # noqa: E402

EPS = 1e-5
# ||fused - exact|| / ||exact||; bf16 keeps 8 bits, fp16 keeps 11. The interpreter truncates bf16 where a GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
WRITES = [(1, 3, 16, 40, 24), (2, 5, 3, 72, 100), (1, 1, 1, 16, 64), (3, 7, 5, 600, 20), (1, 2, 32, 1100, 130)]
SCORES = [(1, 3, 16, 16, 40), (2, 5, 3, 7, 72), (1, 1, 1, 1, 16), (3, 2, 20, 32, 600), (1, 2, 4, 16, 1100)]


def write_case(rows, slots, K, d, r, dtype, size=3.0):
    """h, n_weight, eps, s, A, B, b and U, each with NaN around it; h and s have the strides of views."""
    torch.manual_seed(rows + d)
    h, s = size * torch.randn(rows, slots, d), torch.randn(rows, slots, K, r)
    n_weight, b = 1 + 0.3 * torch.randn(d), torch.randn(r)
    A, B, U = torch.randn(r, d) * d**-0.5, torch.randn(r, r) * r**-0.5, torch.randn(d, r) * r**-0.5
    h, n_weight, A, B, b, U = (bordered(t.to(DEVICE, dtype)) for t in (h, n_weight, A, B, b, U))
    return h, n_weight, EPS, bordered(s.to(DEVICE)), A, B, b, U


def scores_case(rows, slots, P, C, d, dtype, head_dtype=None, V=50):
    """hidden, norm_weight, eps, head_weight and candidates; the ids around the candidates are no tokens."""
    torch.manual_seed(rows + d)
    hidden, norm_weight = 3 * torch.randn(rows, slots, P, d), 1 + 0.3 * torch.randn(d)
    E, candidates = torch.randn(V, d) * d**-0.5, torch.randint(0, V, (rows, slots, C))
    hidden, norm_weight = (bordered(t.to(DEVICE, dtype)) for t in (hidden, norm_weight))
    return (
        hidden,
        norm_weight,
        EPS,
        bordered(E.to(DEVICE, head_dtype or dtype)),
        bordered(candidates.to(DEVICE), V + 9),
    )


def double(args):
    return [t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args]


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", WRITES, ids=str)
def test_the_write_of_pairs_is_the_eager_one(shape, dtype, allocations):  # noqa: F811
    args = write_case(*shape, dtype)
    found = fused.pair_write(*args)
    allocations.check(found)
    h = args[0].double().unsqueeze(2)
    exact = ops_dspine.pair_write(*double(args))
    assert found.shape == exact.shape and found.dtype == dtype
    assert error(found, exact) < TOLERANCE[dtype]
    if dtype is torch.float32:
        assert error(found - h, exact - h) < 3e-6, "the message, without the state that it is added to"


def test_the_write_of_one_pair_is_the_injection_modules_write():
    from dspine_hf.configuration_dspine import DSpineConfig
    from dspine_hf.layers_dspine import DSpineInjection

    torch.manual_seed(0)
    config = DSpineConfig(hidden_size=48, transfer_rank=16)
    module = DSpineInjection(config).to(DEVICE).eval()
    h, s = torch.randn(2, 3, 48, device=DEVICE), torch.randn(2, 3, 4, 16, device=DEVICE)
    with torch.no_grad():
        module.U.weight.normal_()
        module.norm.weight.normal_()
        expected = module.write(h[:, None, :, None], s[:, None])[:, 0]
        weights = (module.A.weight, module.B.weight, module.B.bias, module.U.weight)
        for pair_write in (fused.pair_write, ops_dspine.pair_write):
            found = pair_write(h, module.norm.weight, config.rms_norm_eps, s, *weights)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SCORES, ids=str)
def test_the_scores_of_pairs_are_the_eager_ones(shape, dtype, allocations):  # noqa: F811
    args = scores_case(*shape, dtype)
    found = fused.pair_scores(*args)
    allocations.check(found)
    exact = ops_dspine.pair_scores(*double(args)).double()
    assert found.shape == exact.shape and found.dtype is torch.float32
    assert error(found, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("d", [72, 1100], ids=["d whole", "d in parts"])
def test_scores_are_shaped_as_the_target_shapes_its_logits(d, allocations):  # noqa: F811
    args = scores_case(2, 3, 5, 7, d, torch.float32)
    bias = bordered(torch.randn(50).to(DEVICE))
    for options in ({"bias": bias}, {"scale": 0.3}, {"softcap": 1.5}, {"bias": bias, "scale": 2.0, "softcap": 4.0}):
        found = fused.pair_scores(*args, **options)
        allocations.check(found)
        expected = ops_dspine.pair_scores(*args, **options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(found, fused.pair_scores(*args), atol=1e-2)


def test_a_head_of_another_dtype_is_multiplied_in_fp32():
    args = scores_case(1, 2, 4, 5, 600, torch.float32, torch.bfloat16)
    assert error(fused.pair_scores(*args), ops_dspine.pair_scores(*double(args)).double()) < 2e-6


def test_large_fp16_states_do_not_overflow():
    args = list(scores_case(1, 2, 4, 5, 72, torch.float16))
    args[0].mul_(4000)
    args[1].mul_(8)
    assert error(fused.pair_scores(*args), ops_dspine.pair_scores(*double(args)).double()) < 2e-3
    args = list(write_case(1, 2, 4, 72, 20, torch.float16))
    args[0].mul_(4000)
    args[1].mul_(8)
    assert error(fused.pair_write(*args), ops_dspine.pair_write(*double(args)).double()) < 2e-3


def test_results_repeat_bit_by_bit():
    args = scores_case(1, 2, 4, 5, 1100, torch.float32)
    assert torch.equal(fused.pair_scores(*args), fused.pair_scores(*args))
    args = write_case(1, 2, 4, 1100, 20, torch.float32)
    assert torch.equal(fused.pair_write(*args), fused.pair_write(*args))


def test_the_length_of_the_parts_of_d_covers_d():
    for programs, d in [(1, 576), (15, 4096), (15, 4000), (960, 8192), (1, 100)]:
        splits, length = fused._split(programs, d, 128)
        assert (splits - 1) * length < d <= splits * length and length % 128 == 0 and programs * splits <= 960


@pytest.mark.parametrize("wrong", ["A", "s", "dtype", "candidates", "norm"])
def test_inputs_that_do_not_belong_together_are_refused(wrong):
    h, n_weight, eps, s, A, B, b, U = write_case(1, 2, 3, 40, 20, torch.float32)
    hidden, norm_weight, eps, E, candidates = scores_case(1, 2, 3, 4, 40, torch.float32)
    with pytest.raises(ValueError, match="expected"):
        if wrong == "A":
            fused.pair_write(h, n_weight, eps, s, A.T, B, b, U)
        elif wrong == "s":
            fused.pair_write(h, n_weight, eps, s[:, 1:], A, B, b, U)
        elif wrong == "dtype":
            fused.pair_write(h, n_weight, eps, s, A.half(), B, b, U)
        elif wrong == "candidates":
            fused.pair_scores(hidden, norm_weight, eps, E, candidates[:, 1:])
        else:
            fused.pair_scores(hidden, norm_weight[1:], eps, E, candidates)


def test_the_operations_can_be_traced():
    h, n_weight, eps, *rest = write_case(1, 2, 3, 40, 20, torch.float32)
    torch.library.opcheck(kernels._ops.ops.pair_write, (h, n_weight, eps, *rest))
    args = scores_case(1, 2, 3, 4, 1100, torch.float32)
    torch.library.opcheck(kernels._ops.ops.pair_scores, (*args, None, 1.0, 0.0))
