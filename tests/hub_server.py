"""A model hub on this machine, for the tests: it answers as the real one does."""

import hashlib
import http.server
import json
import threading
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories by name, each with its files by name; and what each is refused with."""

    def __init__(self):
        self.repos = {}
        self.errors = {}  # of a repository: status, error code
        self.requests = []

    def __enter__(self):
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request):
        path = unquote(urlsplit(request.path).path)
        self.requests.append((request.command, path))
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        if repo in self.errors:
            return self.refuse(request, *self.errors[repo])
        if repo not in self.repos:
            return self.refuse(request, 404, "RepoNotFound")
        files = self.repos[repo]
        if rest[1:2] not in ([], ["main"], [COMMIT], ["v1"]):
            return self.refuse(request, 404, "RevisionNotFound")
        if path.startswith("/api/models"):
            if rest[:1] == ["tree"]:
                return self.send_json(request, [self.entry(name, files[name]) for name in files])
            siblings = [{"rfilename": name} for name in files]
            return self.send_json(request, {"id": repo, "sha": COMMIT, "siblings": siblings})
        name = "/".join(rest[2:])
        if name not in files:
            return self.refuse(request, 404, "EntryNotFound")
        return self.send_file(request, files[name])

    def entry(self, name, content):
        return {"type": "file", "path": name, "size": len(content), "oid": self.tag(content)}

    @staticmethod
    def tag(content):
        return hashlib.sha1(content).hexdigest()

    def refuse(self, request, status, code):
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def send_json(self, request, data):
        self.send(request, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def send_file(self, request, content):
        headers = {"ETag": f'"{self.tag(content)}"', "X-Repo-Commit": COMMIT}
        self.send(request, content, headers)

    def send(self, request, content, headers):
        request.send_response(200)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(content)
