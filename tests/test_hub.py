"""Publishing: one commit or nothing, whatever breaks, and nothing at all while anything is missing or untrue."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import dspine_hf
from dspine_hf import DSpineDraftModel, hub
from dspine_hf.cli import app
from dspine_hf.remote_code import shipped_files
from helpers.hub_server import TOKEN, HubServer
from helpers.published import tiny_published

NAME = "someone/tiny-drafter"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Two states of one drafter, each with its card: (in shards, in one file)."""
    folders = []
    for seed, size in ((1, "10KB"), (2, "5GB")):
        folder = tiny_published(tmp_path_factory.mktemp("published") / f"state-{seed}", seed=seed)
        if seed == 1:
            DSpineDraftModel.from_pretrained(folder).save_pretrained(folder, max_shard_size=size)
            (folder / "model.safetensors").unlink(missing_ok=True)
        hub.write_card(folder, NAME)
        folders.append(folder)
    assert len(list(folders[0].glob("*.safetensors"))) > 1
    return folders


@pytest.fixture
def folder(published, tmp_path):
    """A copy of the second state, to be damaged."""
    return shutil.copytree(published[1], tmp_path / "copy")


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A Hub that this process publishes to."""
    server = HubServer()
    for name in ("HF_TOKEN", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, server.environment(tmp_path)[name])
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    disable_progress_bars()
    yield server
    server.close()


def push(folder, **options):
    lines = []
    done = hub.push(folder, NAME, echo=lines.append, wait=0, **options)
    return done, "\n".join(lines)


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_one_commit_holds_weights_code_card_and_results(server, published):
    done, printed = push(published[1])
    repository = server.repositories[NAME]
    assert repository.messages == ["initial commit", "Upload state-2 with dspine-hf"]
    assert done.oid == repository.branches["main"]
    files = dict(repository.files)
    assert files.pop(".gitattributes") == b""
    code = {name: path.read_bytes() for name, path in shipped_files().items()}
    assert code.keys() <= files.keys() and files == {
        **contents(published[1]),
        **code,
        "config.json": files["config.json"],
    }
    assert json.loads(files["config.json"])["auto_map"]["AutoModel"] == "modeling_dspine.DSpineDraftModel"
    assert all(name in printed.split("files,")[0] for name in files)
    assert printed.splitlines()[-1].startswith("Done: ")


def test_a_second_push_replaces_stale_weights_in_the_same_commit_and_a_third_sends_nothing(server, published):
    push(published[0])
    push(published[1])
    files = server.repositories[NAME].files
    assert [n for n in files if n.endswith((".safetensors", ".index.json"))] == ["model.safetensors"]
    uploads = len(server.log)
    push(published[1])
    assert len(server.repositories[NAME].commits) == 3
    assert not [line for line in server.log[uploads:] if line.startswith("PUT") or "/commit/" in line]


def test_a_dry_run_says_everything_and_sends_nothing(server, published):
    done, printed = push(published[1], dry_run=True)
    assert done is None and not server.log
    assert "Would send" in printed and "model.safetensors" in printed and "modeling_dspine.py" in printed


def test_branch_privacy_and_pull_request_are_passed_on(server, published):
    push(published[0], private=True)
    repository = server.repositories[NAME]
    assert repository.private
    before = repository.files
    push(published[1], revision="next")
    done, _ = push(published[1], create_pr=True)
    assert repository.files == before
    assert "model.safetensors" in repository.commits[repository.branches["next"]]
    assert done.pr_url.endswith("/discussions/2")


def test_a_wrong_token_is_an_error_at_once(server, published):
    with pytest.raises(OSError, match="401|Invalid credentials"):
        push(published[1], token="hf_wrong")
    assert not server.repositories and set(server.log) <= {"POST /api/repos/create", f"GET /api/models/{NAME}"}


@pytest.mark.parametrize("lose_answer", [False, True], ids=["request lost", "answer lost"])
def test_interrupted_anywhere_the_repository_is_old_or_new_and_the_next_push_completes(
    server, published, monkeypatch, lose_answer
):
    push(published[0])
    old = dict(server.repositories[NAME].files)
    start = len(server.log)
    push(published[1])
    new = dict(server.repositories[NAME].files)
    requests, original = len(server.log) - start, server.repositories[NAME].branches["main"]
    assert requests > 6 and old != new
    for cut in range(requests):
        repository = server.repositories[NAME]
        repository.branches["main"] = next(iter(list(repository.commits)[1:2]))
        server.large = {k: v for k, v in server.large.items() if v in old.values()}
        server.cut_after, server.lose_answer = cut, lose_answer
        monkeypatch.setattr(hub, "ATTEMPTS", 1)
        with pytest.raises(ConnectionError, match="Run the same command again"):
            push(published[1])
        assert repository.files in (old, new), cut
        if not lose_answer or cut < requests - 1:
            assert repository.files == old, cut
        arrived = set(server.large)
        server.cut_after, restart = None, len(server.log)
        push(published[1])
        assert repository.files == new, cut
        sent = {line.rsplit("/", 1)[1] for line in server.log[restart:] if line.startswith("PUT")}
        assert not sent & arrived, "what had arrived was sent again"
    assert original in repository.commits


def test_one_broken_connection_is_survived_without_help(server, published):
    push(published[0])
    repository = server.repositories[NAME]
    old = repository.branches["main"]
    for cut, lose in ((1, False), (4, True), (6, False)):
        server.cut_after, server.lose_answer = cut, lose
        repository.branches["main"], server.large, broken = old, {}, []

        def mend(line, broken=broken):
            if "trying again" in line:
                server.cut_after = None
                broken.append(line)

        hub.push(published[1], NAME, echo=mend, wait=0)
        assert len(broken) == 1 and "model.safetensors" in repository.files


BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "found no config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "found neither"),
    "cut weights": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}"),
        "whole safetensors file",
    ),
    "pickled weights": (lambda f: torch.save({}, f / "pytorch_model.bin"), "pickled"),
    "no results": (lambda f: (f / "results.json").unlink(), "results.json"),
    "broken results": (lambda f: (f / "results.json").write_text("{"), "expected JSON"),
    "no training facts": (lambda f: (f / "training.json").unlink(), "training.json"),
    "results of other weights": (
        lambda f: edit(f, "results.json", ["settings", "drafter_fingerprint"], "0"),
        "those of",
    ),
    "a figure in the card alone": (lambda f: edit(f, "results.json", [*GSM8K, "speedup"], 9.0), "not the card"),
    "a missing figure": (lambda f: edit(f, "results.json", [*GSM8K, "speedup"], None), "expected 'speedup'"),
    "a placeholder": (lambda f: (f / "README.md").open("a").write("TODO"), "placeholder 'TODO'"),
    "a missing picture": (lambda f: (f / "slots.png").unlink(), "slots.png, which is not there"),
    "no licence": (lambda f: edit(f, "training.json", ["license"], ""), "license"),
    "another model type": (lambda f: edit(f, "config.json", ["model_type"], "llama"), "model_type 'dspine'"),
    "another shape": (lambda f: edit(f, "config.json", ["transfer_rank"], 5), "another shape"),
    "not a number": (lambda f: poison(f), "not finite"),
}
GSM8K = ["temperatures", "0", "benchmarks", "gsm8k"]


def edit(folder, name, path, value):
    content = json.loads((folder / name).read_text())
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (folder / name).write_text(json.dumps(content))


def poison(folder):
    weights = load_file(folder / "model.safetensors")
    weights["fc.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_nothing_is_sent_while_anything_is_missing_or_wrong(server, folder, damage, message):
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        push(folder)
    assert not server.log


def test_a_missing_shard_is_named(server, published, tmp_path):
    folder = shutil.copytree(published[0], tmp_path / "copy")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        push(folder)
    assert not server.log


def test_the_card_must_name_the_repository_it_goes_to(server, folder):
    with pytest.raises(ValueError, match='no snippet that loads "other/name"'):
        hub.push(folder, "other/name", echo=print)
    (folder / "README.md").unlink()
    hub.push(folder, "other/name", echo=print)
    assert b'"other/name"' in server.repositories["other/name"].files["README.md"]


def test_the_states_of_a_trainer_stay_behind(server, folder):
    for name in ("optimizer.pt", "training_args.bin", "rng_state.pth", "notes.txt"):
        (folder / name).write_bytes(b"x")
    _, printed = push(folder)
    files = server.repositories[NAME].files
    for name in ("optimizer.pt", "training_args.bin", "rng_state.pth", "notes.txt"):
        assert name not in files and f"not sent: {name}" in printed


def test_a_drafter_publishes_itself_with_the_facts_of_its_folder(server, folder):
    drafter = dspine_hf.DSpineDraftModel.from_pretrained(folder)
    done = drafter.push_to_hub(NAME, max_shard_size="10KB", private=True)
    files = server.repositories[NAME].files
    assert done.oid and len([n for n in files if n.endswith(".safetensors")]) > 1
    assert files["results.json"] == (folder / "results.json").read_bytes()
    assert files["README.md"] == (folder / "README.md").read_bytes()


def test_a_drafter_without_results_does_not_publish_itself(server, folder, tmp_path):
    drafter = dspine_hf.DSpineDraftModel.from_pretrained(folder)
    drafter.save_pretrained(tmp_path / "bare")
    with pytest.raises(FileNotFoundError, match="results.json"):
        dspine_hf.DSpineDraftModel.from_pretrained(tmp_path / "bare").push_to_hub(NAME)
    with pytest.raises(FileNotFoundError, match="expected results.json at"):
        drafter.push_to_hub(NAME, results=tmp_path / "nothing.json")
    assert not server.log


def test_the_commands_write_a_card_and_publish(server, folder):
    (folder / "README.md").unlink()
    runner = CliRunner()
    assert runner.invoke(app, ["card", str(folder), NAME], catch_exceptions=False).exit_code == 0
    assert (folder / "README.md").is_file()
    dry = runner.invoke(app, ["push", str(folder), NAME, "--dry-run"], catch_exceptions=False)
    assert "Would send" in dry.stdout and not server.log
    sent = runner.invoke(app, ["push", str(folder), NAME, "--private", "--revision", "v1"], catch_exceptions=False)
    assert sent.exit_code == 0 and server.repositories[NAME].private
    assert "model.safetensors" in server.repositories[NAME].commits[server.repositories[NAME].branches["v1"]]
    assert TOKEN not in sent.stdout
