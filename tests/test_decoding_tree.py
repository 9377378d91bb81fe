"""Trees of drafts: the likeliest paths, the branch that the target takes, and plain text in every kind of call."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

import dspine_hf
from dspine_hf import decoding, fast_call, fast_target, kernels
from dspine_hf.fast_target import Verification
from dspine_hf.fast_tree import follow, grow
from dspine_hf.ops_dspine import EAGER
from helpers.batch_oracle import batch_oracle, padded
from helpers.families import family_target
from helpers.oracle import prompt, small_target
from test_decoding_graphs import Recorder

SOFT_CAP = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "sliding_window": 6, "head_dim": 8}
TARGETS = {
    "full attention": lambda: small_target(seed=2),
    "sliding window": lambda: small_target(seed=2, family=(MistralConfig, MistralForCausalLM), sliding_window=6),
    "window of two": lambda: small_target(seed=2, family=(MistralConfig, MistralForCausalLM), sliding_window=2),
    "mixed windows": lambda: small_target(seed=2, family=(Gemma2Config, Gemma2ForCausalLM), **SOFT_CAP),
    "mixed windows, no cap": lambda: small_target(
        seed=2,
        family=(Gemma3TextConfig, Gemma3ForCausalLM),
        sliding_window=4,
        head_dim=8,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "learned positions": lambda: family_target("GPT2"),
    "eager attention": lambda: small_target(seed=2, attn_implementation="eager"),
}


def all_paths(first, pairs):
    """{path of candidate indices: log-probability}, of one batch row."""
    found = {}
    slots, width = 1 + pairs.shape[0], first.shape[0]
    for length in range(1, slots + 1):
        for path in itertools.product(range(width), repeat=length):
            total = first.log_softmax(-1)[path[0]]
            for slot, (before, now) in enumerate(itertools.pairwise(path)):
                row = pairs[slot, before if pairs.shape[1] > 1 else 0]
                total = total + row.log_softmax(-1)[now]
            found[path] = float(total)
    return found


def paths_of(tree, candidates, row):
    """The paths of candidate indices that lead to each node of a batch row."""
    tokens, parents = tree.tokens[row].tolist(), tree.parent[row].tolist()
    paths = [()]
    for token, parent in zip(tokens, parents, strict=True):
        slot = len(paths[parent])
        paths.append((*paths[parent], candidates[row, slot].tolist().index(token)))
    return paths


@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 39, 60])
def test_a_tree_holds_the_likeliest_paths(nodes, rows):
    torch.manual_seed(nodes)
    candidates = torch.stack([torch.randperm(50)[:9].view(3, 3) for _ in range(4)])
    first, pairs = 3 * torch.randn(4, 3), 3 * torch.randn(4, 2, rows, 3)
    tree = grow(candidates, first, pairs, nodes)
    for b in range(4):
        likely = all_paths(first[b], pairs[b])
        best = sorted(likely, key=lambda path: likely[path] - 1e-3 * len(path), reverse=True)[:nodes]
        paths = paths_of(tree, candidates, b)
        assert sorted(paths[1:]) == sorted(best) and len(set(paths)) == len(paths)
        assert tree.depth[b].tolist() == [len(path) for path in paths]
        for i, path in enumerate(paths):
            ancestors = [path[: len(other)] == other for other in paths]
            assert tree.sees[b, i].tolist() == ancestors


@pytest.mark.parametrize("scale", [0.0, 1e4, float("inf")])
def test_parents_come_with_their_children_whatever_the_scores(scale):
    torch.manual_seed(0)
    candidates = torch.arange(4 * 7).view(1, 7, 4).repeat(8, 1, 1)
    first, pairs = torch.randn(8, 4), torch.randn(8, 6, 4, 4)
    first, pairs = (torch.where(t > 1, t.sign() * scale, t * min(scale, 1e4)) for t in (first, pairs))
    tree = grow(candidates, first, pairs, 20)
    for b in range(8):
        paths_of(tree, candidates, b)  # every token is a candidate of the slot behind its parent
        assert (tree.parent[b] <= torch.arange(20)).all()
        assert torch.equal(tree.depth[b, 1:], tree.depth[b][tree.parent[b]] + 1)


def test_the_branch_is_the_one_that_the_target_takes():
    candidates = torch.tensor([[[5, 6], [7, 8], [9, 4]]])
    tree = grow(candidates, torch.zeros(1, 2), torch.zeros(1, 2, 2, 2), 14)
    paths = paths_of(tree, candidates, 0)
    texts = {tuple(int(candidates[0, s, k]) for s, k in enumerate(path)): i for i, path in enumerate(paths)}
    choice = torch.zeros(1, 15, dtype=torch.long)
    for text, following in (((), 6), ((6,), 7), ((6, 7), 3), ((5,), 8), ((5, 8), 9)):
        choice[0, texts[text]] = following
    agreed, tokens, rows = follow(tree, choice, 3)
    assert agreed.item() == 2
    assert tokens[0, :3].tolist() == [6, 7, 3]
    assert rows[0].tolist() == [0, texts[6,], texts[6, 7], 3]


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    return TARGETS[request.param]()


@pytest.fixture
def attended(monkeypatch):
    """What attention by limits is told of trees, call by call: their shapes, or None for a chain."""
    found = []

    def verify_attention(*args, tree=None, **options):
        found.append(None if tree is None else tuple(tree.shape))
        return EAGER.verify_attention(*args, tree=tree, **options)

    monkeypatch.setattr(fast_call, "fused_ops", lambda *args: replace(EAGER, verify_attention=verify_attention))
    return found


def oracle_of(target, texts, **options):
    references = [target.generate(ids, max_new_tokens=40, do_sample=False)[0] for ids in texts]
    return batch_oracle(target, references, **{"boost": 4.0, "num_candidates": 8, **options})


@pytest.mark.parametrize("nodes", [1, 4, 24])
@pytest.mark.parametrize("end", [{}, {"eos_token_id": [5, 9, 17], "pad_token_id": 0}], ids=["length", "eos"])
def test_text_is_plain_text(target, nodes, end):
    texts = [prompt(length, seed=20 + i) for i, length in enumerate((7, 1, 4))]
    drafter = oracle_of(target, texts)
    ids, mask = padded(texts)
    options = {"attention_mask": mask, "max_new_tokens": 25, "do_sample": False, **end}
    plain = target.generate(ids, **options)
    assert torch.equal(dspine_hf.generate(target, drafter, ids, tree_nodes=nodes, **options), plain)
    if nodes == 24:
        accepted = drafter.generation_stats.acceptance_length
        dspine_hf.generate(target, drafter, ids, **options)
        assert accepted > drafter.generation_stats.acceptance_length
    drafter.references, options["attention_mask"] = drafter.references[:1], None
    plain = target.generate(texts[0], **options)
    assert torch.equal(dspine_hf.generate(target, drafter, texts[0], tree_nodes=nodes, **options), plain)


@pytest.mark.parametrize("name", TARGETS)
def test_text_is_plain_text_where_attention_is_told_of_the_tree(name, attended):
    target, texts = TARGETS[name](), [prompt(length, seed=20 + i) for i, length in enumerate((7, 1, 4))]
    drafter, (ids, mask) = oracle_of(target, texts), padded(texts)
    options = {"attention_mask": mask, "max_new_tokens": 25, "do_sample": False}
    plain = target.generate(ids, **options)
    dspine_hf.generate(target, drafter, ids, tree_nodes=24, **options)
    accepted = drafter.generation_stats.accepted
    out = dspine_hf.generate(target, drafter, ids, tree_nodes=24, fused_attention=True, **options)
    assert torch.equal(out, plain)
    assert drafter.generation_stats.accepted == accepted > 3
    assert ((3, 25) in attended) == (name not in ("mixed windows", "eager attention"))  # the cap is not known


@pytest.mark.parametrize(("nodes", "fused"), [(62, True), (63, True), (64, False), (90, False)])
def test_attention_is_told_of_trees_whose_rows_fit_into_a_number(nodes, fused, attended):
    target, texts = small_target(seed=2), [prompt(7, seed=20)]
    drafter, options = oracle_of(target, texts), {"max_new_tokens": 25, "do_sample": False}
    out = dspine_hf.generate(target, drafter, texts[0], tree_nodes=nodes, fused_attention=True, **options)
    assert torch.equal(out, target.generate(texts[0], **options))
    assert ((1, nodes + 1) in attended) == fused
    assert drafter.generation_stats.accepted > 3


@pytest.mark.skipif(not kernels.available("cpu"), reason=kernels.why_not("cpu"))
@pytest.mark.parametrize("slots", [64])
def test_branches_longer_than_a_kernel_moves_are_moved_too(slots):
    target, texts = small_target(seed=2), [prompt(7, seed=20)]
    settings = {"injection": "none", "selection": "independent", "num_hidden_layers": 1, "num_candidates": 2}
    drafter = batch_oracle(target, [], 40, 20.0, block_size=66, **settings)
    call = {"max_new_tokens": 70, "do_sample": False}
    plain = target.generate(texts[0], **call)
    drafter.references, drafter.config.use_fused_kernels = [plain[0].tolist()], True
    call |= {"tree_nodes": 20, "num_assistant_tokens": slots, "fused_attention": False}
    assert torch.equal(dspine_hf.generate(target, drafter, texts[0], **call), plain)
    assert drafter.generation_stats.accepted > 3


@pytest.mark.skipif(not kernels.available("cpu"), reason=kernels.why_not("cpu"))
@pytest.mark.parametrize("name", ["full attention", "mixed windows, no cap"])
def test_text_is_plain_text_through_the_kernel(name):
    target, texts = TARGETS[name](), [prompt(length, seed=20 + i) for i, length in enumerate((7, 4))]
    drafter, (ids, mask) = oracle_of(target, texts, block_size=4), padded(texts)
    options = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    out = dspine_hf.generate(target, drafter, ids, tree_nodes=11, fused_attention=True, **options)
    assert torch.equal(out, target.generate(ids, **options))
    assert drafter.generation_stats.accepted > 3


@pytest.mark.parametrize("name", ["full attention", "mixed windows, no cap"])
def test_a_graph_looks_at_trees_among_all_columns(name, attended, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(decoding, "Options", functools.partial(fast_call.Options, recorder=recorder))
    target, texts = TARGETS[name](), [prompt(length, seed=20 + i) for i, length in enumerate((7, 4))]
    drafter, (ids, mask) = oracle_of(target, texts), padded(texts)
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    plain = target.generate(ids, **options)
    for _ in range(2):
        out = dspine_hf.generate(target, drafter, ids, tree_nodes=20, fused_attention=True, **options)
        assert torch.equal(out, plain)
    assert (2, 21) in attended and recorder.recorded == 2


@pytest.mark.skipif(not kernels.available("cpu"), reason=kernels.why_not("cpu"))
def test_a_compiled_pass_over_a_tree_breaks_no_graph(monkeypatch):
    target = TARGETS["mixed windows, no cap"]()
    settings = {"block_size": 3, "num_candidates": 4, "transfer_rank": 16, "num_hidden_layers": 1}
    drafter = dspine_hf.DSpineDraftModel.for_target(target, **settings).eval()
    torch._dynamo.reset()
    counters.clear()
    genuine, seen = torch.compile, []

    def compiling(call, **more):
        return genuine(call, backend="aot_eager", **more)

    monkeypatch.setattr(fast_target.torch, "compile", compiling)
    monkeypatch.setattr(fast_target, "Verification", lambda *args: seen.append(args[3]) or Verification(*args))
    options = {"max_new_tokens": 4, "do_sample": False}
    ids = prompt(7)
    out = dspine_hf.generate(target, drafter, ids, compiled=True, tree_nodes=9, fused_attention=True, **options)
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert counters["frames"]["ok"] >= 3
    assert any(tree is not None and tree.shape == (1, 10) for tree in seen)
    assert torch.equal(out, target.generate(ids, **options))


@pytest.mark.parametrize("options", [{"selection": "independent"}, {"block_size": 2}, {"context_window": 5}], ids=str)
def test_other_drafters_grow_trees_too(options):
    target, texts = small_target(seed=2), [prompt(7, seed=20)]
    drafter = oracle_of(target, texts, **options)
    call = {"max_new_tokens": 25, "do_sample": False}
    out = dspine_hf.generate(target, drafter, texts[0], tree_nodes=6, **call)
    assert torch.equal(out, target.generate(texts[0], **call))
    assert drafter.generation_stats.accepted > 3


def test_a_sampled_or_processed_call_drafts_chains():
    target, texts = small_target(seed=2), [prompt(7, seed=20)]
    drafter = oracle_of(target, texts)
    for options in ({"do_sample": True}, {"do_sample": False, "repetition_penalty": 1.3}):
        found = []
        for nodes in (None, 9):
            torch.manual_seed(3)
            found.append(dspine_hf.generate(target, drafter, texts[0], max_new_tokens=20, tree_nodes=nodes, **options))
        assert torch.equal(*found)


@pytest.mark.parametrize("options", [{"tree_nodes": 0}, {"tree_nodes": 4, "adaptive": True}], ids=str)
def test_a_call_that_cannot_grow_trees_is_refused(options):
    target = small_target(seed=2)
    with pytest.raises(ValueError, match="tree_nodes"):
        dspine_hf.generate(target, batch_oracle(target), prompt(5), max_new_tokens=4, **options)
    with pytest.raises(ValueError, match="tree_nodes"):
        dspine_hf.generate(target, None, prompt(5), max_new_tokens=4, tree_nodes=4)


@pytest.mark.parametrize(
    ("nodes", "candidates", "size"), [(1, 2, 1), (5, 2, 5), (24, 2, 14), (24, 4, 24), (90, 4, 84)]
)
def test_what_was_drafted_is_what_the_target_verified(nodes, candidates, size, monkeypatch):
    """Every node of a tree; a chain's tokens where a tree would pass the limit. Three slots have few paths."""
    target, texts = small_target(seed=2), [prompt(7, seed=20)]
    drafter, verified = oracle_of(target, texts, block_size=4, num_candidates=candidates), []
    genuine = fast_target.TargetPasses.verify
    monkeypatch.setattr(
        fast_target.TargetPasses,
        "verify",
        lambda self, ids, *args: verified.append(ids.shape[1] - 1) or genuine(self, ids, *args),
    )
    dspine_hf.generate(target, drafter, texts[0], tree_nodes=nodes, max_new_tokens=24, do_sample=False)
    stats = drafter.generation_stats
    assert (stats.drafted, stats.rounds, max(verified)) == (sum(verified), len(verified), size)
    assert stats.slot_trials[0] == sum(count > 0 for count in verified)


@pytest.mark.parametrize("lengths", [(7,), (7, 1, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"context_window": 5}, {"selection": "independent"}], ids=str)
def test_a_block_is_the_same_whatever_is_verified(lengths, options):
    """It sees the text and itself: no column of a tree, which may have more rows than the block."""
    target, texts = small_target(seed=2), [prompt(length, seed=20 + i) for i, length in enumerate(lengths)]
    drafter, (ids, mask), found = oracle_of(target, texts, **options), padded(texts), []
    with torch.no_grad():
        drafter.fc.weight.mul_(8)  # a block that hangs on its context
    for call in ({}, {"tree_nodes": 24}):
        drafter.blocks = []
        dspine_hf.generate(target, drafter, ids, attention_mask=mask, max_new_tokens=20, do_sample=False, **call)
        blocks = {}
        for positions, unary, _ in drafter.blocks:  # the first of a position: rows that are done stay where they are
            for row, position in enumerate(positions):
                blocks.setdefault((row, position), unary[row])
        found.append(blocks)
    chains, trees = found
    shared = chains.keys() & trees.keys()
    assert len(shared) > 2 * len(lengths)
    for place in shared:
        torch.testing.assert_close(trees[place], chains[place], rtol=1e-4, atol=1e-4)
