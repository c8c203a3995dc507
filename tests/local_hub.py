"""A server on this machine that speaks the protocols of Hugging Face's hub and of ModelScope; it fails on request.

Listing, HEAD and GET with Range of the one; card, listing and GET with Range of the other, which keeps large files elsewhere.
"""

import hashlib
import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "a" * 40
LFS_FROM = 1000  # bytes


class Hub(ThreadingHTTPServer):
    """``files``: name to content. ``served``: what is sent instead. ``stall``: bytes of a file after which nothing comes.

    ``breaks``: bytes of a file after which the connection ends, once. ``busy``: answers of 503 before the next file.
    ``elsewhere``: another server, to which ModelScope's large files are redirected. ``edit``: changes an answer in JSON before it
    is sent. ``endless``: names of files, or "listing", that are sent without an end; ``sent`` counts their bytes.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repository, self.files, self.served, self.requests = "org/model", {}, {}, []
        self.card = {"license": "apache-2.0"}
        self.stall, self.gated, self.listed, self.continues = {}, False, [], True
        self.breaks, self.busy, self.elsewhere, self.logins, self.checksums = {}, 0, None, [], True
        self.edit, self.endless, self.sent, self.encoding = lambda answer: answer, (), 0, None
        self.ended = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def listing(self):
        siblings = []
        for name, content in self.files.items():
            entry = {"rfilename": name, "size": len(content), "blobId": blob(content)}
            if len(content) >= LFS_FROM:
                entry["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        siblings += self.listed
        tags = [f"license:{self.card['license']}"] if "license" in self.card else []
        return {"id": self.repository, "modelId": self.repository, "sha": COMMIT, "siblings": siblings, "tags": tags} | {
            "private": False, "gated": "manual" if self.gated else False, "cardData": self.card,
        }  # fmt: skip

    def modelscope_files(self):
        files = [{"Path": "a_folder", "Name": "a_folder", "Size": 0, "Type": "tree", "Revision": COMMIT}]
        for name, content in self.files.items():
            entry = {"Path": name, "Name": name.rpartition("/")[2], "Size": len(content), "Type": "blob"}
            entry |= {"Revision": COMMIT, "IsLFS": len(content) >= LFS_FROM}
            files.append(entry | ({"Sha256": sha256(content)} if self.checksums else {}))
        files += [{"Path": entry["rfilename"], "Size": entry["size"], "Type": "blob"} for entry in self.listed]
        return {"Files": files}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        if path.startswith("/api/v1/models/"):
            self.modelscope(path, {key: value for key, (value,) in parse_qs(urlsplit(self.path).query).items()})
            return
        hub.requests.append((self.command, path, self.headers.get("Range")))
        parts = path.strip("/").split("/")
        if path.startswith("/api/models/"):
            repository, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
            if repository != hub.repository:
                self.refuse(404, "RepoNotFound")
            elif revision not in ("main", COMMIT):
                self.refuse(404, "RevisionNotFound")
            else:
                self.send_json(200, hub.listing())
            return
        name = "/".join(parts[4:])
        if hub.gated:
            self.refuse(403, "GatedRepo")
        elif name not in hub.files:
            self.refuse(404, "EntryNotFound")
        else:
            self.send(name)

    def modelscope(self, path, query):
        hub, name = self.server, query.get("FilePath", "")
        hub.requests.append((self.command, f"{path}/{name}" if name else path, self.headers.get("Range")))
        hub.logins.append((self.headers.get("Authorization"), self.headers.get("Cookie")))
        repository, _, rest = path.removeprefix("/api/v1/models/").partition("/repo")
        if repository != hub.repository:
            self.modelscope_answer(404, 10010205001, message="the model does not exist")
        elif query.get("Revision", "master") not in ("master", "v1.0", COMMIT):
            self.modelscope_answer(404, 10010205002, message="the revision does not exist")
        elif not rest and not name and not path.endswith("/repo"):
            self.modelscope_answer(200, 200, {"Name": "model", "License": hub.card.get("license", "")})
        elif hub.gated:
            self.modelscope_answer(403, 10010206001, message="no access")
        elif rest == "/files":
            self.modelscope_answer(200, 200, hub.modelscope_files())
        elif name not in hub.files:
            self.modelscope_answer(404, 10010205003, message="the file does not exist")
        elif hub.busy:
            hub.busy -= 1
            self.modelscope_answer(503, 503, message="later")
        elif hub.elsewhere and len(hub.files[name]) >= LFS_FROM:
            self.answer(302, b"", {"Location": hub.elsewhere + self.path})
        else:
            self.send(name)

    def modelscope_answer(self, status, code, data=None, message=""):
        answer = {"Code": code, "Data": data, "Message": message, "RequestId": "r", "Success": code == 200}
        self.send_json(status, answer)

    def send_json(self, status, answer):
        answer = self.server.edit(answer)
        if "listing" in self.server.endless and status == 200:
            self.flood({"Content-Type": "application/json"}, b'{"siblings": [' + b"{}," * 20_000)
            return
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.answer(status, content, {"Content-Type": "application/json; charset=utf-8"})

    def flood(self, headers, piece):
        """Send ``piece`` until the client leaves, at most 200 MB."""
        self.send_response(200)
        for key, value in {**headers, "Connection": "close"}.items():
            self.send_header(key, value)
        self.end_headers()
        self.close_connection = True
        with suppress(OSError):
            while self.server.sent < 200 << 20:
                self.wfile.write(piece)
                self.server.sent += len(piece)

    def send(self, name):
        content = self.server.files[name]
        is_large = len(content) >= LFS_FROM
        etag = sha256(content) if is_large else blob(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if is_large:
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{etag}"'}
        if name in self.server.endless and self.command == "GET":
            self.flood(headers, b"x" * 60_000)
            return
        content = self.server.served.get(name, content)
        asked, code = self.headers.get("Range"), 200
        if asked and self.command == "GET" and self.server.continues:
            start, code = int(asked.removeprefix("bytes=").partition("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content = content[start:]
        breaks = self.server.breaks.pop(name, None) if self.command == "GET" else None
        self.answer(code, content, headers, self.server.stall.get(name), breaks)

    def answer(self, code, content, headers, stall=None, breaks=None):
        self.send_response(code)
        encoding = {"Content-Encoding": self.server.encoding} if self.server.encoding else {}
        for key, value in {**headers, **encoding, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: stall if breaks is None else breaks])
            self.close_connection = breaks is not None
            if stall is not None:
                self.wfile.flush()
                self.server.ended.wait(60)
                self.close_connection = True

    def refuse(self, code, why):
        self.send_response(code)
        self.send_header("X-Error-Code", why)
        self.send_header("X-Error-Message", why)
        self.send_header("Content-Length", "0")
        self.end_headers()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def blob(content):
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@contextmanager
def local_hub():
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        hub.shutdown()
        hub.server_close()
