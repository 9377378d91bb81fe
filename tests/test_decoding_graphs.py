"""Graphs: a recorder of the test stands in for CUDA, replays on tensors that stay, and fails where a graph would."""

import functools
import gc
import warnings
import weakref
from dataclasses import replace

import pytest
import torch

import dspine_hf
from dspine_hf import decoding, fast_call, graphs
from dspine_hf.fast_call import Options
from dspine_hf.fast_tree import Tree
from dspine_hf.fast_walk import Chain
from dspine_hf.graphs import Recording, column_bucket, draft_lengths, signature
from dspine_hf.ops_dspine import EAGER
from dspine_hf.static_cache import Places, RaggedCache
from helpers.batch_oracle import batch_oracle, padded
from helpers.oracle import prompt, small_target


class Recorder:
    """Records like CUDA: runs to warm up, keeps the tensors of the capture, and a replay may write over others."""

    def __init__(self):
        self.recorded = 0
        self.results = []

    def __call__(self, run, pool):
        self.recorded += 1
        for _ in range(graphs.WARM_UPS):
            run()
        result = run()
        self.results.append(result)

        def replay():
            copy_into(result, run())
            for other in self.results:
                if isinstance(other, torch.Tensor) and other is not result:
                    other.fill_(3)  # graphs share memory

        return Recording(replay, result)


def copy_into(kept, fresh):
    if isinstance(kept, torch.Tensor):
        kept.copy_(fresh)
    elif isinstance(kept, (Chain, Tree)):
        for name, value in vars(kept).items():
            copy_into(value, getattr(fresh, name))


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setattr(decoding, "Options", functools.partial(Options, recorder=found))
    yield found


@pytest.fixture
def case():
    target = small_target(seed=2)
    texts = [prompt(7, seed=20), prompt(2, seed=21)]
    references = [target.generate(text, max_new_tokens=40)[0] for text in texts]
    return target, batch_oracle(target, references), texts, references


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.3}, {"eos_token_id": [5, 9], "pad_token_id": 0}], ids=str
)
def test_text_is_plain_text_and_later_calls_replay_what_the_first_recorded(case, recorder, adaptive, options):
    target, drafter, texts, _ = case
    ids, mask = padded(texts)
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, **options}
    plain = target.generate(ids, **options)
    assert torch.equal(dspine_hf.generate(target, drafter, ids, adaptive=adaptive, **options), plain)
    first = recorder.recorded
    assert first and (drafter.generation_stats.accepted > 5 or adaptive)
    recorded = len(next(iter(graphs._KEPT[target].values())).recordings)
    assert recorded == first
    ids, options["attention_mask"] = ids[:, 1:], mask[:, 1:]
    assert torch.equal(
        dspine_hf.generate(target, drafter, ids, adaptive=adaptive, **options), target.generate(ids, **options)
    )
    assert len(graphs._KEPT[target]) == 1  # another prompt, the same state and graphs
    assert recorder.recorded <= 5  # the draft, and passes of 1, 2, 4 and 6 rows


def test_a_tree_is_recorded_like_a_chain_and_apart_from_it(case, recorder):
    target, drafter, texts, _ = case
    ids, mask = padded(texts)
    options = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    plain = target.generate(ids, **options)
    for nodes, graphs_so_far in ((9, 2), (9, 2), (5, 4), (None, 6)):
        assert torch.equal(dspine_hf.generate(target, drafter, ids, tree_nodes=nodes, **options), plain)
        assert recorder.recorded <= graphs_so_far


def test_a_shorter_text_takes_the_larger_caches_that_are_there(case, recorder):
    target, drafter, texts, references = case
    bytes_kept = []
    for tokens in (270, 40, 12):
        out = dspine_hf.generate(target, drafter, texts[0], max_length=texts[0].shape[1] + tokens, eos_token_id=None)
        assert torch.equal(out[0, : len(references[0])], references[0][: out.shape[1]])
        bytes_kept.append(graphs.cache_bytes(target))
    assert bytes_kept[0] == bytes_kept[1] == bytes_kept[2] > 0


def test_with_fused_attention_one_graph_serves_every_length(case, recorder, monkeypatch):
    target, _, texts, references = case
    fused = replace(EAGER, verify_attention=lambda *args, **options: EAGER.verify_attention(*args, **options))
    monkeypatch.setattr(fast_call, "fused_ops", lambda *args: fused)
    options = {"max_new_tokens": 540, "eos_token_id": None, "fused_attention": True}
    out = dspine_hf.generate(target, None, texts[0], **options)
    assert torch.equal(out[0, : len(references[0])], references[0])
    assert recorder.recorded == 1


def test_what_is_recorded_belongs_to_one_pair_of_models_and_one_setting(case, recorder):
    target, drafter, texts, _ = case
    ids, options = texts[0], {"max_new_tokens": 12, "do_sample": True}
    counts = []
    for setting in ({"temperature": 0.5}, {"temperature": 0.5}, {"temperature": 0.6}):
        dspine_hf.generate(target, drafter, ids, **options, **setting)
        counts.append(recorder.recorded)
    assert counts[0] == counts[1] < counts[2]
    dspine_hf.generate(target, None, ids, **options, temperature=0.5)
    assert recorder.recorded > counts[2]


def test_moved_weights_are_noticed(case, recorder):
    target, drafter, texts, references = case
    dspine_hf.generate(target, drafter, texts[0], max_new_tokens=12)
    before = recorder.recorded
    layer = target.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    out = dspine_hf.generate(target, drafter, texts[0], max_new_tokens=12)
    assert recorder.recorded > before
    assert torch.equal(out[0], references[0][:19])


def test_graphs_do_not_keep_models_alive_and_can_be_released(case, recorder):
    target, drafter, texts, _ = case
    dspine_hf.generate(target, drafter, texts[0], max_new_tokens=12)
    assert graphs._KEPT[target]
    graphs.release(target)
    assert target not in graphs._KEPT
    dspine_hf.generate(target, drafter, texts[0], max_new_tokens=12)
    count = len(graphs._KEPT)
    del target, drafter, case
    recorder.__init__()
    gc.collect()
    assert len(graphs._KEPT) <= count


def test_processors_that_read_the_text_run_without_graphs(case, recorder):
    target, drafter, texts, _ = case
    options = {"max_new_tokens": 12, "no_repeat_ngram_size": 2}
    assert torch.equal(dspine_hf.generate(target, drafter, texts[0], **options), target.generate(texts[0], **options))
    assert not recorder.recorded


def test_a_target_that_cannot_be_captured_runs_without(case, monkeypatch):
    def failing(run, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    target, drafter, texts, references = case
    monkeypatch.setattr(decoding, "Options", functools.partial(Options, recorder=failing))
    with pytest.warns(UserWarning, match="not permitted"):
        out = dspine_hf.generate(target, drafter, texts[0], max_new_tokens=12)
    assert torch.equal(out[0], references[0][:19])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dspine_hf.generate(target, drafter, texts[0], max_new_tokens=12)
    with pytest.raises(RuntimeError, match="not permitted"):
        dspine_hf.generate(target, drafter, texts[0], max_new_tokens=12, use_graphs=True)


def test_graphs_are_asked_for_where_there_are_none(case):
    target, drafter, texts, _ = case
    with pytest.raises(ValueError, match="use_graphs"):
        dspine_hf.generate(target, drafter, texts[0], max_new_tokens=12, use_graphs=True)


def test_lengths_buckets_and_signatures():
    assert draft_lengths(7) == [1, 3, 7] and draft_lengths(15) == [1, 3, 7, 15] and draft_lengths(5) == [1, 3, 5]
    assert draft_lengths(0) == [] and draft_lengths(1) == [1]
    assert [column_bucket(used, 3000) for used in (1, 512, 513, 2000, 2999)] == [512, 512, 1024, 2048, 3000]
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    assert signature([TemperatureLogitsWarper(0.7)]) != signature([TemperatureLogitsWarper(0.8)])
    warper = TopPLogitsWarper(0.9)
    warper.top_p = torch.tensor(0.9)
    assert signature([warper]) is None


def test_a_cache_that_nothing_holds_gives_its_memory_back_at_once():
    cache = RaggedCache(2, 16)
    cache.places = Places(torch.arange(3).unsqueeze(0), 3, 0)
    for layer in cache.layers:
        layer.update(*torch.ones(2, 1, 2, 3, 8).unbind())
    cache.move(torch.zeros(1, 1, dtype=torch.long), Places(torch.ones(1, 1, dtype=torch.long), 3))
    rows = [weakref.ref(layer.rows) for layer in cache.layers]
    gc.disable()  # cycles would only be found by chance
    try:
        del cache, layer
        assert [ref() for ref in rows] == [None, None]
    finally:
        gc.enable()
