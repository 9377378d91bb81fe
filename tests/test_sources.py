"""Where rows come from: a mistyped path is said at once, and a name is asked for on the Hub once."""

import http.server
import threading
from pathlib import Path

import datasets
import huggingface_hub.constants
import pytest

from dspine_hf import DSpineDraftModel, sources
from dspine_hf.cli import main
from dspine_hf.commands import eval as eval_command
from dspine_hf.commands import regenerate, train
from dspine_hf.commands.common import Pair
from helpers.hub_server import ASIDE
from helpers.tiny_files import tiny_chat_target, tiny_tokenizer, write_jsonl


class Hub(http.server.BaseHTTPRequestHandler):
    """Knows no data set, and one that is gated."""

    def do_GET(self):
        if self.path != ASIDE:
            self.server.asked.append(self.path)
        gated = self.path.endswith("/org/gated")
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    """The requests that a Hub on the loopback interface was asked."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "127.0.0.1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server.asked
        server.shutdown()


@pytest.fixture
def no_hub(monkeypatch):
    """Nobody answers; `datasets` must not be the one that finds out, which tries for half a minute."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")


PATHS = [
    "./nothing",
    "/nothing/here",
    "~/nothing",
    "nothing.jsonl",
    "nothing.parquet",
    "nothing.csv",
    "nothing/",
    "a/b/c",
]


@pytest.mark.parametrize("source", PATHS)
def test_what_can_only_be_a_path_is_not_asked_for_on_the_hub(source, hub):
    with pytest.raises(FileNotFoundError, match="Check the path"):
        sources.read_rows(source)
    assert hub == []


@pytest.mark.parametrize("source", ["nothing", "org/nothing", "org/nothing:main"])
def test_a_name_that_the_hub_does_not_know_is_asked_for_once(source, hub):
    with pytest.raises(FileNotFoundError, match=f"nothing at '{source}', and the Hub has no data set of this name"):
        sources.read_rows(source)
    assert hub == [f"/api/datasets/{source.partition(':')[0]}"]


def test_a_gated_data_set_is_there(hub):
    assert sources.check_source("org/gated") is True
    assert len(hub) == 1


@pytest.mark.parametrize("source", ["nothing", "org/nothing"])
def test_without_the_hub_a_name_is_given_up_at_the_first_try(source, no_hub, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    tried = []
    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", lambda *args, **kwargs: tried.append(args))
    with pytest.raises(FileNotFoundError, match=f"nothing at '{source}', and the Hub could not be asked"):
        sources.read_rows(source)
    assert not tried


def keep(rows, monkeypatch, cache) -> None:
    """Keep rows as the data set org/name of the Hub would have been kept."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    datasets.load_dataset("json", data_files=str(write_jsonl(cache / "rows.jsonl", rows)))
    (kept,) = (cache / "json").iterdir()
    (file,) = kept.rglob("json-train.arrow")
    file.rename(file.with_name("name-train.arrow"))
    kept.rename(kept.with_name("default"))
    (cache / "json").rename(cache / "org___name")


def test_without_the_hub_a_data_set_that_was_kept_is_read(no_hub, monkeypatch, tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    keep(rows, monkeypatch, tmp_path)
    before = datasets.config.HF_HUB_OFFLINE
    assert sources.check_source("org/name") is False
    assert sources.read_rows("org/name").to_list() == rows
    with pytest.raises(ValueError, match="Available configs"):
        sources.read_rows("org/name:other")
    assert datasets.config.HF_HUB_OFFLINE is before


def test_a_file_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "rows.toml"
    file.write_text("")
    with pytest.raises(ValueError, match=r"\.jsonl or \.parquet.*found the file"):
        sources.read_rows(file)


@pytest.mark.parametrize("saved", [True, False])
def test_a_folder_is_read_if_it_holds_a_data_set_and_else_refused_unread(saved, tmp_path):
    rows = [{"prompt": "a"}]
    if saved:
        one = datasets.Dataset.from_list(rows)
        one.save_to_disk(tmp_path / "one")
        datasets.DatasetDict({"train": one}).save_to_disk(tmp_path / "several")
        for name in ("one", "several"):
            assert sources.check_source(tmp_path / name) is True
            assert sources.read_rows(tmp_path / name).to_list() == rows
        return
    write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match="found neither state.json nor dataset_dict.json in"):
        sources.check_source(tmp_path)


@pytest.mark.parametrize(
    "command, words",
    [
        (train, ["train", "--data", "nothing", "--use-cpu"]),
        (train, ["train", "--data", "HERE", "--eval-data", "nothing", "--use-cpu"]),
        (eval_command, ["eval", "--prompts", "nothing"]),
        (regenerate, ["regenerate", "--prompts", "nothing"]),
    ],
    ids=["train", "train, eval data", "eval", "regenerate"],
)
def test_commands_say_so_before_the_target_is_loaded(command, words, hub, monkeypatch, capsys, tmp_path):
    def load(*args, **kwargs):
        raise AssertionError("the target was loaded")

    for name in ("load_quietly", "load_pair", "load_writer_parts"):
        if hasattr(command, name):
            monkeypatch.setattr(command, name, load)
    here = write_jsonl(tmp_path / "rows.jsonl", [{"tokens": [1, 2, 3, 4], "prompt_length": 1}])
    words = [str(here) if word == "HERE" else word for word in words]
    with pytest.raises(SystemExit) as stop:
        main([*words, "--output-dir", str(tmp_path / "out")])
    assert stop.value.code == 1
    assert "found nothing at 'nothing'" in capsys.readouterr().err
    assert not Path(tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command, words, until",
    [
        (train, ["train", "--data", "org/name", "--eval-data", "org/name:default", "--use-cpu"], "build_drafter"),
        (
            eval_command,
            ["eval", "--prompts", "org/name", "--context-length", "32", "--context-length", "64"],
            "Journal",
        ),
    ],
    ids=["train", "eval"],
)
def test_commands_ask_the_hub_once_for_each_name(command, words, until, no_hub, monkeypatch, tmp_path):
    """Each question without an answer is a wait."""
    row = {"messages": [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4 w5 w6"}]}
    keep([row, row], monkeypatch, tmp_path)
    asked, parts = [], (tiny_chat_target(), tiny_tokenizer())

    def ask(self, name, **options):
        asked.append(name)
        raise ConnectionError("nobody answers")

    def stop(*args, **options):
        raise SystemExit(7)

    pair = Pair(*parts, DSpineDraftModel.for_target(parts[0], block_size=4, transfer_rank=8), "target", "drafter")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", ask)
    monkeypatch.setattr(command, "load_quietly", lambda *args: parts, raising=False)
    monkeypatch.setattr(command, "load_pair", lambda *args: pair, raising=False)
    monkeypatch.setattr(command, until, stop)  # what comes once everything is read
    with pytest.raises(SystemExit) as end:
        main([*words, "--output-dir", str(tmp_path / "out")])
    assert end.value.code == 7
    assert asked == ["org/name"] * (2 if command is train else 1)
