"""A fused pass norms, rotates and gates in one launch each; compiled, under autocast and in training it does not."""

import collections
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import drafter_cases as cases
from dspine_hf import kernels, ops_dspine, target_dspine
from dspine_hf.eagle import EagleDrafter
from dspine_hf.ops_dspine import EAGER, SIMPLE, fused_ops
from dspine_hf.static_cache import Places, RaggedDraftCache
from helpers.families import family_target

interpreted = pytest.mark.skipif(not kernels.available("cpu"), reason=kernels.why_not("cpu"))
KINDS = [
    pytest.param({"rewrite_layers": 2}, id="DSpine"),
    pytest.param({"injection_placement": "mlp", "rewrite_layers": 1, "chain_passes": 1}, id="with a chain"),
    pytest.param({"injection": "none", "selection": "independent"}, id="DFlash"),
]


class Counted(TorchDispatchMode):
    """How often torch's operations and those of the kernels ran, by name; views are not counted."""

    def __init__(self):
        super().__init__()
        self.ran = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or func is torch.ops.aten._unsafe_view.default):
            self.ran[func.overloadpacket._qualified_op_name] += 1
        return out


@torch.no_grad()
def drafted(drafter, target, fused, call=None):
    """A block behind 7 rows of context, and what ran meanwhile; `call`: drafts it instead of the drafter's method."""
    drafter.config.use_fused_kernels = fused
    context, positions = cases.random_context(7, drafter.config)
    with patch.object(target_dspine, "TABLE_DEVICES", ("cpu",)):  # phi is a look-up, as it is on a GPU
        view = drafter.bind_target(target).tabulated()
    cache, mode, at = RaggedDraftCache(drafter.config.num_hidden_layers, 12), Counted(), torch.arange(12)[None]
    cache.places = Places(at[:, :7], 7, 0)  # as in the fast loop
    with nullcontext() if call else mode:  # torch.compile does not work inside such a mode
        drafter.extend_context(cache, context[None], torch.tensor([positions]))
        cache.places = Places(at[:, 7:], 12)
        block = (call or drafter.draft_block)(view, cache, torch.tensor([3]), torch.tensor([7]))
    return block, mode.ran


@interpreted
@pytest.mark.parametrize("options", KINDS)
def test_a_fused_pass_has_no_norm_rotation_or_gate_of_many_launches(options):
    target = cases.tiny_target()
    drafter = cases.tiny_drafter(target, **options)
    expected, plain = drafted(drafter, target, False)
    block, ran = drafted(drafter, target, True)
    assert torch.equal(block.candidates, expected.candidates)
    assert all(ran[f"dspine::{name}"] > 0 and not plain[f"dspine::{name}"] for name in SIMPLE)
    for name in ("rsqrt", "pow", "mean", "neg", "silu"):
        assert plain[f"aten::{name}"] and not ran[f"aten::{name}"], name
    norms = ran["dspine::rms_norm"] + ran["dspine::rotated_heads"]
    writes = ran["dspine::gated_injection"] + ran["dspine::pair_write"] + ran["dspine::pair_scores"]
    assert plain["aten::rsqrt"] >= norms + writes
    assert ran.total() < plain.total() / 2


@interpreted
@pytest.mark.parametrize("options", KINDS)
def test_inside_torch_compile_inductor_fuses_them_and_the_others_are_the_kernels(options):
    target = cases.tiny_target()
    drafter, nodes = cases.tiny_drafter(target, use_fused_kernels=True, **options), set()
    with torch.no_grad():
        assert drafter.ops.rms_norm is kernels.rms_norm  # chosen before, as the fast loop does

    def backend(graph, _):
        nodes.update(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(drafter.draft_block, backend=backend, fullgraph=True)
    block, _ = drafted(drafter, target, True, compiled)
    expected, _ = drafted(drafter, target, False)
    assert torch.equal(block.candidates, expected.candidates)
    fused = {node.removeprefix("dspine.").partition(".")[0] for node in nodes if node.startswith("dspine.")}
    assert fused and not fused & set(SIMPLE)
    assert fused >= ({"pair_write", "pair_scores", "topk"} if drafter.config.injection != "none" else {"topk"})


@interpreted
def test_under_autocast_the_others_are_fused():
    target = cases.tiny_target()
    drafter = cases.tiny_drafter(target)
    with torch.autocast("cpu", torch.bfloat16):
        block, ran = drafted(drafter, target, True)
        assert all(getattr(fused_ops("cpu", torch.float32, 6, 4), name) is getattr(EAGER, name) for name in SIMPLE)
    assert not any(ran[f"dspine::{name}"] for name in SIMPLE) and ran["dspine::gated_injection"]
    assert block.candidates.shape == (1, 4, 4)


@interpreted
def test_where_the_kernels_cannot_run_both_are_eager():
    with pytest.warns(UserWarning, match="at most 512, not 700"):
        assert fused_ops("cpu", torch.float32, 700, 4) is EAGER
    with torch.autocast("cpu", torch.bfloat16):
        assert fused_ops("cpu", torch.float32, 700, 4) is EAGER


@interpreted
def test_another_activation_stays_the_modules_own():
    target = cases.tiny_target()
    drafter = cases.tiny_drafter(target, hidden_act="gelu")
    (block, ran), (expected, plain) = (drafted(drafter, target, fused) for fused in (True, False))
    torch.testing.assert_close(block.unary, expected.unary, rtol=2e-5, atol=2e-5)
    assert plain["aten::gelu"] == ran["aten::gelu"] > 0 and not ran["dspine::swiglu"] and ran["dspine::rms_norm"]


@interpreted
def test_an_eagle_style_drafter_is_fused_too():
    target = family_target("Llama")
    drafter = EagleDrafter.for_target(target, block_size=4, transfer_rank=6).eval()
    tokens, anchors = torch.randint(0, 20, (1, 9)), torch.tensor([[3, 6]])
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    features, found = torch.randn(1, 9, width), {}
    for fused in (True, False):
        drafter.config.use_fused_kernels = fused
        with torch.no_grad(), Counted() as mode:
            states, drafts = drafter.unroll(drafter.bind_target(target), features, tokens, anchors)
        found[fused] = states, drafts, mode.ran
    torch.testing.assert_close(found[True][0], found[False][0], rtol=2e-5, atol=2e-5)
    assert torch.equal(found[True][1], found[False][1])
    assert not found[True][2]["aten::rsqrt"] and all(found[True][2][f"dspine::{name}"] for name in SIMPLE)


def test_eager_passes_leave_nothing_to_the_kernels_and_gradients_reach_every_norm():
    target = cases.tiny_target()
    drafter = cases.tiny_drafter(target, use_fused_kernels=True).requires_grad_(True)
    context, positions = cases.random_context(5, drafter.config)
    view, cache = drafter.bind_target(target), drafter.new_cache()
    with Counted() as mode:
        drafter.extend_context(cache, context[None], torch.tensor([positions]))
        embeds, anchor = drafter.block_embeds(view, torch.tensor([[3]]), 4), view.phi(torch.tensor([[3]]))
        drafter(embeds, anchor, torch.arange(5, 10).view(1, 1, 5), cache).hidden.square().sum().backward()
    assert not [name for name in mode.ran if name.startswith("dspine::")]
    missing = [name for name, weight in drafter.named_parameters() if weight.grad is None]
    assert missing == ["norm.weight"]  # not in `hidden`
    assert set(ops_dspine.SIMPLE) <= set(dir(ops_dspine.FusedOps))


NORMS = ["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "hidden_norm", "mlp"]


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=interpreted)])
@pytest.mark.parametrize("name", NORMS)
def test_a_module_in_the_place_of_a_norm_or_an_mlp_runs_itself(name, fused):
    class Doubled(torch.nn.Module):  # as peft wraps a module: neither its weight nor its epsilon is to be seen
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * 2

    target = cases.tiny_target()
    drafter, expected = cases.tiny_drafter(target, rewrite_layers=1), cases.tiny_drafter(target, rewrite_layers=1)
    with torch.no_grad():
        for module in list(drafter.modules()):
            if isinstance(getattr(module, name, None), torch.nn.Module):
                setattr(module, name, Doubled(getattr(module, name)))
        for module in expected.modules():
            if isinstance(getattr(module, name, None), torch.nn.Module):
                found = getattr(module, name)
                (found.down_proj if name == "mlp" else found).weight.mul_(2)
    block, _ = drafted(drafter, target, fused)
    (same, _), (plain, _) = (
        drafted(e, target, False) for e in (expected, cases.tiny_drafter(target, rewrite_layers=1))
    )
    torch.testing.assert_close(block.unary, same.unary, rtol=5e-5, atol=5e-5)
    assert not torch.allclose(plain.unary, same.unary, rtol=1e-2, atol=1e-2)


def test_norms_that_peft_tunes_are_those_that_draft():
    peft = pytest.importorskip("peft")
    target = cases.tiny_target()
    drafter = cases.tiny_drafter(target)
    before, _ = drafted(drafter, target, False)
    names = ["input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"]
    peft.inject_adapter_in_model(peft.LNTuningConfig(target_modules=names), drafter)
    tuned = [weight for weight in drafter.parameters() if weight.requires_grad]
    assert len(tuned) == 4 * drafter.config.num_hidden_layers
    with torch.no_grad():
        for weight in tuned:
            weight.mul_(1.5)
    after, _ = drafted(drafter, target, False)
    assert not torch.allclose(before.unary, after.unary, rtol=1e-2, atol=1e-2)
