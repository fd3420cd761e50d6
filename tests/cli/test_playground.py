"""Tests of the playground's server: same results and errors as ``zero-bubble plan``, for the local machine only."""

from __future__ import annotations

import gzip
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from megatron.zero_bubble import SCHEDULES, Pass
from megatron.zero_bubble.__main__ import main
from megatron.zero_bubble.cli.playground.server import Server
from tests.helpers.plans import schedule_from_json
from tests.helpers.playground import drawn_setting, playground, without_seconds

Capture = pytest.CaptureFixture[str]
TIMES = {"forward-ms": "2", "backward-ms": "2", "wgrad-ms": "1", "comm-ms": "0.5"}
ASKED = {"schedule": "zb-h1", "num-ranks": "4", "num-microbatches": "8", **TIMES}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with playground() as at:
        yield at


def get(
    address: str, path: str, host: str | None = None, method: str = "GET", **headers: str
) -> tuple[int, str, bytes]:
    url = urlsplit(address)
    connection = HTTPConnection(str(url.hostname), url.port, timeout=60)
    connection.request(method, path, headers={"Host": host or url.netloc, **headers})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers["Content-Type"], body


def ask(address: str, asked: dict[str, str]) -> dict[str, Any]:
    status, kind, body = get(address, f"/plan?{urlencode(asked)}")
    assert (status, kind) == (200, "application/json"), body
    content = json.loads(body)
    assert isinstance(content, dict)
    return content


def drawing(address: str, asked: dict[str, str]) -> dict[str, Any]:
    status, kind, body = get(address, f"/drawing?{urlencode(asked)}")
    assert (status, kind) == (200, "application/json"), body
    content = json.loads(gzip.decompress(body))
    assert isinstance(content, dict)
    return content


def refusal(address: str, path: str, **more: Any) -> tuple[int, str]:
    status, _, body = get(address, path, **more)
    (sentence,) = json.loads(body).values()
    return status, sentence


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.full)])
def test_results_equal_plans_for_drawn_settings(address: str, capsys: Capture, count: int) -> None:
    draw = random.Random(8)
    for number in range(count):
        asked = drawn_setting(draw, searched=number % 40 == 0)
        words = [word for flag, value in asked.items() for word in (f"--{flag}", value) if word]
        code = main(["plan", *words, "--format", "json"])
        out, err = capsys.readouterr()
        if code == 0:
            answer = ask(address, asked)
            plan = answer["plan"] | {"order": drawing(address, asked)["order"]}
            assert without_seconds(plan) == without_seconds(json.loads(out)), asked
            assert shlex.split(answer["command"]) == ["zero-bubble", "plan", *words]
        else:
            status, sentence = refusal(address, f"/plan?{urlencode(asked)}")
            assert (status, f"zero-bubble plan: {sentence}\n") == (400, err)


def test_lengths_have_the_times_that_plan_prints(address: str, capsys: Capture) -> None:
    asked = {**ASKED, "schedule": "zb-h1", "lengths": "4096,300,2048+1024,8000", "memory-limit": "1p"}
    del asked["num-microbatches"]
    assert main(["plan", *(word for flag, value in asked.items() for word in (f"--{flag}", value))]) == 0
    printed, answer = capsys.readouterr().out, ask(address, asked)
    for metric in ("span", "makespan"):
        assert f"\n{metric:10}{answer['plan'][f'{metric}_ms']:12.3f}" in printed
    assert answer["lengths"] and answer["lengths"] in printed
    assert "gap" not in answer["plan"] and answer["limit"]["kept"], "the bound is for equal microbatches"
    times = drawing(address, asked)["times"]
    assert max(end for row in times for _, end in row) == answer["plan"]["makespan_ms"]


def test_times_and_arrivals_match_the_passes(address: str) -> None:
    asked = {**ASKED, "schedule": "zb-v", "equal-passes": ""}
    plan, answer = ask(address, asked)["plan"], drawing(address, asked)
    schedule = schedule_from_json(json.dumps(plan | {"order": answer["order"]}))
    ends = {
        p: end
        for row, times in zip(schedule.order, answer["times"], strict=True)
        for p, (_, end) in zip(row, times, strict=True)
    }
    rank_of = schedule.placement.stage_to_rank
    assert max(ends.values()) == plan["makespan_ms"]
    for rank, (row, waits, times) in enumerate(zip(schedule.order, answer["waits_for"], answer["times"], strict=True)):
        for p, needs, (start, _) in zip(row, waits, times, strict=True):
            # The pass's other input, its own forward, is available earlier.
            assert tuple(Pass.parse(text) for text, _ in needs) == schedule.dependencies(p)[:1]
            for text, arrives in needs:
                source = Pass.parse(text)
                assert arrives == ends[source] + (0.5 if rank_of[source.stage] != rank else 0.0)
                assert arrives <= start


def test_copies_are_those_of_the_plan(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {**ASKED, "schedule": "zb-h2", "offload": "auto", "host-ms": "0.9", "memory-limit": "1.2p"}
    words = [word for flag, value in asked.items() for word in (f"--{flag}", value) if word]
    assert main(["plan", *words, "--format", "json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    answer, drawn = ask(address, asked)["plan"], drawing(address, asked)
    moves = expected.pop("moves")
    assert moves
    assert without_seconds(answer | {"order": drawn["order"]}) == without_seconds(expected)
    copies = [op for row in drawn["copies"] for op, *_ in row]
    assert sorted(copies) == sorted(f"{forward}{sign}" for forward, *_ in moves for sign in "^v")
    assert all(end - start == pytest.approx(0.9) for row in drawn["copies"] for _, start, end in row)
    assert drawing(address, ASKED)["copies"] == [[]] * 4


@pytest.mark.parametrize("algorithm", ["1", "2"])
def test_passes_of_the_vocabulary_wait_for_collectives(address: str, algorithm: str) -> None:
    shards = {"vocabulary": algorithm, "output-ms": "1", "output-wgrad-ms": "0.5", "collective-ms": "0.25"}
    asked = ASKED | shards
    assert ask(address, asked)["plan"]["vocabulary"] == int(algorithm)
    answer = drawing(address, asked)
    kinds = [{Pass.parse(text).kind.value for text in row} for row in answer["order"]]
    assert all({*"STIJ"} <= of_rank for of_rank in kinds) and ["L" in of_rank for of_rank in kinds] == [False] * 3 + [
        True
    ]
    ends = {
        text: end
        for row, times in zip(answer["order"], answer["times"], strict=True)
        for text, (_, end) in zip(row, times, strict=True)
    }
    for row, waits, times in zip(answer["order"], answer["waits_for"], answer["times"], strict=True):
        for text, needs, (start, _) in zip(row, waits, times, strict=True):
            assert all(arrives <= start + 1e-9 for _, arrives in needs)
            if text.startswith("1S"):  # from rank 3: a transfer, and the time of a collective
                ((source, arrives),) = needs
                assert source == f"3F{text[2:]}" and arrives == ends[source] + 0.75
            if "L" in text:
                assert [source for source, _ in needs] == [f"{rank}S{text[2:]}" for rank in range(4)]


def test_exceeded_limit_is_reported_as_by_plan(address: str, capsys: Capture) -> None:
    answer = ask(address, {**ASKED, "schedule": "zb-h2", "memory-limit": "1p"})
    main(shlex.split(answer["command"])[1:])
    assert answer["limit"]["kept"] is False
    assert answer["limit"]["sentence"] in capsys.readouterr().out.splitlines()
    assert ask(address, ASKED)["limit"] is None


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"forward-ms": "-3"}, "--forward-ms must be a finite number, 0 or above; got -3.0"),
        ({"num-ranks": "two"}, "argument --num-ranks: invalid int value: 'two'"),
        ({"num-ranks": "--costs=/etc/passwd"}, "argument --num-ranks: invalid int value: '--costs=/etc/passwd'"),
        ({"schedule": "zb-9"}, "unknown schedule 'zb-9'; choose one of 1f1b"),
        ({"equal-passes": ""}, "--equal-passes applies only to zb-v, v-half, v-min, zb-interleaved; leave it out"),
        ({"equal-passes": "yes"}, "argument --equal-passes: ignored explicit argument 'yes'"),
        ({"costs": "/etc/passwd"}, "got 'costs'; leave it out"),
        ({"schedule-file": "/etc/passwd"}, "got 'schedule-file'; leave it out"),
        ({"config": "/etc/passwd"}, "got 'config'; leave it out"),
        ({"num-ranks": "65"}, "the playground allows at most 64 num-ranks; got 65; use zero-bubble plan"),
        ({"num-microbatches": "257"}, "the playground allows at most 256 num-microbatches; got 257"),
        ({"forward-ms": "1e7"}, "at most 1e+06 forward-ms; got 1e+07"),
        ({"activation-memory": "1e308"}, "activation must be at most 1e+15; got 1e+308; give a smaller one"),
        (
            {"schedule": "seq-1f1b", "num-slices": "17"},
            "the playground allows at most 16 slices; got 17; use zero-bubble",
        ),
        ({"schedule": "seq-1f1b", "slice-cuts": ",".join("1" * 17)}, "the playground allows at most 16 slices; got 17"),
        (
            {"schedule": "seq-1f1b", "num-slices": "1e9"},
            "--num-slices must be a number from 1 to 4096, or auto; got 1e9",
        ),
        (
            {"schedule": "zb-auto", "num-slices": "auto", "num-ranks": "33"},
            "at most 4096 for ranks x microbatches x slices of this schedule; got 4224; choose fewer slices, or use",
        ),
        (
            {"schedule": "seq-interleaved-1f1b", "num-chunks": "4", "num-ranks": "64", "num-microbatches": "256"},
            "at most 16384 for ranks x microbatches x slices of this schedule; got 65536",
        ),
        ({"vocabulary": "2"}, "vocabulary parallelism needs the times of its passes; got costs without them"),
        ({"vocabulary": "3"}, "argument --vocabulary: invalid choice: '3'"),
        (
            {"vocabulary": "2", "output-ms": "1", "output-wgrad-ms": "1", "num-ranks": "64", "num-microbatches": "64"},
            "at most 2048 for ranks x microbatches of this schedule with vocabulary parallelism; got 4096",
        ),
        (
            {"offload": "all", "host-ms": "1", "num-ranks": "64", "num-microbatches": "256", "num-chunks": "2"},
            "at most 8192 for ranks x microbatches of this schedule with offloading; got 16384",
        ),
        ({"forward-ms": "nan"}, "--forward-ms must be a finite number, 0 or above; got nan"),
    ],
)
def test_invalid_request_is_rejected_in_one_sentence(address: str, asked: dict[str, str], sentence: str) -> None:
    status, said = refusal(address, f"/plan?{urlencode(ASKED | asked)}")
    assert status == 400
    assert sentence in said


@pytest.mark.parametrize(
    "asked",
    [
        {"num-ranks": f"1{'0' * 400}"},  # too large for a float
        {
            "schedule": "zb-auto",
            "num-ranks": "2",
            "num-microbatches": "3",
            "forward-ms": "1e-320",
        },  # its reciprocal is inf
    ],
)
def test_numbers_outside_the_range_of_floats_are_rejected(address: str, asked: dict[str, str]) -> None:
    status, said = refusal(address, f"/plan?{urlencode(ASKED | asked)}")
    assert status == 400
    assert said.startswith("some figures are too large or too small to plan with: ")
    assert said.endswith("; give figures nearer to 1")


def test_malformed_requests_are_rejected(address: str) -> None:
    assert refusal(address, "/plan") == (400, "one of the arguments --schedule --schedule-file is required")
    assert refusal(address, "/plan?zb-h1")[0] == 400
    assert refusal(address, "http://[") == (400, "Invalid IPv6 URL")
    assert refusal(address, "/elsewhere") == (404, "only /, /plan, /drawing and /file exist; got '/elsewhere'")
    assert get(address, "/", method="POST")[0] == 501


@pytest.mark.parametrize("path", ["/", f"/plan?{urlencode(ASKED)}"])
def test_other_host_names_are_rejected(address: str, path: str) -> None:
    port = urlsplit(address).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert get(address, path, host)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil.example"):
        status, sentence = refusal(address, path, host=host)
        assert status == 403
        assert f"got the host '{host}'" in sentence


def test_port_80_is_optional_in_the_host_header() -> None:
    with Server(0) as server:
        assert "localhost" not in server.hosts
        server.server_port = 80  # only root can listen on port 80
        assert server.hosts == ("127.0.0.1:80", "localhost:80", "127.0.0.1", "localhost")


@pytest.mark.parametrize("path", ["/", f"/plan?{urlencode(ASKED)}"])
def test_requests_of_other_sites_are_rejected(address: str, path: str) -> None:
    for site in ("same-origin", "none"):
        assert get(address, path, **{"Sec-Fetch-Site": site})[0] == 200
    for site in ("cross-site", "same-site", ""):
        status, sentence = refusal(address, path, **{"Sec-Fetch-Site": site})
        assert status == 403
        assert f"requests from pages of other sites are rejected; got a {site} request" in sentence


def test_connection_close_is_honoured(address: str) -> None:
    url = urlsplit(address)
    lines = (f"GET /plan?{urlencode(ASKED)} HTTP/1.1", f"Host: {url.netloc}", "Connection: close", "", "")
    with socket.create_connection((str(url.hostname), url.port), timeout=30) as visitor:
        visitor.sendall("\r\n".join(lines).encode())
        with visitor.makefile("rb") as replied:
            assert replied.read().startswith(b"HTTP/1.1 200 ")  # read() returns only when the connection closes


def test_page_is_a_single_file_without_external_resources(address: str) -> None:
    status, kind, body = get(address, "/")
    page = body.decode()
    assert (status, kind) == (200, "text/html; charset=utf-8")
    for loads in (" src=", "@import", "url(", "http://", "https://"):
        assert loads not in page
    assert [line for line in page.splitlines() if "href=" in line] == ['<link rel="icon" href="data:,">']
    for name in SCHEDULES:
        assert f'"name": "{name}"' in page


def test_searches_run_one_at_a_time_and_not_for_closed_connections() -> None:
    searched = {**ASKED, "schedule": "zb-auto", "num-ranks": "2", "num-microbatches": "3"}
    with Server(0) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        host, port = server.hosts[0].split(":")
        with server.searching, socket.create_connection((host, int(port))) as visitor:
            lines = (f"GET /plan?{urlencode(searched)} HTTP/1.1", f"Host: {server.hosts[0]}", "", "")
            visitor.sendall("\r\n".join(lines).encode())
            assert (
                ask(server.address, ASKED)["plan"]["schedule"] == "zb-h1"
            )  # other requests do not wait for the search
        for _ in range(2):  # the second request uses the cache
            assert ask(server.address, searched | {"comm-ms": "1"})["plan"]["schedule"] == "zb-auto"
        for thread in threading.enumerate():
            if "process_request_thread" in thread.name:
                thread.join(60)
        assert len(server.answers.kept) == 2
        server.shutdown()


@contextmanager
def started(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command as from a terminal: it receives Ctrl-C even if the tests run in the background."""
    command = [sys.executable, "-m", "megatron.zero_bubble", "playground", "--no-browser", *flags]
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # a new process inherits only ignored signals
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    finally:
        signal.signal(signal.SIGINT, ours)
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_command_serves_until_ctrl_c_and_rejects_a_used_port() -> None:
    with started() as running:
        assert running.stdout is not None
        said = running.stdout.readline()
        address = said.split()[3]
        assert said == f"Playground running at {address} (this machine only); press Ctrl-C to stop it.\n"
        assert get(address, "/")[0] == 200
        port = urlsplit(address).port
        with started("--port", str(port)) as second:
            out, err = second.communicate(timeout=60)
        why = f"cannot listen on port {port}: it is in use; choose another port, or leave --port out"
        assert (second.returncode, out, err) == (2, "", f"zero-bubble playground: {why}\n")
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (0, "\nPlayground stopped.\n", "")


def test_port_outside_the_range_is_rejected(capsys: Capture) -> None:
    assert main(["playground", "--no-browser", "--port", "65536"]) == 2
    assert "--port must be 0 to 65535, where 0 selects a free port; got 65536" in capsys.readouterr().err


def test_page_is_installed_with_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    environment = {**os.environ, "ZB_BUILD": "none"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = Path("megatron/zero_bubble/cli/playground/page")
    sources = {path.name for path in (ROOT / page).iterdir() if path.is_file()}
    assert {path.name for path in (tmp_path / page).iterdir() if path.is_file()} == sources
    assert {"index.html", "style.css", "main.js"} <= sources


def test_pairs_are_drawn_as_their_passes(address: str, capsys: Capture) -> None:
    asked = {
        "schedule": "dualpipe-v",
        "pairs": "",
        "num-ranks": "2",
        "num-microbatches": "4",
        "memory-limit": "2p",
        **TIMES,
    }
    found, drawn = ask(address, asked), drawing(address, asked)
    assert main([*shlex.split(found["command"])[1:], "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert "--pairs" in found["command"] and found["plan"]["makespan_ms"] == planned["makespan_ms"]
    assert found["limit"]["kept"] and "gap" not in found["plan"], "there is no bound with pairs"
    expected = [[part for op in row for part in op.split("&")] for row in planned["order"]]
    assert [len(row) for row in drawn["order"]] == [len(row) for row in expected]
    for row, times in zip(drawn["order"], drawn["times"], strict=True):
        assert len({*row}) == len(row) == len(times) and times == sorted(times)
