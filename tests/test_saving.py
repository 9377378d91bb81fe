"""Saving: killed at any step, on a full disk or twice at once, a folder holds one whole drafter or none."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from dspine_hf import DSpineConfig, DSpineDraftModel
from dspine_hf.saving_dspine import replaced_whole, weights_of
from helpers.forked import Kill, finished, forked
from helpers.tiny_files import tiny_chat_target
from helpers.training_runs import fresh_drafter

SINGLE, SHARDS = "5GB", "6KB"


@pytest.fixture(scope="module")
def drafters():
    """Two drafters of one target, with other weights and another block size."""
    target = tiny_chat_target()
    made = [fresh_drafter(target), fresh_drafter(target, block_size=4)]
    for seed, drafter in enumerate(made):
        torch.manual_seed(seed)
        for weight in drafter.parameters():
            weight.data.normal_()
    return made


def held(folder: Path, drafters) -> int | None:
    """Which of the drafters a folder holds, whole; None if it does not load."""
    try:
        found = DSpineDraftModel.from_pretrained(folder)
    except OSError as error:
        assert "config.json" in str(error)
        return None
    for i, drafter in enumerate(drafters):
        if found.config.block_size == drafter.config.block_size:
            torch.testing.assert_close(found.state_dict(), drafter.state_dict(), rtol=0, atol=0)
            return i
    raise AssertionError("a config of neither")


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("before", "after"), [(SINGLE, SINGLE), (SINGLE, SHARDS), (SHARDS, SINGLE)])
def test_killed_before_any_step_of_a_save_the_folder_holds_one_drafter_or_none(before, after, drafters, tmp_path):
    old, new = drafters

    def save(folder):
        new.save_pretrained(folder, max_shard_size=after)

    old.save_pretrained(tmp_path / "measured", max_shard_size=before)
    steps = finished(lambda: save(tmp_path / "measured")).events
    assert steps > 40
    seen = set()
    for step in [*range(1, steps - 30, 5), *range(steps - 30, steps + 1)]:
        folder = tmp_path / f"killed-{step}"
        old.save_pretrained(folder, max_shard_size=before)
        assert forked(lambda folder=folder: save(folder), Kill("event", step)).killed
        seen.add(held(folder, drafters))
        save(folder)
        assert held(folder, drafters) == 1
        assert files(folder) == files(tmp_path / "measured")
    assert seen >= {0, None}


def test_killed_in_a_save_of_new_weights_alone_the_folder_always_holds_a_drafter(drafters, tmp_path):
    """Training saves so: one file changes, and it changes at once."""
    old = drafters[0]
    new = fresh_drafter(tiny_chat_target(), seed=7)
    old.save_pretrained(tmp_path / "measured")
    steps = finished(lambda: new.save_pretrained(tmp_path / "measured")).events
    for step in range(steps - 12, steps + 1):
        folder = tmp_path / f"killed-{step}"
        old.save_pretrained(folder)
        assert forked(lambda folder=folder: new.save_pretrained(folder), Kill("event", step)).killed
        weights = load_file(folder / "model.safetensors")
        assert any(torch.equal(weights["fc.weight"], drafter.fc.weight) for drafter in (old, new))
        DSpineDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("largest", [100, 3000, 20000])
def test_without_room_for_a_file_the_old_drafter_stays_and_the_error_says_so(largest, drafters, tmp_path):
    drafters[0].save_pretrained(tmp_path)
    before = files(tmp_path)
    ended = forked(lambda: drafters[1].save_pretrained(tmp_path), largest=largest)
    assert ended.status == 1
    assert f"OSError: expected to write to '{tmp_path}'" in ended.said and "It holds what it held before" in ended.said
    assert held(tmp_path, drafters) == 0 and files(tmp_path) == before


def test_threads_that_save_to_one_folder_leave_one_whole_drafter(drafters, tmp_path):
    sizes, failures = (SINGLE, SHARDS), []

    def save(i):
        try:
            for _ in range(3):
                drafters[i].save_pretrained(tmp_path, max_shard_size=sizes[i])
        except Exception as error:  # shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=save, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert held(tmp_path, drafters) == ("model.safetensors.index.json" in files(tmp_path))


def test_a_save_in_shards_takes_the_place_of_the_single_file_and_the_other_way_round(drafters, tmp_path):
    """Transformers reads the single file where both are there."""
    (tmp_path / "results.json").write_text("{}")
    for i, size in ((0, SINGLE), (1, SHARDS), (0, SINGLE)):
        drafters[i].save_pretrained(tmp_path, max_shard_size=size)
        assert held(tmp_path, drafters) == i
        assert ("model.safetensors" in files(tmp_path)) == (size == SINGLE)
    assert (tmp_path / "results.json").exists()


def test_weights_of_another_variant_stay(drafters, tmp_path):
    drafters[0].save_pretrained(tmp_path, variant="fp16")
    drafters[0].save_pretrained(tmp_path)
    assert {"model.safetensors", "model.fp16.safetensors"} <= files(tmp_path)
    assert weights_of("fp16")("model.fp16-00001-of-00002.safetensors") and not weights_of(None)(
        "model.fp16.safetensors"
    )


def test_a_folder_without_config_is_no_drafter_of_the_default_shapes(drafters, tmp_path):
    drafters[0].save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    for load in (DSpineDraftModel.from_pretrained, DSpineConfig.from_pretrained):
        with pytest.raises(OSError, match="expected a drafter's config.json.*save the drafter again"):
            load(tmp_path)
    for load in (AutoModel.from_pretrained, AutoConfig.from_pretrained):
        with pytest.raises((OSError, ValueError), match="config.json"):
            load(tmp_path)


def test_what_a_failed_writer_began_is_gone(tmp_path):
    (tmp_path / "key").write_text("old")
    with pytest.raises(KeyError), replaced_whole(tmp_path, "key", lambda name: False) as staging:
        (staging / "key").write_text("new")
        raise KeyError
    assert files(tmp_path) == {"key"} and (tmp_path / "key").read_text() == "old"
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
