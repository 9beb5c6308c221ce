"""`data get` resumes and checks downloads; without a network, it says which files belong into which folder."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tritoncaps.data import DataError
from tritoncaps.data.download import fetch
from tritoncaps.data.sources import SOURCES, Source

CONTENT = bytes(range(256)) * 2000


class Server(BaseHTTPRequestHandler):
    """Serves CONTENT under /whole/, without ranges under /old/, cut short under /flaky/, and noise under /bad/."""

    requests: list = []  # noqa: RUF012 - shared on purpose

    def do_GET(self):
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        self.requests.append((self.path, start))
        content = CONTENT if "bad" not in self.path else b"?" * len(CONTENT)
        ranges = "old" not in self.path
        body = content[start:] if ranges else content
        self.send_response(206 if ranges and start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if "flaky" in self.path else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def address():
    Server.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def source(*addresses):
    return Source("file.bin", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), addresses)


def test_download_and_progress(tmp_path, address):
    progress = []
    path = fetch(source(address + "whole/"), tmp_path, lambda *x: progress.append(x))
    assert path.read_bytes() == CONTENT
    assert progress[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    fetch(source(address + "whole/"), tmp_path)
    assert len(Server.requests) == 1  # the file exists already


def test_resumes(tmp_path, address):
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    assert fetch(source(address + "whole/"), tmp_path).read_bytes() == CONTENT
    assert Server.requests == [("/whole/file.bin", 1000)]


def test_starts_again_where_a_server_cannot_resume(tmp_path, address):
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    assert fetch(source(address + "old/"), tmp_path).read_bytes() == CONTENT


def test_a_broken_connection_keeps_what_came(tmp_path, address):
    with pytest.raises(DataError, match=r"file\.bin cannot be downloaded"):
        fetch(source(address + "flaky/"), tmp_path)
    assert (tmp_path / "file.bin.part").stat().st_size == len(CONTENT) // 2
    assert fetch(source(address + "whole/"), tmp_path).read_bytes() == CONTENT


def test_wrong_content_is_not_kept(tmp_path, address):
    assert fetch(source(address + "bad/", address + "whole/"), tmp_path).read_bytes() == CONTENT
    with pytest.raises(DataError, match="not the expected content"):
        fetch(source(address + "bad/"), tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_without_a_network(tmp_path):
    with pytest.raises(DataError) as caught:
        fetch(source("http://127.0.0.1:9/"), tmp_path)
    message = str(caught.value)
    for part in ("file.bin", str(len(CONTENT)), hashlib.sha256(CONTENT).hexdigest(), f"put it into {tmp_path}"):
        assert part in message
    assert "\n" not in message


def test_every_source_is_complete():
    for sources in SOURCES.values():
        for s in sources:
            assert s.size > 0
            assert len(s.sha256) == 64
            assert all(a.startswith("http") and a.endswith("/") for a in s.addresses)
