"""Publishing a drafter: weights, code, card and results are checked, shown, and sent to the Hub in one commit."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import validate_repo_id

from .cards import PICTURES, TRAINING_FIELDS, card_problems, check_training, described, render_card
from .checkpoint import INDEX, check_weights, read_config, read_json
from .modeling_dspine import DSpineDraftModel
from .remote_code import RECIPE, shipped_files, with_auto_map

CARD, RESULTS, TRAINING = "README.md", "results.json", "training.json"
SENT_AS_THEY_ARE = ("generation_config.json", "LICENSE*", "*.png", "experiments/*.json")
OWNED = ("*.safetensors", INDEX, "*.bin", "*_dspine.py", RECIPE)  # removed from the repository when no longer sent
ATTEMPTS = 5


@dataclass
class Upload:
    """What one commit will hold: contents or local files by their path in the repository, and what stays behind."""

    files: dict[str, Path | bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def size(self, name: str) -> int:
        """Bytes of one file."""
        content = self.files[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size

    def lines(self) -> list[str]:
        """One line per file, and their sum."""
        rows = [f"  {self.size(name):>12,} bytes  {name}" for name in sorted(self.files)]
        total = f"{len(rows)} files, {sum(map(self.size, self.files)):,} bytes"
        return [*rows, total, *(f"not sent: {name}" for name in self.left_out)]


def stage(folder: str | Path, repo_id: str) -> Upload:
    """Collect and check everything that belongs into the repository of a drafter. Nothing is sent or written.

    Args:
        folder: config.json, safetensors weights, results.json of `dspine eval`, training.json; README.md is checked if
            it is there and made from the others if it is not.
        repo_id: where it will go.

    Raises:
        FileNotFoundError, ValueError: something is missing or invalid; the message names it and the cure.
    """
    validate_repo_id(repo_id)
    folder = Path(folder)
    config = with_auto_map(read_config(folder))
    upload = Upload()
    weights = check_weights(folder)
    upload.files.update({file.name: file for file in weights})
    if (folder / INDEX).is_file():
        upload.files[INDEX] = folder / INDEX
    upload.files["config.json"] = _json(config)
    upload.files.update(shipped_files())
    results, training = (_facts(folder, name) for name in (RESULTS, TRAINING))
    check_training(training)
    check_results_belong(folder, results)
    for name in (RESULTS, TRAINING):
        upload.files[name] = folder / name
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if any(fnmatch(name, pattern) for pattern in SENT_AS_THEY_ARE):
            upload.files[name] = path
        elif name not in upload.files and name != CARD and not name.startswith(".cache/"):
            upload.left_out.append(name)
    _add_card(upload, folder, repo_id, config, results, training)
    return upload


def check_results_belong(folder: Path, results: dict[str, Any]) -> None:
    """Raise ValueError unless results.json was measured with the weights in `folder`."""
    from .commands.eval import weights_digest

    settings = results.get("settings", {})
    dtype = getattr(torch, str(settings.get("dtype")), None)
    if not isinstance(dtype, torch.dtype) or "drafter_fingerprint" not in settings:
        raise ValueError(
            f"expected the settings of 'dspine eval' in '{folder / RESULTS}'; found no dtype or no "
            f"drafter_fingerprint. Run 'dspine eval --drafter {folder}' again."
        )
    found = weights_digest(DSpineDraftModel.from_pretrained(folder, dtype=dtype))
    if found != settings["drafter_fingerprint"]:
        raise ValueError(
            f"expected results of these weights (fingerprint {found}) in '{folder / RESULTS}'; found those of others "
            f"({settings['drafter_fingerprint']}). Run 'dspine eval --drafter {folder}' again."
        )


def write_card(folder: str | Path, repo_id: str) -> Path:
    """Write README.md and its pictures into `folder`, from its config, results and training facts.

    Raises:
        FileNotFoundError, ValueError: a file, a number or a field is missing.
    """
    folder = Path(folder)
    validate_repo_id(repo_id)
    results, training = (_facts(folder, name) for name in (RESULTS, TRAINING))
    text = render_card(repo_id, read_config(folder), results, training)
    for name, content in _pictures(results).items():
        (folder / name).write_bytes(content)
    (folder / CARD).write_text(text, encoding="utf-8")
    return folder / CARD


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
    token: str | bool | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    echo: Callable[[str], Any] = print,
    wait: float = 1.0,
) -> CommitInfo | None:
    """Publish the drafter in `folder` as one commit, after saying what it will hold.

    After a broken connection it tries again, and the same command goes on later: files that arrived are not sent
    twice, and the repository shows either its old state or the new one.

    Args:
        folder: see [`stage`].
        repo_id: `org/name`; made if it does not exist.
        private: of a repository that is made.
        revision: branch; made if it does not exist.
        create_pr: open a pull request instead of committing.
        dry_run: check and say everything, send nothing.
        token: as huggingface_hub takes it: None for the stored one.
        echo: what the lines are given to.
        wait: seconds before the second attempt, doubled for each further one.

    Returns:
        The commit, or None after a dry run.

    Raises:
        FileNotFoundError, ValueError: before anything is sent, for whatever is missing or invalid.
        ConnectionError: the Hub could not be reached in the end.
    """
    upload = stage(folder, repo_id)
    api = HfApi(token=token)
    where = f"{repo_id}{f' ({revision})' if revision else ''}{' as a pull request' if create_pr else ''}"
    echo(f"{'Would send' if dry_run else 'Sending'} to {api.endpoint}, {where}:")
    for line in upload.lines():
        echo(line)
    if dry_run:
        return None
    commit = {
        "commit_message": commit_message or f"Upload {Path(folder).resolve().name} with dspine-hf",
        "commit_description": commit_description,
        "create_pr": create_pr,
    }
    done = _with_patience(lambda: _send(api, upload, repo_id, private, revision, commit), api.endpoint, echo, wait)
    echo(f"Done: {done.pr_url or done.commit_url}")
    return done


def push_drafter(
    drafter: DSpineDraftModel,
    repo_id: str,
    *,
    results: str | Path | None = None,
    training: str | Path | None = None,
    card: str | Path | None = None,
    max_shard_size: int | str = "5GB",
    **options: Any,
) -> CommitInfo | None:
    """`drafter.push_to_hub("org/name")`: weights, code, card and results in one commit.

    Args:
        drafter: any drafter; it is saved to a temporary folder first.
        results, training, card: results.json, training.json and README.md; None: those in the folder that the drafter
            was loaded from. Without a README.md the card is made from the other two.
        max_shard_size: of one weight file.
        options: those of [`push`].

    Raises:
        FileNotFoundError, ValueError, ConnectionError: as [`push`] does.
    """
    home = Path(drafter.name_or_path or ".")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / repo_id.rpartition("/")[2]
        drafter.save_pretrained(folder, max_shard_size=max_shard_size)
        for name, given in ((RESULTS, results), (TRAINING, training), (CARD, card)):
            source = Path(given) if given is not None else home / name
            if source.is_file():
                (folder / name).write_bytes(source.read_bytes())
            elif given is not None:
                raise FileNotFoundError(f"expected {name} at '{source}'; found none. Check the path.")
        for picture in PICTURES:
            if (folder / CARD).is_file() and (home / picture).is_file():
                (folder / picture).write_bytes((home / picture).read_bytes())
        return push(folder, repo_id, **options)


def is_transient(error: BaseException | None) -> bool:
    """Whether the same request may succeed later: a broken connection, or a server that is busy or down."""
    while error is not None:
        if isinstance(error, HfHubHTTPError):
            status = getattr(error.response, "status_code", 0)
            return status in (408, 412, 429) or status >= 500
        names = {
            base.__name__ for base in type(error).__mro__
        }  # httpx in some versions of the library, httpx2 in others
        if isinstance(error, (ConnectionError, TimeoutError)) or "TransportError" in names:
            return True
        error = error.__cause__ or error.__context__
    return False


def _with_patience(
    send: Callable[[], CommitInfo], endpoint: str, echo: Callable[[str], Any], wait: float
) -> CommitInfo:
    """Call `send` until it succeeds, fails for good, or has failed often enough."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return send()
        except Exception as error:
            if not is_transient(error):
                raise
            if attempt == ATTEMPTS:
                raise ConnectionError(
                    f"expected {endpoint} to take the commit; {attempt} attempts failed, the last with: {error}. "
                    "The repository is in its old state, or in the new one if only the answer was lost. Run the same "
                    "command again: what has arrived is not sent twice."
                ) from error
            echo(f"Attempt {attempt} of {ATTEMPTS} broke off ({error}); trying again.")
            time.sleep(wait * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def _send(
    api: HfApi, upload: Upload, repo_id: str, private: bool | None, revision: str | None, commit: dict[str, Any]
) -> CommitInfo:
    """One attempt. What the repository holds is asked anew: the last attempt's commit may have arrived after all."""
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None and not revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    info = api.model_info(repo_id, revision=revision)
    there = [sibling.rfilename for sibling in info.siblings or ()]
    stale = [n for n in there if n not in upload.files and any(fnmatch(n, pattern) for pattern in OWNED)]
    operations: list[Any] = [
        CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
        for name, content in upload.files.items()
    ]
    operations += [CommitOperationDelete(name, is_folder=False) for name in stale]
    return api.create_commit(repo_id, operations, revision=revision, parent_commit=info.sha, **commit)


def _add_card(
    upload: Upload,
    folder: Path,
    repo_id: str,
    config: dict[str, Any],
    results: dict[str, Any],
    training: dict[str, Any],
) -> None:
    if (folder / CARD).is_file():
        upload.files[CARD] = folder / CARD
        text = (folder / CARD).read_text(encoding="utf-8")
    else:
        text = render_card(repo_id, config, results, training)
        upload.files[CARD] = text.encode()
        upload.files.update({name: c for name, c in _pictures(results).items() if name not in upload.files})
    if problems := card_problems(text, repo_id, results, upload.files):
        raise ValueError(
            f"expected a card that says what results.json says; found {'; '.join(problems)}. Write it with "
            f"'dspine card {folder} {repo_id}', or remove README.md to have it made."
        )


def _pictures(results: dict[str, Any]) -> dict[str, bytes]:
    from .plots import plot_results

    with tempfile.TemporaryDirectory() as temporary:
        return {path.name: path.read_bytes() for path in plot_results(results, Path(temporary))}


def _facts(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).is_file():
        cure = f"'dspine train' writes it; for a drafter made otherwise, write it with {described(TRAINING_FIELDS)}"
        if name == RESULTS:
            cure = f"Run 'dspine eval --drafter {folder} --output-dir {folder}', or copy the file of such a run there"
        raise FileNotFoundError(f"expected {name} in '{folder}'; found none. {cure}: the card is made from it.")
    return read_json(folder / name)


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
