"""The fast loop under autocast: neither fused attention, whose operands have two dtypes there, nor graphs."""

import functools

import pytest
import torch

import dspine_hf
from dspine_hf import decoding, fast_call, kernels
from helpers.batch_oracle import batch_oracle
from helpers.oracle import prompt, small_target
from test_decoding_graphs import Recorder

KINDS = [
    pytest.param({}, id="transition"),
    pytest.param({"rewrite_layers": 1, "chain_passes": 1}, id="with a chain"),
    pytest.param({"injection": "none", "selection": "independent"}, id="DFlash"),
]


def pair(**options):
    target, ids = small_target(seed=2), prompt(5)
    reference = target.generate(ids, max_new_tokens=20, do_sample=False)[0]
    return target, batch_oracle(target, [reference], miss_every=5, block_size=3, **options), ids, reference


@pytest.mark.skipif(not kernels.available("cpu"), reason=kernels.why_not("cpu"))
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize(("dtype", "nodes"), [(torch.float32, None), (torch.bfloat16, 6)])
def test_a_call_with_fused_kernels_runs(options, dtype, nodes):
    target, drafter, ids, _ = pair(use_fused_kernels=True, **options)
    drafter.to(dtype)
    call = {"max_new_tokens": 5, "do_sample": False, "tree_nodes": nodes, "fused_attention": nodes and True}
    with torch.autocast("cpu", torch.bfloat16):
        out = dspine_hf.generate(target, drafter, ids, **call)
    assert out.shape == (1, 10)
    assert drafter.generation_stats.drafted > 0


def test_a_call_records_no_graphs_and_takes_none_from_outside(monkeypatch):
    target, drafter, ids, reference = pair()
    recorder, call = Recorder(), {"max_new_tokens": 12, "do_sample": False}
    monkeypatch.setattr(decoding, "Options", functools.partial(fast_call.Options, recorder=recorder))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            before = recorder.recorded
            dspine_hf.generate(target, drafter, ids, **call)
            assert recorder.recorded == before
            with pytest.raises(ValueError, match="outside of autocast"):
                dspine_hf.generate(target, drafter, ids, use_graphs=True, **call)
        assert torch.equal(dspine_hf.generate(target, drafter, ids, **call)[0], reference[:17])
        assert recorder.recorded > 0
