"""A Hub on the loopback interface: repositories, branches, large files and commits, kept in memory."""

import base64
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of_the_tests"
LARGE = (".safetensors", ".bin", ".png")
ASIDE = "/api/agent-harnesses"  # asked for by the client at a moment of its own; not part of any exchange


@dataclass
class Repository:
    """Commits by id, each with its whole content; branches point at them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], branch: str, message: str) -> str:
        digest = hashlib.sha1(f"{len(self.commits)} {message}".encode())
        for name in sorted(files):
            digest.update(name.encode() + hashlib.sha256(files[name]).digest())
        oid = digest.hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        self.messages.append(message)
        return oid

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)

    @property
    def files(self) -> dict[str, bytes]:
        """The content of main."""
        return self.commits[self.branches["main"]]


class HubServer:
    """
    Serves until closed. `log` lists every request.

    Set `cut_after = n` to break every connection once n more requests were served; with `lose_answer` the first broken
    one is carried out before its answer is lost.
    """

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.log: list[str] = []
        self.cut_after: int | None = None
        self.lose_answer = False
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """What a process must be started with to use this Hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def add_folder(self, name: str, folder: Path) -> None:
        """Publish a folder as it is."""
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.repositories.setdefault(name, Repository()).commit(files, "main", "Add")

    def verdict(self) -> str:
        """What happens to the next request: "serve", "lose" its answer, or "drop" it."""
        with self._lock:
            if self.cut_after is None:
                return "serve"
            self.cut_after -= 1
            if self.cut_after >= 0:
                return "serve"
            if self.lose_answer:
                self.lose_answer = False
                return "lose"
            return "drop"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *args):
        pass

    def _handle(self):
        self.close_connection = True
        if self.path == ASIDE:
            self.send_error(404)
            return
        verdict = self.hub.verdict()
        body = self._body()
        if verdict != "drop":
            parts = urlsplit(self.path)
            self.query = parse_qs(parts.query)
            self.hub.log.append(f"{self.command} {parts.path}")
            status, headers, content = self._answer(unquote(parts.path), body)
        if verdict != "serve":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, path: str, body: bytes):
        writes = self.command == "POST" and path != "/api/validate-yaml"
        if writes and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _error(401, "", "Invalid credentials")
        for method, pattern, handle in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                return handle(self, body, *match.groups())
        return _error(404, "EntryNotFound", f"no such address: {path}")

    def _create(self, body):
        wanted = json.loads(body)
        name = f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else wanted["name"]
        url = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repositories:
            return _json(url, 409)
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        repository = self.hub.repositories[name] = Repository(private=private)
        repository.commit({".gitattributes": b""}, "main", "initial commit")
        return _json(url)

    def _validate(self, body):
        return _json({"errors": [], "warnings": []})

    def _branch(self, body, name, branch):
        repository = self.hub.repositories[name]
        if branch in repository.branches:
            return _json({}, 409)
        repository.branches[branch] = repository.branches["main"]
        return _json({})

    def _preupload(self, body, name, revision):
        repository = self.hub.repositories.get(name)
        if repository is None:
            return _error(404, "RepoNotFound", name)
        files = repository.commits[repository.resolve(revision)]
        rows = [
            {
                "path": f["path"],
                "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": _oid(f["path"], files[f["path"]]) if f["path"] in files else None,
            }
            for f in json.loads(body)["files"]
        ]
        return _json({"files": rows})

    def _batch(self, body, name):
        objects = []
        for wanted in json.loads(body)["objects"]:
            row = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.large:
                row["actions"] = {"upload": {"href": f"{self.hub.url}/large/{wanted['oid']}"}}
            objects.append(row)
        return _json({"transfer": "basic", "objects": objects})

    def _put(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            return _error(400, "", "the content is not that of its name")
        self.hub.large[oid] = body
        return _json({})

    def _commit(self, body, name, revision):
        repository, lines = self.hub.repositories[name], [json.loads(line) for line in body.splitlines()]
        header = lines[0]["value"]
        parent = repository.resolve(revision)
        if header.get("parentCommit") not in (None, parent):
            return _error(412, "", "the branch has moved on")
        files = dict(repository.commits[parent])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        is_request = self.query.get("create_pr") == ["1"]
        branch = f"refs/pr/{len(repository.branches)}" if is_request else revision
        oid = repository.commit(files, branch, header["summary"])
        answer = {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid}
        if is_request:
            answer["pullRequestUrl"] = f"{self.hub.url}/{name}/discussions/{branch.rsplit('/', 1)[1]}"
        return _json(answer)

    def _info(self, body, name, revision=None):
        repository = self.hub.repositories.get(name)
        oid = repository and repository.resolve(revision or "main")
        if not oid:
            return _error(404, "RevisionNotFound" if repository else "RepoNotFound", name)
        siblings = [{"rfilename": path} for path in sorted(repository.commits[oid])]
        return _json(
            {"_id": "1", "id": name, "sha": oid, "siblings": siblings, "private": repository.private, "tags": []}
        )

    def _tree(self, body, name, revision, folder=None):
        repository = self.hub.repositories.get(name)
        files = repository.commits[repository.resolve(revision)] if repository else {}
        found = {p: c for p, c in files.items() if folder is None or p.startswith(folder.strip("/") + "/")}
        if not found:
            return _error(404, "EntryNotFound" if repository else "RepoNotFound", name)
        return _json([{"type": "file", "path": p, "size": len(c), "oid": _oid(p, c)} for p, c in found.items()])

    def _resolve(self, body, name, revision, path):
        repository = self.hub.repositories.get(name)
        oid = repository and repository.resolve(revision)
        if not oid:
            return _error(404, "RevisionNotFound" if repository else "RepoNotFound", name)
        if path not in repository.commits[oid]:
            return _error(404, "EntryNotFound", path, {"X-Repo-Commit": oid})
        content = repository.commits[oid][path]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return 200, {"ETag": etag, "X-Repo-Commit": oid, "Content-Type": "application/octet-stream"}, content


ROUTES = (
    ("POST", r"/api/repos/create", _Handler._create),
    ("POST", r"/api/validate-yaml", _Handler._validate),
    ("POST", r"/api/models/([^/]+/[^/]+)/branch/(.+)", _Handler._branch),
    ("POST", r"/api/models/([^/]+/[^/]+)/preupload/(.+)", _Handler._preupload),
    ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler._batch),
    ("PUT", r"/large/(\w+)", _Handler._put),
    ("POST", r"/api/models/([^/]+/[^/]+)/commit/(.+)", _Handler._commit),
    ("GET", r"/api/models/([^/]+(?:/[^/]+)?)", _Handler._info),
    ("GET", r"/api/models/([^/]+/[^/]+)/revision/(.+)", _Handler._info),
    ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(/.+)?", _Handler._tree),
    ("GET HEAD", r"/([^/]+/[^/]+)/resolve/([^/]+|refs/pr/\d+)/(.+)", _Handler._resolve),
)


def _oid(path: str, content: bytes) -> str:
    """What git, or for large files their store, calls a content."""
    if path.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _json(value, status: int = 200):
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _error(status: int, code: str, message: str, headers=None):
    extra = {"X-Error-Code": code} if code else {}
    return status, {**extra, "X-Error-Message": message, **(headers or {})}, b"{}"
