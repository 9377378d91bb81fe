"""Names of models that are not here: said at once, in one line, and what is kept loads without the Hub."""

import pytest
import torch
import transformers.utils.hub
from huggingface_hub import HfApi, constants

from dspine_hf import DSpineDraftModel, loading
from dspine_hf.cli import main
from helpers.hub_server import HubServer
from helpers.tiny_files import save_tiny_target, tiny_chat_target, write_jsonl
from helpers.tiny_pair import tiny_drafter

TARGET, DRAFTER = "org/tiny", "org/tiny-drafter"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub without models, and a cache of its own; nobody may wait."""
    server = HubServer()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    for name, value in {
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(loading, "_FOUND", set())
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # keeps the endpoint that it met first
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("something waits to try again"))
    yield server
    server.close()


@pytest.fixture
def filled(hub, tmp_path):
    """And the same with a tiny target and its drafter."""
    save_tiny_target(tmp_path / "target")
    tiny_drafter(tiny_chat_target()).save_pretrained(tmp_path / "drafter")
    hub.add_folder(TARGET, tmp_path / "target")
    hub.add_folder(DRAFTER, tmp_path / "drafter")
    return hub


@pytest.fixture
def commands(tmp_path):
    """Every command with a name that nobody has: (words, the name, what it should have been)."""
    target, drafter = (tmp_path / name for name in ("here", "drafter-here"))
    save_tiny_target(target)
    tiny_drafter(tiny_chat_target()).save_pretrained(drafter)
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "w1", "turns": ["w1"]}])
    generate = ["generate", "--prompt", "w1", "--device", "cpu"]
    measured = ["eval", "--prompts", rows, "--target", target, "--output-dir", tmp_path / "eval"]
    trained = ["train", "--data", rows, "--output-dir", tmp_path / "train", "--use-cpu"]
    found = [
        ([*generate, "--target", "nosuch", "--drafter", drafter], "nosuch", "the target"),
        ([*generate, "--target", target, "--drafter", "org/nosuch"], "org/nosuch", "the drafter"),
        ([*measured, "--drafter", "nodrafter"], "nodrafter", "the drafter"),
        ([*trained, "--target", "nosuch"], "nosuch", "the target"),
        ([*trained, "--target", target, "--drafter", "nodrafter"], "nodrafter", "the drafter"),
        (["export", "nodir", tmp_path / "out"], "nodir", "the drafter"),
        (["convert", "nodir", tmp_path / "out"], "nodir", "the checkpoint"),
        (["convert", drafter, tmp_path / "out", "--target", "nosuch"], "nosuch", "the target"),
    ]
    return [([str(word) for word in words], name, what) for words, name, what in found]


def refused(words, capsys):
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return line


def test_a_name_that_the_hub_has_not_is_asked_for_once(hub, commands, capsys):
    for words, name, what in commands:
        hub.log.clear()
        line = refused(words, capsys)
        assert f"expected {what} (" in line and f"found '{name}': no such folder here" in line, line
        assert "the Hub has no model of this name" in line and "Check the spelling" in line
        assert hub.log == [f"GET /api/models/{name}"], words


def test_a_hub_out_of_reach_is_tried_once(hub, commands, capsys):
    for words, name, what in commands:
        hub.cut_after = 0
        line = refused(words, capsys)
        assert f"expected {what} (" in line and f"found '{name}': no such folder here" in line, line
        assert "the Hub cannot be reached" in line and "Check the spelling" in line
        assert hub.cut_after == -1, words


def test_offline_mode_asks_nobody(hub, commands, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for words, name, what in commands:
        line = refused(words, capsys)
        assert f"expected {what} (" in line and f"found '{name}'" in line and "HF_HUB_OFFLINE is set" in line, line
    assert not hub.log


@pytest.mark.parametrize("source", ["./nothing", "/nothing/here", "~/nothing", "a/b/c", "two words"])
def test_what_is_no_hub_name_is_not_asked_for(source, hub, tmp_path, capsys):
    for command in ("export", "convert"):
        assert f"found '{source}': no such folder here" in refused([command, source, str(tmp_path / "out")], capsys)
    assert not hub.log


def loaded():
    target, tokenizer = loading.load_target(TARGET, torch.float32)
    return target, tokenizer, loading.load_drafter(DRAFTER, target)


@pytest.mark.parametrize("reach", ["cut", "refused", "offline mode", "gone"])
def test_what_was_loaded_once_loads_without_the_hub(filled, monkeypatch, reach, tmp_path, capfd):
    loaded()
    loading._FOUND.clear()
    filled.log.clear()
    capfd.readouterr()
    if reach == "cut":
        filled.cut_after = 0
    elif reach == "refused":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    elif reach == "offline mode":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        filled.repositories.clear()
    target, tokenizer, drafter = loaded()
    assert tokenizer("w1 w2")["input_ids"] and isinstance(drafter, DSpineDraftModel)
    for name, tensor in tiny_chat_target().state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name
    folder = loading.checkpoint_folder(DRAFTER)
    assert {file.suffix for file in folder.iterdir()} >= {".json", ".safetensors"}
    assert constants.HF_HUB_OFFLINE is (reach == "offline mode")
    assert len(filled.log) == (4 if reach == "gone" else 0)  # once for each time that something is loaded
    if reach == "cut":
        assert filled.cut_after == -4
    assert "retry" not in capfd.readouterr().err.lower()


def test_a_name_that_is_found_is_not_asked_for_again(filled, monkeypatch):
    asked, genuine = [], HfApi.model_info

    class Api(HfApi):
        def model_info(self, name, **options):
            asked.append(name)
            return genuine(self, name, **options)

    monkeypatch.setattr(loading, "HfApi", Api)
    loaded()
    loaded()
    assert asked == [TARGET, DRAFTER]
