"""The analysis of a drafter counts what plain loops over its passes count, and agrees with the evaluation."""

import json

import pytest
import torch
import torch.nn.functional as F

from dspine_hf import DSpineDraftModel
from dspine_hf.analysis import DEPTHS, DrafterAnalysis, forced_slots, true_ranks
from dspine_hf.analysis_tables import analysis_tables
from dspine_hf.baselines import BASELINES
from dspine_hf.blocks import cut_blocks, run_blocks
from dspine_hf.evaluation import Evaluator
from dspine_hf.offline import offline_drafts
from dspine_hf.plots import plot_analysis
from helpers.training_runs import SHAPES, trained_pair

TEXTS = range(6, 10)  # two that the drafter was trained on, two that it was not


@pytest.fixture(scope="module")
def analysed():
    target, drafter, prompts, texts = trained_pair()
    analysis = DrafterAnalysis(drafter, target, chunk=7)
    for i in TEXTS:
        analysis.add(prompts[i], texts[i])
    return analysis


@pytest.fixture(scope="module")
def one():
    """(analysis without counts, features, blocks) of one text."""
    target, drafter, prompts, texts = trained_pair()
    analysis = DrafterAnalysis(drafter, target)
    tokens = torch.tensor([*prompts[0], *texts[0]])
    lengths = [torch.tensor([n]) for n in (len(prompts[0]), len(tokens))]
    anchors = torch.arange(len(prompts[0]), len(tokens) - 1)[None]
    return analysis, analysis.reader(tokens[None])[0], cut_blocks(tokens[None], *lengths, anchors, 5)


def shares(hits, blocks):
    return [round(x, 4) for x in ((hits & blocks.valid[0]).sum(0) / blocks.valid[0].sum(0)).tolist()]


def test_a_rank_is_the_place_in_the_sorted_order_and_ties_go_to_the_lower_id():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (40, 11), generator=generator).float()
    truth = torch.randint(0, 11, (40,), generator=generator)
    places = [
        sorted(range(11), key=lambda v, row=row: (-row[v], v)).index(t)
        for row, t in zip(scores.tolist(), truth.tolist(), strict=True)
    ]
    assert true_ranks(lambda rows: rows, scores, truth, 2**24).tolist() == places


def test_the_true_token_is_nearest_where_its_cosine_with_z_is_the_largest(one):
    analysis, features, blocks = one
    drafter, view = analysis.drafter, analysis.view
    out = run_blocks(drafter, view, features, blocks.anchors, blocks.predecessors[..., 0])
    counted = DrafterAnalysis(drafter, analysis.reader.target)
    counted._messages(features, blocks)
    vocabulary = view.phi(torch.arange(drafter.config.vocab_size))
    found = counted.result()["nearest"]
    for layer, z in enumerate(out.features):
        cosines = F.cosine_similarity(z[0].unsqueeze(-2), vocabulary, dim=-1)  # [blocks, slots, V]
        own = cosines.gather(-1, blocks.labels[0].unsqueeze(-1))
        for depth in DEPTHS:
            assert found[str(depth)][layer] == shares((cosines > own).sum(-1) < depth, blocks)


@pytest.mark.parametrize("kind", ["only", "prefix", "whole_block"])
@pytest.mark.parametrize("layers", [[0], [1], [0, 1]])
def test_forced_ranks_are_those_of_one_pass_per_slot(one, kind, layers):
    analysis, features, blocks = one
    drafter, view, slots = analysis.drafter, analysis.view, blocks.labels.shape[-1]
    told = {"only": lambda t: [t], "prefix": lambda t: range(t + 1), "whole_block": lambda t: range(slots)}[kind]
    found = analysis.forced_ranks(features, blocks, forced_slots(kind, slots, torch.device("cpu")), layers)
    for t in range(slots):
        messages = torch.full((*blocks.labels.shape, drafter.config.transfer_rank), float("nan"))
        for s in told(t):
            messages[:, :, s] = view.phi(blocks.predecessors[:, :, s])
        forced = [messages if i in layers else None for i in range(2)]
        out = run_blocks(drafter, view, features, blocks.anchors, blocks.predecessors[..., 0], forced)
        logits = view.logits(drafter.norm(out.hidden[0, :, 1 + t]))
        own = logits.gather(-1, blocks.labels[0, :, t : t + 1])
        assert found[:, t].tolist() == (logits > own).sum(-1).tolist()


def test_messages_change_slots_after_the_first_only_when_true_ones_differ(one):
    analysis, features, blocks = one
    none = analysis.forced_ranks(features, blocks, torch.zeros(4, 4, dtype=torch.bool), [0, 1])
    first = forced_slots("only", 4, torch.device("cpu"))
    told = analysis.forced_ranks(features, blocks, first, [0, 1])
    assert torch.equal(none[:, 0], told[:, 0])
    assert not torch.equal(none[:, 1:], told[:, 1:])


def test_its_figures_are_those_of_the_evaluation(analysed):
    target, drafter, prompts, texts = trained_pair()
    evaluator = Evaluator(target, drafter)
    rows = [evaluator.offline(prompts[i], texts[i]) for i in TEXTS]
    result = analysed.result()
    tokens, rounds = sum(r["new_tokens"] - 1 for r in rows), sum(r["rounds"] for r in rows)
    assert result["acceptance_length"] == round(tokens / rounds, 4)
    hits, trials = (torch.tensor([r[n] for r in rows]).sum(0) for n in ("forced_hits", "forced_trials"))
    assert result["conditional"]["1"] == [round(x, 4) for x in (hits / trials).tolist()]
    assert result["trials"]["covered"] == trials.tolist()


def test_survivors_are_accepted_where_covered_and_chosen(analysed):
    result, shares = analysed.result(), analysed.shares
    assert result["accepted_of_survivors"][0] == result["unary"]["1"][0]
    assert result["covered"] == result["unary"]["4"]  # K = 4
    accepted, alive = shares.hits["accepted_of_survivors"], shares.trials["accepted_of_survivors"]
    counts = torch.zeros(2, 4, dtype=torch.long)
    target, drafter, prompts, texts = trained_pair()
    for i in TEXTS:
        tokens = torch.tensor([*prompts[i], *texts[i]])
        drafts = offline_drafts(drafter, analysed.view, analysed.reader(tokens[None])[0], tokens, len(prompts[i]))
        for start, draft in enumerate(drafts.tolist()):
            for slot, (token, truth) in enumerate(zip(draft, texts[i][start + 1 :], strict=False)):
                counts[:, slot] += torch.tensor([1, token == truth])
                if token != truth:
                    break
    assert torch.equal(counts, torch.stack([alive, accepted]))
    assert torch.equal(shares.hits["covered_of_survivors"], shares.trials["chosen_of_covered_survivors"])
    assert torch.equal(shares.hits["chosen_of_covered_survivors"], accepted)
    assert 0 < int(accepted.sum()) < int(alive.sum())


def test_fewer_anchors_leave_coverage_whole():
    target, drafter, prompts, texts = trained_pair()
    analysis = DrafterAnalysis(drafter, target, anchors=5)
    analysis.add(prompts[0], texts[0])
    assert analysis.shares.trials["forced none@1"][0] == 5
    assert analysis.shares.trials["covered"][0] == len(texts[0]) - 1


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_with_a_pass_of_its_own_is_refused(name):
    target = trained_pair()[0]
    with pytest.raises(ValueError, match="a pass of its own"):
        DrafterAnalysis(BASELINES[name](target, None), target)


@pytest.mark.parametrize("injection", ["all", "last", "none"])
def test_every_kind_of_drafter_is_measured_and_drawn(injection, tmp_path):
    target, _, prompts, texts = trained_pair()
    selection = "independent" if injection == "none" else "transition"
    torch.manual_seed(0)
    drafter = DSpineDraftModel.for_target(target, **SHAPES, injection=injection, selection=selection).eval()
    analysis = DrafterAnalysis(drafter, target, anchors=6)
    for i in range(2):
        analysis.add(prompts[i], texts[i])
    result = json.loads(json.dumps(analysis.result()))
    assert result["layers"] == {"all": [0, 1], "last": [1], "none": []}[injection]
    assert ("conditional" in result) == (injection != "none")
    drawn = {path.name for path in plot_analysis(result, tmp_path) if path.read_bytes().startswith(b"\x89PNG")}
    assert drawn == {"coverage.png", "survivors.png"} | (
        {"nearest.png", "messages.png"} if result["layers"] else set()
    )


def test_the_tables_show_every_layer_and_slot(analysed):
    tables = list(analysis_tables(analysed.result()))
    assert [table.row_count for table in tables] == [10] + 2 * [2, 3, 3, 3]
    assert all(len(table.columns) == 1 + 4 for table in tables)
