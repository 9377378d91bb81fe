"""Attention by limits: the fused operation equals attention with the explicit mask in fp64, and reads nothing else."""

import pytest
import torch

from dspine_hf import kernels, ops_dspine
from helpers.borders import bordered
from helpers.guards import allocations  # noqa: F401

DEVICE = "cuda" if torch.cuda.is_available() and kernels.available("cuda") else "cpu"
if not kernels.available(DEVICE):
    pytest.skip(kernels.why_not(DEVICE), allow_module_level=True)

from dspine_hf.kernels.attention import launch_shape, verify_attention  # noqa: E402

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest value, near 1


def case(heads=4, kv_heads=2, rows=5, capacity=150, head_dim=24, batch=2, dtype=torch.float32, seed=0):
    """q, k, v, start and limit with NaN around them, and NaN in the cache where no row of the batch row looks."""
    torch.manual_seed(seed)
    q = torch.randn(batch, heads, rows, head_dim)
    k, v = torch.randn(2, batch, kv_heads, capacity, head_dim)
    start = torch.randint(0, capacity // 4, (batch,))
    limit = torch.randint(capacity // 3, capacity - 9, (batch, rows), dtype=torch.int32)
    j = torch.arange(capacity)
    dead = (j < start[:, None]) | (j > limit.amax(1)[:, None])  # [batch, capacity]
    k, v = (t.masked_fill(dead[:, None, :, None], float("nan")) for t in (k, v))
    q, k, v = (bordered(t.to(DEVICE, dtype)) for t in (q, k, v))
    return q, k, v, bordered(start.to(DEVICE), 10**6), bordered(limit.to(DEVICE), 10**6)


def tree_case(rows=9, capacity=150, batch=2, seed=0, **shape):
    """The same for trees, whose rows lie behind a root at another column of every batch row, and their numbers."""
    q, k, v, _, _ = case(rows=rows, capacity=capacity, batch=batch, seed=seed, **shape)
    generator = torch.Generator().manual_seed(seed)
    root = torch.randint(capacity // 3, capacity - rows - 4, (batch, 1), generator=generator)
    start = torch.randint(0, capacity // 4, (batch,), generator=generator)
    depth, tree = torch.zeros(batch, rows, dtype=torch.long), torch.ones(batch, rows, dtype=torch.long)
    for b, i in [(b, i) for b in range(batch) for i in range(1, rows)]:
        parent = int(torch.randint(max(0, i - 4), i, (), generator=generator))
        depth[b, i] = depth[b, parent] + 1
        tree[b, i] = tree[b, parent] + (1 << i if i < 63 else -(1 << 63))
    j = torch.arange(capacity)
    dead = ((j < start[:, None]) | (j >= root + rows))[:, None, :, None].to(DEVICE)
    for cache in (k, v):
        cache.copy_(torch.randn(cache.shape, generator=generator).to(DEVICE).masked_fill(dead, float("nan")))
    start, limit, tree = (bordered(t.to(DEVICE), 10**6) for t in (start, (root + depth).int(), tree))
    return q, k, v, start, limit, tree


def seen_keys(start, limit, tree, b, t, window):
    """The columns that row t of batch row b sees, and nothing of how a kernel finds them."""
    last, root = int(limit[b, t]), int(limit[b, 0])
    places = {j: j for j in range(int(start[b]), last + 1)}
    if tree is not None:
        places = {j: j for j in range(int(start[b]), root) if last >= 0}
        rows = [i for i in range(limit.shape[1]) if last >= 0 and int(tree[b, t]) >> i & 1]
        places |= {root + i: int(limit[b, i]) for i in rows}
    return [j for j, place in places.items() if not window or place > last - window]


def reference(q, k, v, start, limit, scale=None, window=0, softcap=0.0, tree=None):
    """The definition in fp64, row by row."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    groups = q.shape[1] // k.shape[1]
    for b, t in [(b, t) for b in range(q.shape[0]) for t in range(q.shape[2])]:
        seen = [j for j in seen_keys(start, limit, tree, b, t, window) if j < k.shape[2]]
        if not seen:
            continue
        keys, values = (
            x[b, :, seen].double().repeat_interleave(groups, dim=0) for x in (k, v)
        )  # [heads, n, head_dim]
        scores = torch.einsum("hd,hnd->hn", q[b, :, t].double(), keys) * (scale or q.shape[-1] ** -0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out[b, :, t] = torch.einsum("hn,hnd->hd", scores.softmax(-1), values)
    return out


@pytest.fixture
def assert_equal(allocations):  # noqa: F811
    def check(args, **options):
        found = verify_attention(*args, **options)
        allocations.check(found)
        options.pop("splits", None)
        torch.testing.assert_close(found.double(), reference(*args, **options), rtol=0, atol=TOLERANCE[found.dtype])
        assert found.transpose(1, 2).flatten(2).data_ptr() == found.data_ptr()

    return check


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_it_equals_masked_attention_in_every_dtype(assert_equal, dtype, splits):
    assert_equal(case(dtype=dtype), splits=splits)


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (6, 2), (4, 1), (8, 1)])
def test_query_heads_share_their_kv_head(assert_equal, heads, kv_heads):
    assert_equal(case(heads=heads, kv_heads=kv_heads, rows=3, capacity=70), splits=2)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_head_dims_that_are_no_power_of_two_are_padded(assert_equal, head_dim):
    assert_equal(case(head_dim=head_dim, rows=3, capacity=70))


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_rows_that_do_not_fill_their_tiles(assert_equal, rows):
    assert_equal(case(rows=rows, capacity=90), splits=2)


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 37}, {"softcap": 1.5}, {"scale": 0.6}], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_window_softcap_and_scale(assert_equal, options, splits):
    assert_equal(case(), splits=splits, **options)


def test_every_row_of_a_bidirectional_block_sees_the_whole_block(assert_equal):
    q, k, v, start, limit = case(rows=8)
    limit.fill_(120)
    k.nan_to_num_(), v.nan_to_num_()
    assert_equal((q, k, v, start, limit))


@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_that_sees_nothing_gives_zeros(assert_equal, splits):
    q, k, v, start, limit = case(rows=4)
    limit[0] = -1
    limit[1, 2] = start[1] - 1
    found = verify_attention(q, k, v, start, limit, splits=splits)
    assert not found[0].any() and not found[1, :, 2].any()
    assert found[1, :, [0, 1, 3]].abs().amin() > 0
    assert_equal((q, k, v, start, limit), splits=splits)


def test_limits_at_and_beyond_the_capacity_end_there():
    q, k, v, start, limit = case(capacity=64, rows=2)
    k.nan_to_num_(), v.nan_to_num_()
    limit.fill_(63)
    limit[:, 1] = 900
    found, expected = verify_attention(q, k, v, start, limit, splits=2), reference(q, k, v, start, limit)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


def test_the_cache_may_lie_in_any_layout(assert_equal):
    q, k, v, start, limit = case()
    q, k, v = (t.nan_to_num().transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    assert_equal((q, k, v.transpose(2, 3).contiguous().transpose(2, 3), start[:1].expand(2), limit))


def test_large_scores_do_not_overflow(assert_equal):
    q, k, v, start, limit = case()
    assert_equal((q.bfloat16(), k.bfloat16(), v.bfloat16(), start, limit), scale=40.0, splits=3)


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_of_a_tree_see_their_ancestors_alone(assert_equal, dtype, splits):
    *args, tree = tree_case(dtype=dtype)
    assert_equal(args, splits=splits, tree=tree)


@pytest.mark.parametrize(
    "shape",
    [
        {"rows": 1},
        {"rows": 2, "batch": 1},
        {"rows": 17, "heads": 8, "kv_heads": 2, "head_dim": 64},
        {"rows": 31, "heads": 4, "kv_heads": 4, "head_dim": 128, "capacity": 70},
        {"rows": 63, "heads": 3, "kv_heads": 1, "batch": 3},
        {"rows": 64, "heads": 4, "kv_heads": 1, "head_dim": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [0, 3, 40])
def test_trees_of_any_shape(assert_equal, shape, window):
    *args, tree = tree_case(**shape)
    assert_equal(args, tree=tree, window=window, splits=2)


@pytest.mark.parametrize("window", [1, 2, 4, 37])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_window_counts_places_in_the_text_not_columns(assert_equal, window, splits):
    *args, tree = tree_case(rows=20, heads=6)
    assert_equal(args, tree=tree, window=window, splits=splits)


def test_a_tree_that_is_a_chain_is_a_chain(assert_equal):
    q, k, v, start, limit = case()
    limit.copy_(limit[:, :1] + torch.arange(5, device=DEVICE, dtype=limit.dtype))
    k.nan_to_num_(), v.nan_to_num_()
    tree = (2 << torch.arange(5, device=DEVICE)).expand(2, -1) - 1
    for window in (0, 3):
        found, chain = (verify_attention(q, k, v, start, limit, window=window, tree=t) for t in (tree, None))
        torch.testing.assert_close(found, chain, rtol=0, atol=2e-6)


def test_padded_rows_of_trees_give_zeros_and_a_tree_ends_at_the_capacity(assert_equal):
    q, k, v, start, limit, tree = tree_case(rows=9)
    limit[0], limit[1, 4] = -1, -1
    found = verify_attention(q, k, v, start, limit, tree=tree)
    assert not found[0].any() and not found[1, :, 4].any()
    assert_equal((q, k, v, start, limit), tree=tree)
    q, k, v, start, limit, tree = tree_case(rows=9)
    k, v = (t.nan_to_num()[:, :, : int(limit[:, 0].min()) + 4] for t in (k, v))
    assert_equal((q, k, v, start, limit), tree=tree)


def test_numbers_of_a_tree_may_lie_in_any_layout(assert_equal):
    *args, tree = tree_case()
    assert_equal(args, tree=tree.t().contiguous().t())


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": 40}, {"softcap": 2.0, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("rows", [2, 9, 64])
def test_the_eager_operation_is_the_same_function_of_trees(rows, options):
    q, k, v, start, limit, tree = tree_case(rows=rows)
    k.nan_to_num_(), v.nan_to_num_()
    limit[0, 1] = -1
    found = ops_dspine.verify_attention(q, k, v, start, limit, tree=tree, **options)
    expected = reference(q, k, v, start, limit, tree=tree, **options)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 2.0, "scale": 0.3}], ids=str)
def test_the_eager_operation_is_the_same_function(options):
    q, k, v, start, limit = case()
    k.nan_to_num_(), v.nan_to_num_()
    limit[0, 1] = -1
    found = ops_dspine.verify_attention(q, k, v, start, limit, **options)
    torch.testing.assert_close(found.double(), reference(q, k, v, start, limit, **options), rtol=0, atol=2e-6)


def test_the_splits_follow_from_shapes_and_never_exceed_the_blocks_of_keys():
    q, k = torch.empty(1, 32, 16, 128, dtype=torch.bfloat16), torch.empty(1, 8, 1024, 128, dtype=torch.bfloat16)
    assert launch_shape(q, k, 0)["splits"] == 16
    assert launch_shape(q, k[:, :, :200], 0)["splits"] == 4
    assert launch_shape(q.expand(64, -1, -1, -1), k.expand(64, -1, -1, -1), 0)["splits"] == 1


@pytest.mark.parametrize("wrong", ["heads", "width", "limit", "dtype"])
def test_inputs_that_do_not_belong_together_are_refused(wrong):
    q, k, v, start, limit = case(heads=4, kv_heads=2)
    if wrong == "heads":
        q = q[:, :3]
    elif wrong == "width":
        q = q[..., :8]
    elif wrong == "limit":
        limit = limit[:, :2]
    else:
        q = q.half()
    with pytest.raises(ValueError, match="expected"):
        verify_attention(q, k, v, start, limit)


@pytest.mark.parametrize("wrong", ["rows", "dtype", "too many"])
def test_trees_that_do_not_belong_to_their_rows_are_refused(wrong):
    *args, tree = tree_case(rows=65 if wrong == "too many" else 4)
    tree = tree[:, :3] if wrong == "rows" else tree.int() if wrong == "dtype" else tree
    with pytest.raises(ValueError, match="expected tree"):
        verify_attention(*args, tree=tree)


@pytest.mark.parametrize("with_tree", [False, True])
def test_the_operation_can_be_traced(with_tree):
    *args, tree = tree_case(rows=2, capacity=40)
    torch.library.opcheck(torch.ops.dspine.verify_attention, (*args, 0.2, 0, 0.0, 2, tree if with_tree else None))
