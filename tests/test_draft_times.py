"""The benchmark of drafts: every kind drafts what its definition says, and costs and gains are what they claim."""

import json
import sys
from pathlib import Path

import pytest
import torch

from drafter_cases import redraw
from dspine_hf import kernels
from dspine_hf.offline import draft_rows
from dspine_hf.ops_dspine import EAGER

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ALL = {"dflash", "dspine-m0", "dspine-m4", "dspine-m4-chain1", "dspark", "dflash2", "eagle3"}


@pytest.fixture(scope="module")
def cases():
    sys.path.insert(0, str(EXAMPLES))
    import draft_cases

    yield draft_cases
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def times(cases):
    import draft_times

    return draft_times


def drafter_of(cases, name, seed=0):
    """A scene of one layer shape, and a drafter of a kind whose weights all count."""
    scene = cases.set_scene(None, "tiny", 20 + seed, 6, 4)
    torch.manual_seed(seed)
    drafter = redraw(cases.build(cases.KINDS[name], scene), seed)
    scene.features, scene.tokens = torch.randn_like(scene.features), torch.randint_like(scene.tokens, 256)
    return scene, drafter


@pytest.mark.parametrize("name", sorted(ALL))
@torch.no_grad()
def test_a_timed_draft_is_the_draft_of_the_definition_however_often_it_runs(cases, name):
    different = set()
    for seed in range(4):
        scene, drafter = drafter_of(cases, name, seed)
        view, anchor = drafter.bind_target(scene.target), torch.tensor([[scene.context]])
        wanted = draft_rows(drafter, view, scene.features, anchor, scene.tokens[:, -1:], scene.tokens)[0]
        draft = cases.KINDS[name].draft(drafter, scene)
        assert torch.equal(draft(), wanted) and torch.equal(draft(), wanted)
        different.add(tuple(wanted[0].tolist()))
    assert len(different) == 4


@torch.no_grad()
def test_the_stepwise_draft_of_eagle_is_its_unroll(cases):
    for seed in range(4):
        scene, drafter = drafter_of(cases, "eagle3", seed)
        anchor, view = torch.tensor([[scene.context]]), drafter.bind_target(scene.target)
        _, chosen = drafter.unroll(view, scene.features, scene.tokens, anchor)
        assert torch.equal(cases.KINDS["eagle3"].draft(drafter, scene)(), chosen[0])


@pytest.mark.skipif(not kernels.available("cpu"), reason=str(kernels.why_not("cpu")))
@pytest.mark.parametrize("name", ["dflash", "dspine-m0", "dspine-m4", "dspine-m4-chain1"])
@torch.no_grad()
def test_fused_kernels_draft_the_same(cases, name):
    scene, drafter = drafter_of(cases, name)
    eager = cases.KINDS[name].draft(drafter, scene)()
    drafter.config.use_fused_kernels = True
    assert cases.KINDS[name].fused and drafter.ops is not EAGER
    assert torch.equal(cases.KINDS[name].draft(drafter, scene)(), eager)


@torch.no_grad()
def test_the_bytes_of_weights_are_counted_once_per_pass_over_them(cases, times):
    read = {}
    for name in ("eagle3", "dflash"):
        scene, drafter = drafter_of(cases, name)
        read[name], mlps = times.work(drafter, cases.KINDS[name].draft(drafter, scene), scene.target)
        layers = sum(p.nbytes for part in (drafter.layers, drafter.norm) for p in part.parameters())
        once = layers + scene.target.head.weight.nbytes
        passes, rows = (5, 5) if name == "eagle3" else (1, 1)
        small = drafter.rotary_emb.inv_freq.nbytes * 4 + rows * 64 * 4  # the frequencies, and embeddings looked up
        phi = 0 if name == "eagle3" else sum(t.nbytes for t in drafter.transfer.buffers()) + 64 * 4
        assert passes * once <= read[name] <= passes * once + small + phi
        assert mlps == 5


@pytest.fixture(scope="module")
def found(times, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    records = {
        "ours": {"kind": "dspine", "config": {"block_size": 8, "injection_placement": "mlp", "rewrite_layers": 4}},
        "flash": {"kind": "dspine", "config": {"block_size": 8, "injection": "none", "selection": "independent"}},
        "wide": {"kind": "dflash2", "config": {"block_size": 16}},
        "deep": {"kind": "dflash2", "config": {"block_size": 8, "num_hidden_layers": 6}},
        "bound": {"kind": "dflash2", "config": {"block_size": 8}, "oracle": True},
    }
    for length, (name, variant) in enumerate(records.items(), start=2):
        record = {"variant": variant, "offline": {"0": {"mean_acceptance_length": length}}}
        (folder / f"{name}.json").write_text(json.dumps(record))
    out, results = folder / "drafts.json", [str(folder / f"{name}.json") for name in records]
    command = ["--tiny", "--out", str(out), "--plain", "6", "--verify", "8", "--acceptance", "eagle3=2.5"]
    times.main([*command, "--results", *results])
    return json.loads(out.read_text())


def test_every_kind_is_timed_beside_its_floor_and_its_steps(found):
    rows = {row["drafter"]: row for row in found["drafts"]}
    assert set(rows) == ALL and len(found["drafts"]) == len(ALL)
    for row in rows.values():
        assert set(row) == {"drafter", "way", "ms", "MB", "floor ms", "steps", "MLPs"}
        assert row["ms"] > 0 and row["floor ms"] == pytest.approx(row["MB"] * 1e9 / found["bandwidth"])
    assert {name: row["MLPs"] for name, row in rows.items()} == {
        "dflash": 5, "dspine-m0": 6, "dspine-m4": 10, "dspine-m4-chain1": 15, "dspark": 5, "dflash2": 5, "eagle3": 7
    }  # fmt: skip
    assert [rows[name]["steps"] for name in ("dflash", "dspine-m4", "dspine-m4-chain1", "eagle3")] == [1, 2, 3, 7]
    order = ("dflash", "dspine-m0", "dspine-m4", "dspine-m4-chain1")
    assert sorted(order, key=lambda name: rows[name]["MB"]) == list(order)


def test_expected_speed_ups_follow_from_lengths_and_times(found):
    drafts = {row["drafter"]: row["ms"] for row in found["drafts"]}
    kinds = {row["source"]: (row["drafter"], row["length"]) for row in found["speeds"]}
    assert kinds == {"ours": ("dspine-m4", 2), "flash": ("dflash", 3), "eagle3=2.5": ("eagle3", 2.5)}
    for row in found["speeds"]:
        assert row["speed-up"] == pytest.approx(row["length"] * 6 / (8 + drafts[row["drafter"]]))
    gains = [row["speed-up"] for row in found["speeds"]]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_variant_of_every_timed_config_is_known_as_its_kind(cases, times, name):
    own = name if name in ("dspark", "dflash2", "eagle3") else "dspine"
    config = {k: v for k, v in cases.KINDS[name].config.items() if k != "num_hidden_layers"}
    assert times.kind_of({"kind": own, "config": config}) == name


def test_a_draft_that_could_not_be_timed_has_no_speed_up(times):
    rows = [{"drafter": "dflash", "way": "graph", "ms": None}, {"drafter": "dflash", "way": "fused graph", "ms": 2.0}]
    assert times.speeds([("here", "dflash", 3.0)], rows, 5.0, 8.0) == [
        {"source": "here", "drafter": "dflash", "way": "fused graph", "length": 3.0, "speed-up": 1.5}
    ]


@pytest.mark.parametrize("extra", [["--plain", "6"], ["--acceptance", "dflash=2"], ["--plain", "6", "--verify", "7"]])
def test_half_of_what_a_speed_up_takes_is_refused(times, extra, capsys):
    with pytest.raises(SystemExit):
        times.main(["--tiny", *extra])
    assert "--plain and --verify together" in capsys.readouterr().err


def test_an_unknown_kind_is_refused_with_the_known_ones(times):
    with pytest.raises(SystemExit, match="dspine-m4-chain1.*found 'medusa=2'"):
        times.main(["--tiny", "--plain", "6", "--verify", "7", "--acceptance", "medusa=2"])
