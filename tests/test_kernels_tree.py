"""Trees in one launch: those of `fast_tree.grow`, and the branches that `fast_tree.follow` finds in them."""

import inspect

import pytest
import torch

import dspine_hf
from dspine_hf import fast_tree, kernels
from dspine_hf.fast_tree import Tree, follow, grow
from dspine_hf.ops_dspine import EAGER, FusedOps, fused_ops
from helpers.batch_oracle import BatchOracle, batch_oracle, padded
from helpers.borders import bordered
from helpers.guards import allocations  # noqa: F401
from helpers.oracle import prompt, small_target

DEVICE = "cuda" if torch.cuda.is_available() and kernels.available("cuda") else "cpu"
if not kernels.available(DEVICE):
    pytest.skip(kernels.why_not(DEVICE), allow_module_level=True)

from dspine_hf.kernels.tree import follow_tree, grow_tree  # noqa: E402

V = 200
SHAPES = [  # batch, slots, K, N
    (3, 1, 4, 1),
    (1, 1, 4, 63),
    (1, 1, 32, 31),
    (3, 3, 4, 7),
    (1, 3, 4, 63),
    (3, 7, 16, 15),
    (1, 7, 3, 31),
    (3, 15, 32, 7),
    (1, 15, 32, 63),
    (1, 32, 1, 31),
]


def case(batch, slots, K, independent=False, dtype=torch.float32, seed=0, spread=8.0):
    """candidates, first and pairs, with poison around them; a row's scores are far apart, in bfloat16 too."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(batch, slots, V, generator=generator).argsort(-1)[..., :K]

    def scores(*shape):
        ranks = torch.rand(*shape, generator=generator).argsort(-1)
        return bordered((spread * (ranks + torch.rand(*shape, generator=generator) / 2) / K).to(DEVICE, dtype))

    later = (batch, slots - 1, 1 if independent else K, K)
    return bordered(ids.to(DEVICE), V + 9), scores(batch, K), scores(*later)


def texts_of(tree):
    """The tokens that lead to every row of a tree, `[batch][N + 1]`."""
    found = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parent.tolist(), strict=True):
        texts = [()]
        for token, parent in zip(tokens, parents, strict=True):
            texts.append((*texts[parent], token))
        found.append(texts)
    return found


def assert_is_a_tree(tree, candidates):
    for batch, texts in enumerate(texts_of(tree)):
        assert len(set(texts)) == len(texts) == tree.depth.shape[1]
        assert tree.depth[batch].tolist() == [len(text) for text in texts]
        assert tree.sees[batch].tolist() == [[text[: len(one)] == one for one in texts] for text in texts]
        for text in texts:
            assert all(token in ids for token, ids in zip(text, candidates[batch].tolist(), strict=False))


def totals_of(tree, candidates, first, pairs):
    """The ascending scores of the rows behind the anchor, `[batch, N]`."""
    found = []
    for batch, texts in enumerate(texts_of(tree)):
        ids, sums = candidates[batch].tolist(), []
        for text in texts[1:]:
            total, row = 0.0, first[batch]
            for slot, token in enumerate(text):
                k = ids[slot].index(token)
                total += float(fast_tree._steps(row)[k])
                if slot < pairs.shape[1]:
                    row = pairs[batch, slot, k if pairs.shape[2] > 1 else 0]
            sums.append(total)
        found.append(sorted(sums))
    return torch.tensor(found)


def chosen_along(tree, lengths, seed=0):
    """The target's tokens `[batch, N + 1]`: along a branch of each batch row for so many steps, or to its end."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.full_like(tree.depth, V)
    for batch, length in enumerate(lengths):
        row = 0
        for _ in range(length):
            children = (tree.parent[batch] == row).nonzero()[:, 0].tolist()
            if not children:
                break
            child = children[int(torch.randint(len(children), (), generator=generator))]
            choice[batch, row] = tree.tokens[batch, child]
            row = child + 1
    return choice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("independent", [False, True], ids=["pairs", "independent"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tree_is_the_eager_one_and_so_is_its_branch(shape, independent, dtype, allocations):  # noqa: F811
    batch, slots, K, nodes = shape
    candidates, first, pairs = case(batch, slots, K, independent, dtype, seed=nodes)
    tree = Tree(*grow_tree(candidates, first, pairs, nodes))
    allocations.check(tree.tokens, tree.parent, tree.depth, tree.bits)
    expected = grow(candidates, first, pairs, nodes)
    assert tree.tokens.shape == expected.tokens.shape
    assert [set(texts) for texts in texts_of(tree)] == [set(texts) for texts in texts_of(expected)]
    assert_is_a_tree(tree, candidates)
    for length in (0, 2, slots):
        choice = chosen_along(tree, range(length, length + batch), seed=length)
        found = follow_tree(tree.tokens, tree.parent, tree.depth, tree.bits, choice, slots)
        allocations.check(*found)
        for one, other in zip(found, follow(tree, choice, slots), strict=True):
            assert torch.equal(one, other)


def test_the_branch_is_the_targets_own():
    tree = Tree(*grow_tree(*case(3, 5, 4), 40))
    choice = chosen_along(tree, (0, 2, 9))
    agreed, tokens, rows = follow_tree(tree.tokens, tree.parent, tree.depth, tree.bits, choice, 5)
    assert agreed.tolist()[:2] == [0, 2] and agreed[2] > 2
    for batch, count in enumerate(agreed.tolist()):
        branch = rows[batch, : count + 1].tolist()
        assert branch[0] == 0 and tree.depth[batch, branch].tolist() == list(range(count + 1))
        assert tokens[batch, : count + 1].tolist() == choice[batch, branch].tolist()
        assert tokens[batch, :count].tolist() == [int(tree.tokens[batch, row - 1]) for row in branch[1:]]
        assert rows[batch, count + 1 :].tolist() == list(range(count + 1, 6))


@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["all equal", "many equal"])
@pytest.mark.parametrize("independent", [False, True], ids=["pairs", "independent"])
def test_of_equally_likely_paths_some_are_taken(spread, independent):
    candidates, first, pairs = case(2, 6, 4, independent, spread=4 * spread)
    first, pairs = first.round(), pairs.round() // 2
    tree, expected = Tree(*grow_tree(candidates, first, pairs, 30)), grow(candidates, first, pairs, 30)
    assert_is_a_tree(tree, candidates)
    totals = [totals_of(one, candidates, first, pairs) for one in (tree, expected)]
    torch.testing.assert_close(*totals, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1e4, float("inf"), float("nan")])
def test_scores_without_bounds_make_trees(scale):
    candidates, first, pairs = case(2, 6, 4, seed=3)
    first, pairs = (torch.where(t > 5, scale, torch.where(t < 1, -scale, t)) for t in (first, pairs))
    tree, expected = Tree(*grow_tree(candidates, first, pairs, 20)), grow(candidates, first, pairs, 20)
    assert_is_a_tree(tree, candidates)
    totals = [totals_of(one, candidates, first, pairs) for one in (tree, expected)]
    torch.testing.assert_close(*totals, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(5, 33, 9), (33, 2, 9), (5, 4, 64)], ids=["slots", "K", "N"])
def test_what_the_kernel_does_not_take_the_eager_operation_does(shape):
    slots, K, nodes = shape
    candidates, first, pairs = case(1, slots, K)
    with pytest.raises(ValueError, match="expected 1 to 63 nodes, 32 slots and 32 candidates"):
        grow_tree(candidates, first, pairs, nodes)
    found = [grow(candidates, first, pairs, nodes, ops) for ops in (fused(), EAGER)]
    assert torch.equal(found[0].tokens, found[1].tokens) and torch.equal(found[0].sees, found[1].sees)
    choice = chosen_along(found[0], [slots])
    for one, other in zip(follow(found[0], choice, slots, fused()), follow(found[1], choice, slots), strict=True):
        assert torch.equal(one, other)
    assert found[0].seen.dim() == (3 if nodes > 63 else 2)


def fused():
    return fused_ops(DEVICE, torch.float32, 16, 16)


def test_fused_operations_grow_and_follow_in_one_launch_each(monkeypatch):
    assert isinstance(fused(), FusedOps) and not isinstance(EAGER, FusedOps)
    inputs = case(2, 5, 4)
    tree = grow(*inputs, 20, fused())
    choice = chosen_along(tree, (2, 3))
    for module in (torch.Tensor, torch):  # what the eager operations begin with
        monkeypatch.setattr(module, "gather", None)
        monkeypatch.setattr(module, "topk", None)
    again = grow(*inputs, 20, fused())
    assert again.tokens.equal(tree.tokens) and follow(again, choice, 5, fused())[0].tolist() == [2, 3]


@pytest.mark.parametrize("nodes", [1, 24])
def test_text_is_plain_text_through_fused_trees(nodes, monkeypatch):
    target, texts, grown = small_target(seed=2).to(DEVICE), [prompt(n, seed=20 + n) for n in (7, 4)], []
    ops = FusedOps(
        grow_tree=lambda *args: grown.append(args[3]) or grow_tree(*args),
        follow_tree=follow_tree,
        move_columns=kernels.move_columns,
        addresses=kernels.addresses,
    )
    references = [target.generate(ids.to(DEVICE), max_new_tokens=40, do_sample=False)[0] for ids in texts]
    drafter = batch_oracle(target, references, boost=4.0, num_candidates=8)
    ids, mask = (t.to(DEVICE) for t in padded(texts))
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "fused_attention": False}
    plain = target.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    dspine_hf.generate(target, drafter, ids, tree_nodes=nodes, **options)
    accepted = drafter.generation_stats.accepted
    monkeypatch.setattr(BatchOracle, "ops", property(lambda self: ops))
    assert torch.equal(dspine_hf.generate(target, drafter, ids, tree_nodes=nodes, **options), plain)
    assert set(grown) == {nodes} and drafter.generation_stats.accepted == accepted > 0


@pytest.mark.parametrize("name", ["first", "pairs", "candidates", "nodes"])
def test_inputs_that_do_not_belong_together_are_refused(name):
    candidates, first, pairs = case(2, 3, 4)
    wrong = {
        "first": (candidates, first[:1], pairs, 5),
        "pairs": (candidates, first, pairs[:, :, :2], 5),
        "candidates": (candidates.int(), first, pairs, 5),
        "nodes": (candidates, first, pairs, 0),
    }
    with pytest.raises(ValueError, match="expected"):
        grow_tree(*wrong[name])


@pytest.mark.parametrize("name", ["tokens", "parent", "depth", "bits", "choice"])
def test_a_tree_whose_parts_do_not_belong_together_is_refused(name):
    names = ("tokens", "parent", "depth", "bits", "choice")
    parts = dict(zip(names, [*grow_tree(*case(2, 3, 4), 5), torch.zeros(2, 6, dtype=torch.long)], strict=True))
    with pytest.raises(ValueError, match="expected"):
        follow_tree(**parts | {name: parts[name].int()}, slots=3)
    with pytest.raises(ValueError, match="expected"):
        follow_tree(**parts | {name: parts[name][:, :-1]}, slots=3)


def test_the_arguments_are_those_of_the_eager_operations():
    assert list(inspect.signature(grow).parameters)[:4] == list(inspect.signature(grow_tree).parameters)
    tree = [name for name in Tree.__annotations__ if name != "seen"] + ["bits"]
    own = list(inspect.signature(follow_tree).parameters)
    assert own == tree + list(inspect.signature(follow).parameters)[1:3]


def test_the_operations_are_registered_as_they_behave():
    inputs = tuple(t.contiguous() for t in case(2, 3, 4))
    torch.library.opcheck(kernels._ops.ops.grow_tree, (*inputs, 5))
    tree = grow_tree(*inputs, 5)
    torch.library.opcheck(kernels._ops.ops.follow_tree, (*tree, torch.zeros_like(tree[2]), 3))
