"""Columns of all layers moved in one launch: what `StaticRows.move` does layer by layer."""

import copy

import pytest
import torch

from dspine_hf import kernels
from dspine_hf.ops_dspine import EAGER, FusedOps, fused_ops
from dspine_hf.static_cache import Places, RaggedCache
from helpers.borders import bordered

DEVICE = "cuda" if torch.cuda.is_available() and kernels.available("cuda") else "cpu"
if not kernels.available(DEVICE):
    pytest.skip(kernels.why_not(DEVICE), allow_module_level=True)

from dspine_hf.kernels.columns import addresses, move_columns  # noqa: E402


def drawn(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [bordered(torch.randn(*shape, generator=generator).to(DEVICE, dtype)).contiguous() for shape in shapes]


def branch(batch, capacity, n, seed=0):
    """Columns behind an anchor that a branch of a tree leaves: sources rise, and none lies before its target."""
    generator = torch.Generator().manual_seed(seed)
    anchor = torch.randint(0, capacity - 2 * n, (batch, 1), generator=generator)
    steps = torch.rand(batch, 2 * n - 1, generator=generator).argsort(-1)[:, : n - 1].sort(-1).values
    source = torch.cat([anchor, anchor + 1 + steps], dim=1)
    return source.to(DEVICE), (anchor + torch.arange(n)).to(DEVICE)


def expected(store, source, target):
    found = store.clone()
    for row, (read, written) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        found[row, :, written] = store[row][:, read]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("layers", "batch", "heads", "capacity", "width", "n"),
    [(1, 1, 1, 9, 1, 1), (3, 2, 3, 40, 16, 8), (2, 5, 2, 33, 24, 5), (4, 1, 8, 140, 64, 64)],
)
def test_columns_are_moved(layers, batch, heads, capacity, width, n, dtype):
    stores = drawn([(batch, heads, capacity, width)] * layers, dtype)
    source, target = branch(batch, capacity, n)
    wanted = [expected(store.view(torch.uint8), source, target) for store in stores]
    move_columns(stores, addresses(stores), source, target)
    for store, one in zip(stores, wanted, strict=True):
        assert store.view(torch.uint8).equal(one)


def test_all_is_read_before_anything_is_written():
    stores = drawn([(1, 2, 12, 16)])
    source, target = torch.tensor([[3, 4, 5, 2]]), torch.tensor([[2, 3, 4, 5]])  # round in a circle
    wanted = expected(stores[0], source, target)
    move_columns(stores, addresses(stores), source.to(DEVICE), target.to(DEVICE))
    assert stores[0].equal(wanted)


def filled(shapes):
    cache = RaggedCache(len(shapes), 24)
    for layer, (heads, width) in zip(cache.layers, shapes, strict=True):
        keys, values = (part.cpu().to(DEVICE) for part in drawn([(2, heads, 20, width)] * 2, seed=width))
        cache.places = Places(torch.arange(20, device=DEVICE).expand(2, -1), 20, 0)
        layer.update(keys, values)
    return cache


@pytest.mark.parametrize("shapes", [[(2, 16)] * 3, [(2, 16), (1, 32), (2, 16)]])
def test_a_cache_moves_them_as_it_does_layer_by_layer(shapes):
    eager, fused = filled(shapes), filled(shapes)
    ops, launches = fused_ops(DEVICE, torch.float32, 16, 4), []
    assert isinstance(ops, FusedOps)
    counted = FusedOps(
        grow_tree=ops.grow_tree,
        follow_tree=ops.follow_tree,
        move_columns=lambda stores, *rest: launches.append(len(stores)) or ops.move_columns(stores, *rest),
        addresses=ops.addresses,
    )
    source, target = branch(2, 20, 4)
    for cache, own in ((eager, EAGER), (fused, counted)):
        for _ in range(2):
            cache.move(source, Places(target, 20), own)
    assert sorted(launches) == sorted(2 * [2 * n for n in ([3] if len(set(shapes)) == 1 else [2, 1])])
    for one, other in zip(eager.layers, fused.layers, strict=True):
        assert one.rows.keys.equal(other.rows.keys) and one.rows.values.equal(other.rows.values)


def test_a_copy_of_a_cache_moves_its_own_columns():
    one, ops, (source, target) = filled([(2, 16)] * 2), fused_ops(DEVICE, torch.float32, 16, 4), branch(2, 20, 4)
    one.move(target, Places(target, 20), ops)  # nothing, but it knows where its stores lie
    other = copy.deepcopy(one)
    kept = [layer.rows.keys.clone() for layer in one.layers]
    other.move(source, Places(target, 20), ops)
    for layer, copied, before in zip(one.layers, other.layers, kept, strict=True):
        assert layer.rows.keys.equal(before) and copied.rows.keys.equal(expected(before, source, target))


def test_what_does_not_belong_together_is_refused():
    stores, (source, target) = drawn([(2, 3, 40, 16)] * 2), branch(2, 40, 4)
    where = addresses(stores)
    with pytest.raises(ValueError, match="contiguous stores of one dtype"):
        move_columns([stores[0], stores[1].half()], where, source, target)
    with pytest.raises(ValueError, match="contiguous stores of one dtype"):
        move_columns([stores[0].transpose(1, 2)], where[:1], source, target)
    with pytest.raises(ValueError, match="expected target"):
        move_columns(stores, where, source, target[:, :-1])
    with pytest.raises(ValueError, match="expected source"):
        move_columns(stores, where, source.int(), target)
    with pytest.raises(ValueError, match="addresses of 2 stores"):
        move_columns(stores, where[:1], source, target)
    with pytest.raises(ValueError, match="at most 64"):
        move_columns(stores, where, *(t[:, :1].repeat(1, 65) for t in (source, target)))


def test_nothing_to_move_is_fine():
    stores = drawn([(0, 3, 40, 16)])
    move_columns(stores, addresses(stores), *(torch.zeros(0, 4, dtype=torch.long, device=DEVICE),) * 2)


def test_the_operation_is_what_torch_expects():
    stores, (source, target) = drawn([(2, 3, 40, 16)] * 2), branch(2, 40, 4)
    torch.library.opcheck(kernels._ops.ops.move_columns, (stores, addresses(stores), source, target))
