"""The page's server: who may read it, and what a browser is told."""

from __future__ import annotations

import hashlib
import http.client
import json
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.cookiejar import CookieJar
from importlib.resources import files
from pathlib import Path
from shutil import which
from urllib.request import HTTPCookieProcessor, Request, build_opener

import psutil
import pytest
from starlette.testclient import TestClient
from test_watch_state import PLAN, line, members, steps
from typer.testing import CliRunner

from rallypoint import cli
from rallypoint.config import Audit, JobConfig, record_of
from rallypoint.coordinator.fingerprints import FINGERPRINTS, FingerprintLog
from rallypoint.coordinator.journal import Journal
from rallypoint.core.cluster.state import ClusterState
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.protocol import Finished, Metrics, Updated
from rallypoint.errors import UsageError
from rallypoint.launch.observing.beside import facts_of, resolved_of
from rallypoint.watch import app
from rallypoint.watch.app import HEADER, ComparisonPage, Page, Visitors, compared, served
from rallypoint.watch.follow import EVENTS, Follower
from support.page import in_thread

FILES = ["", "ask.js", "page.js", "page.css", "uplot.js", "uplot.css"]
READER = {HEADER: "secret"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    messages = [PLAN, members(), *steps(0, 3)]
    (tmp_path / EVENTS).write_bytes(b"".join(line(float(t), message) for t, message in enumerate(messages)))
    return tmp_path


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    follower = Follower(folder)
    follower.look()
    page = Page(follower, {"name": "a run", "settings": {}}, "secret")
    with TestClient(page.app, base_url="http://127.0.0.1:1234", follow_redirects=False) as client:
        yield client


@pytest.mark.parametrize("path", ["run", "news", "settings"])
@pytest.mark.parametrize("token", ["", "wrong", "sécret"])
def test_without_the_token_nothing_is_told(client: TestClient, path: str, token: str) -> None:
    for address in (f"/{path}", f"/{path}?token=secret"):
        answer = client.get(address, headers={HEADER: token.encode()} if token else {})
        assert answer.status_code == 403
        assert "rallypoint watch" in answer.text


def test_all_settings_are_those_that_the_members_have_agreed_on(folder: Path) -> None:
    with TestClient(
        Page(Follower(folder), {}, "secret", resolved=lambda: resolved_of(folder)).app, base_url="http://127.0.0.1:1234"
    ) as client:
        assert client.get("/settings").status_code == 403
        client.headers.update(READER)
        assert client.get("/settings").json() == {}, "no journal yet"
        record = record_of(JobConfig(replicas=3, clip=0.5), build_layout([TensorSpec("w", (32, 1), "float32", 0)], 64))
        with closing(Journal(str(folder))) as journal:
            journal.save(ClusterState(record, None, (), 0, 1, False, -1, 2))
        settings = client.get("/settings").json()
    assert (settings["replicas"], settings["clip"], settings["optimizer.type"]) == ("3", "0.5", "adamw")


def test_the_hash_of_the_weights_is_that_of_the_newest_version_that_all_shards_have_told(folder: Path) -> None:
    layout = build_layout([TensorSpec("w", (32, 1), "float32", 0)], 64)
    record = record_of(JobConfig(replicas=3, audit=Audit(fingerprints=2)), layout)
    with closing(Journal(str(folder))) as journal:
        journal.save(ClusterState(record, None, (), 0, 1, False, -1, 2))
    assert not any("hash" in name for name in resolved_of(folder)), "nothing is recorded yet"
    kept, shards = FingerprintLog(str(folder), print), len(record.layout.shards)
    told = [(version, shard) for version in (2, 4) for shard in reversed(range(shards))]
    for version, shard in [*told, (6, 0)]:
        kept.add("server0", Updated(version, shard, bytes([version, shard]) * 8))
    for thread, _ in kept.stop():
        thread.join()
    whole = hashlib.sha256(b"".join(bytes([4, shard]) * 8 for shard in range(shards))).hexdigest()
    assert shards > 1
    assert next(iter(resolved_of(folder).items())) == ("hash of the weights after 4 steps", whole)
    (folder / FINGERPRINTS).write_bytes(b"something else")
    assert "replicas" in resolved_of(folder)


def test_the_token_is_in_no_cookie(client: TestClient) -> None:
    """A browser sends cookies to each port of a host: to pages of other runs, and to other users' servers."""
    for path in (*(f"/{name}" for name in FILES), "/?token=secret", "/run"):
        answer = client.get(path, headers=READER)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert "set-cookie" not in answer.headers
    assert client.get("/run", headers={"Cookie": "rallypoint=secret"}).status_code == 403


def test_two_pages_on_two_ports_can_be_read_by_one_browser(folder: Path) -> None:
    jar = CookieJar()
    open_ = build_opener(HTTPCookieProcessor(jar)).open
    with served(folder, {}) as (one, first), served(folder, {}) as (two, second), in_thread(first), in_thread(second):
        for address in (one, two, one):
            where, token = address.split("?token=")
            assert b"<title>" in open_(address, timeout=20).read()
            assert open_(Request(f"{where}run", headers={HEADER: token}), timeout=20).status == 200
    assert not list(jar)


IN_A_BROWSER = """
const kept = {}, where = process.argv[1];
globalThis.location = new URL(where);
globalThis.history = { replaceState: (_, __, path) => { globalThis.location = new URL(path, where); } };
globalThis.sessionStorage = {
  setItem: (name, value) => { kept[name] = value; }, getItem: (name) => kept[name] ?? null,
};
const vm = require("vm"), source = require("fs").readFileSync(0, "utf8");
vm.runInThisContext(source + "; globalThis.asked = ask; globalThis.reading = read;");
(async () => {
  const answer = await asked(new URL("news", where));
  await reading(answer, (news) => {
    console.log(JSON.stringify({ name: news.facts.name, href: location.href }));
    process.exit();
  });
})();
"""


@pytest.mark.skipif(not which("node"), reason="node, which runs the page's script here, is not installed")
def test_the_page_s_script_takes_the_token_out_of_the_address_and_reads_the_news(folder: Path) -> None:
    script = files("rallypoint.watch").joinpath("page", "ask.js").read_text()
    with served(folder, {"name": "a run"}) as (address, server), in_thread(server):
        done = subprocess.run(
            ["node", "-e", IN_A_BROWSER, address], input=script, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"name": "a run", "href": address.partition("?")[0]}


@pytest.mark.parametrize("host", ["evil.example", "evil.example:1234", "127.0.0.1.evil.example"])
def test_a_page_of_another_name_gets_no_answer(client: TestClient, host: str) -> None:
    assert client.get("/", headers={"Host": host}).status_code == 400
    assert client.get("/run", headers=READER | {"Host": host}).status_code == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_the_page_can_only_be_read(client: TestClient, method: str) -> None:
    assert client.request(method, "/run").status_code == 405


def test_the_page_asks_nothing_of_the_internet(client: TestClient) -> None:
    for path in ("", "ask.js", "page.js", "page.css"):
        assert "http://" not in client.get(f"/{path}").text.replace("http://www.w3.org", "")
        assert "https://" not in client.get(f"/{path}").text


def test_the_stream_begins_with_everything_and_goes_on_with_what_is_new(folder: Path) -> None:
    with served(folder, facts_of(folder)) as (address, server), in_thread(server):
        where, token = address.removeprefix("http://").split("/?token=")
        connection = http.client.HTTPConnection(where, timeout=20)
        connection.request("GET", "/news", headers={HEADER: token})
        stream = connection.getresponse()
        said = _next(stream)
        while said["step"] < 3:  # the log was not read yet
            said = _next(stream)
        with (folder / EVENTS).open("ab") as log:
            log.write(line(10.0, steps(3, 4)[0]))
        news = _next(stream)
        assert news["curves"]["loss"]["mean"][-1] == 2.0
        assert "facts" not in news
        connection.close()


def _next(stream: http.client.HTTPResponse) -> dict[str, object]:
    while not (text := stream.readline()).startswith(b"data: "):
        assert text, "the stream has ended"
    news: dict[str, object] = json.loads(text[6:])
    return news


def test_a_folder_without_a_log_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name the folder of a run"), served(tmp_path, {}):
        pass


def test_a_port_that_is_taken_is_one_sentence(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} cannot be used"), served(folder, {}, port):
            pass


@pytest.mark.slow
def test_the_command_prints_the_address_and_ends_at_ctrl_c_with_a_page_open(folder: Path) -> None:
    command = [sys.executable, "-m", "rallypoint.cli", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        address = process.stdout.readline().split()[-1]
        where, token = address.removeprefix("http://").split("/?token=")
        connection = http.client.HTTPConnection(where, timeout=20)
        connection.request("GET", "/news", headers={HEADER: token})
        assert _next(connection.getresponse())
        process.send_signal(2)
        rest = process.stdout.read()
        connection.close()
    assert "Traceback" not in rest
    assert process.returncode in (0, 130)


# ---- who connects and says nothing keeps nobody out, and takes few files ----


PATIENCE_S = 60


@contextmanager
def page(folder: Path) -> Iterator[tuple[str, int]]:
    with served(folder, {}) as (address, server), in_thread(server):
        host, port = address.removeprefix("http://").partition("/")[0].split(":")
        yield host, int(port)


def asked(where: tuple[str, int], path: str = "/healthz") -> int:
    connection = http.client.HTTPConnection(*where, timeout=PATIENCE_S)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def ends(sock: socket.socket) -> bool:
    """Wait until the other side has ended the connection."""
    sock.settimeout(PATIENCE_S)
    try:
        while sock.recv(1 << 16):
            continue
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: 127.0", b"POST /order HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Length: 9\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET"])  # fmt: skip
def test_who_asks_nothing_whole_is_cut_off_after_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(app, "ASK_S", 0.2)
    with page(folder) as where, socket.create_connection(where) as silent:
        silent.sendall(said)
        assert ends(silent)
        assert asked(where) == 200


def test_who_does_not_read_the_answers_is_cut_off_after_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "READ_S", 0.2)
    with served(folder, {}) as (address, server), in_thread(server):
        where, token = address.removeprefix("http://").split("/?token=")
        with socket.create_connection(("127.0.0.1", int(where.partition(":")[2])), PATIENCE_S) as deaf:
            ask = f"GET /uplot.js HTTP/1.1\r\nHost: localhost\r\n{HEADER}: {token}\r\n\r\n"
            deaf.sendall(ask.encode() * 500)
            poll = select.poll()
            poll.register(deaf, select.POLLRDHUP)  # not POLLIN: it reads nothing
            assert poll.poll(1000 * PATIENCE_S)


def test_of_many_who_ask_nothing_the_oldest_go(folder: Path) -> None:
    with page(folder) as where, ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(where)) for _ in range(2 * Visitors().most)]
        assert asked(where) == 200
        assert all(ends(silent) for silent in crowd[: Visitors().most])


@pytest.mark.slow
def test_a_page_in_a_process_with_few_files_outlives_a_crowd_and_says_little_of_it(folder: Path) -> None:
    few = 200

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))

    command = [sys.executable, "-m", "rallypoint.cli", "watch", str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=limited
    ) as process:
        host, port = process.stdout.readline().split()[-1].removeprefix("http://").partition("/")[0].split(":")
        with ExitStack() as stack:
            for _ in range(few + 50):
                stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            assert asked((host, int(port))) == 200
            assert psutil.Process(process.pid).num_fds() < few / 2
        process.terminate()
        assert len(process.stdout.readlines()) < 10


# ---- the page that compares runs ----


def run(folder: Path, last: int) -> Path:
    folder.mkdir()
    messages = [PLAN, members(), *steps(0, last), Metrics(last, {"val_loss": 0.5}), Finished("worker0")]
    (folder / EVENTS).write_bytes(b"".join(line(float(t), message) for t, message in enumerate(messages)))
    return folder


@pytest.fixture
def comparing(tmp_path: Path) -> TestClient:
    followers = {name: Follower(run(tmp_path / name, last)) for name, last in (("a", 3), ("b", 5))}
    for follower in followers.values():
        follower.look()
    settings = {"a": {"engine": "local", "optimizer.lr": "0.1"}, "b": {"engine": "local", "clip": "1.0"}}
    page = ComparisonPage(followers, settings, "secret")
    return TestClient(page.app, base_url="http://127.0.0.1:1234", follow_redirects=False)


def test_it_tells_the_curves_of_each_run_and_the_settings_that_differ(comparing: TestClient) -> None:
    assert comparing.get("/runs").status_code == 403
    comparing.headers[HEADER] = "secret"
    told = comparing.get("/runs").json()
    first, second = told["runs"]
    assert (first["name"], first["step"], second["step"], second["ended"]) == ("a", 3, 5, "finished")
    assert first["curves"]["loss"] == {"step": [0, 1, 2], "mean": [5.0, 4.0, 3.0]}
    assert second["curves"]["val_loss (evaluation)"] == {"step": [5], "mean": [0.5]}
    assert first["settings"] == {"clip": "", "optimizer.lr": "0.1"}
    assert second["settings"] == {"clip": "1.0", "optimizer.lr": ""}
    assert comparing.get("/runs", params={"seen": told["state"]}).status_code == 204
    assert comparing.get("/runs", params={"seen": "another"}).status_code == 200


@pytest.mark.parametrize("path", ["", "ask.js", "compare.js", "page.css", "uplot.js", "uplot.css"])
def test_its_files_ask_nothing_of_the_internet(comparing: TestClient, path: str) -> None:
    answer = comparing.get(f"/{path}")
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    if path != "uplot.js":
        assert "http" not in answer.text.replace("http-equiv", "")


def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name the folder of a run"), compared({"a": tmp_path}, {}):
        pass
    one = run(tmp_path / "a", 3)
    assert "named twice" in str(CliRunner().invoke(cli.app, ["watch", str(one), str(one)]).exception)


def test_two_runs_are_compared_in_the_terminal_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over ssh there is no browser. The learning rate is in the scripts, and the members have agreed on it."""
    monkeypatch.setattr("rallypoint.cli.watching.resolved_of", lambda run: {"optimizer.lr": f"0.{ord(run.name)}"})
    runs = [str(run(tmp_path / name, last)) for name, last in (("a", 3), ("b", 5))]
    (tmp_path / "c").mkdir()  # runs/* names it too
    closed = tmp_path / ("d" * 300)  # cannot be looked into, as another user's (root could)
    result = CliRunner().invoke(cli.app, ["watch", *runs, str(tmp_path / "c"), str(closed), "--terminal"])
    assert result.exit_code == 0, result.output
    for said in ("optimizer.lr  0.97  0.98", "a  finished  step 3", "b  finished  step 5", "loss of a", "loss of b"):
        assert said in result.output
    assert f"left out, without events.jsonl: {tmp_path / 'c'}, {closed}" in result.output
