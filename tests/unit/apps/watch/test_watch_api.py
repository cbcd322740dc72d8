"""The HTTP interface of the dashboard, without a browser."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from made_runs import append, conversation_group, make_run, metrics_row, write_attempt, write_groups, write_step
from starlette.websockets import WebSocketDisconnect

from posttrain.apps.serve.options import host_of, is_loopback
from posttrain.apps.watch.access import Access
from posttrain.apps.watch.app import create_app, stamps
from posttrain.apps.watch.catalogue import Catalogue
from posttrain.apps.watch.places import LocalPlace

TOKEN = "0123456789abcdef-token"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("results")
    make_run(home / "good", steps=40)
    make_run(home / "nested" / "sick", steps=60, sick=True)
    return home


def client_of(home: Path, access: Access | None = None, ticks: Callable[[], float] = time.monotonic) -> TestClient:
    catalogue = Catalogue([LocalPlace(home)], ticks=ticks)
    return TestClient(create_app(catalogue, access or Access(None)), base_url="http://127.0.0.1")


@pytest.fixture(scope="module")
def client(results: Path) -> TestClient:
    return client_of(results)


def ids(client: TestClient) -> dict[str, str]:
    return {run["name"]: run["id"] for run in client.get("/api/runs").json()["runs"]}


def get(client: TestClient, path: str, **params: Any) -> Any:
    answer = client.get(f"/api/{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---------------------------------------------------------------------- runs


def test_runs_are_listed_with_their_state(client: TestClient) -> None:
    runs = {run["name"]: run for run in get(client, "runs")["runs"]}
    assert set(runs) == {"good", "nested/sick"}
    assert (runs["good"]["status"], runs["good"]["step"], runs["good"]["findings"]["error"]) == ("finished", 40, 0)
    assert runs["nested/sick"]["findings"]["error"] == 1
    assert {name: run["health"] for name, run in runs.items()} == {"good": "healthy", "nested/sick": "error"}
    assert runs["good"]["headline"]["value"] == pytest.approx(0.6, abs=0.2)


def test_run_page_names_what_is_out_of_range(client: TestClient) -> None:
    page = get(client, f"runs/{ids(client)['nested/sick']}")
    levels = {vital["title"]: vital["level"] for vital in page["vitals"]}
    assert levels["KL to the reference"] == "error"
    assert levels["Groups with signal"] == "good"
    assert page["marks"] == {"resumes": [20], "saves": [20, 40, 60]}
    assert page["all_findings"][0]["rule"] == "kl-runaway"
    assert page["num_answers"] == 32 * page["step"]
    bands = next(chart["bands"] for chart in page["charts"] if chart["title"] == "KL to the reference")
    assert [(band["level"], band["above"]) for band in bands] == [("warning", 0.1), ("error", 0.5)]


def test_relative_thresholds_follow_from_the_start_of_the_run(client: TestClient) -> None:
    page = get(client, f"runs/{ids(client)['good']}")
    (warning, error) = next(chart["bands"] for chart in page["charts"] if chart["title"] == "Approximate entropy")
    assert warning["below"] == pytest.approx(0.2 * 0.61, rel=0.05)
    assert error["below"] == pytest.approx(0.05 * 0.61, rel=0.05)


def test_curves_have_no_more_points_than_asked_for(client: TestClient) -> None:
    curve = get(client, f"runs/{ids(client)['good']}/curves", key="train/reward", points=10)["train/reward"]
    assert len(curve["steps"]) == len(curve["mean"]) == len(curve["low"]) == 10
    assert curve["steps"][-1] == 40


def test_config_differences_name_the_setting(client: TestClient) -> None:
    found = get(client, "config-differences", run=list(ids(client).values()))
    assert [row["key"] for row in found["differences"]] == ["policy.optimizer.kwargs.lr"]
    assert found["num_equal"] == 4


def test_run_can_be_examined_again_with_todays_rules(client: TestClient) -> None:
    run = ids(client)["nested/sick"]
    written = {one["rule"] for one in get(client, f"runs/{run}/doctor")["findings"]}
    examined = {one["rule"] for one in get(client, f"runs/{run}/doctor", again=True)["findings"]}
    assert written == {"kl-runaway"}
    assert {"kl-runaway", "truncated"} <= examined


def test_ranks_and_phases_come_from_workers_jsonl(client: TestClient) -> None:
    found = get(client, f"runs/{ids(client)['good']}/cluster")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    assert found["phases"][-1]["phase"] == "Training policy"
    assert found["attempts"][0]["holder"]["host"] == "node-a"


def test_run_without_a_heartbeat_is_not_shown_as_running(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3, status="running")
    client = client_of(tmp_path)
    assert get(client, "runs")["runs"][0]["status"] == "running"
    write_attempt(folder, ended=False, heartbeat=time.time() - 3600)
    (run,) = get(client, "runs")["runs"]
    assert run["status"] == "no heartbeat"
    assert "60 min ago" in run["reason"]


def test_new_step_and_new_run_appear(tmp_path: Path) -> None:
    folder, now = make_run(tmp_path / "run", steps=3, status="running"), [1000.0]
    client = client_of(tmp_path, ticks=lambda: now[0])
    run = ids(client)["run"]
    assert get(client, f"runs/{run}")["step"] == 3
    write_step(folder, 4)
    assert get(client, f"runs/{run}")["step"] == 4
    assert get(client, f"runs/{run}/rollouts/train")["steps"] == [1, 2, 3, 4]
    make_run(tmp_path / "second", steps=1)
    now[0] += 2.1
    assert set(ids(client)) == {"run", "second"}


def test_folder_that_is_a_run_is_shown_by_its_name(results: Path) -> None:
    assert set(ids(client_of(results / "good"))) == {"good"}


def test_new_and_damaged_folders_are_shown(tmp_path: Path) -> None:
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "run.json").write_text('{"title": "Young", "status": "running"}')
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("[1, 2")
    (tmp_path / "damaged" / "metrics.jsonl").write_text('{"step": 1, "train/reward": NaN}\n{"step": 2, "train/loss": 1')
    (tmp_path / "damaged" / "findings.jsonl").write_text('{"step": 1, "rule": 3}\n')
    (tmp_path / "damaged" / "config.yaml").write_text(": : :")
    client = client_of(tmp_path)
    for run in ids(client).values():
        for page in ("", "/doctor", "/cluster", "/config", "/rollouts/train", "/rollouts/train/search?q=x"):
            get(client, f"runs/{run}{page}")
        get(client, "config-differences", run=[run, run])


# ---------------------------------------------------------------------- rollouts and tokens


def test_every_group_of_a_step_can_be_read(client: TestClient) -> None:
    run = ids(client)["good"]
    found = get(client, f"runs/{run}/rollouts/train/7")
    assert (found["total"], len(found["groups"])) == (6, 6)
    group = get(client, f"runs/{run}/rollouts/train/7/5")["group"]
    assert len(group["completions"]) == 4
    assert group["completions"][0]["text"]


def test_groups_are_sorted_and_filtered(client: TestClient) -> None:
    run = ids(client)["good"]
    means = [one["mean"] for one in get(client, f"runs/{run}/rollouts/train/7", sort="reward")["groups"]]
    assert means == sorted(means, reverse=True)
    found = get(client, f"runs/{run}/rollouts/train/7", reward_min=1.0)
    assert all(max(one["rewards"]) >= 1.0 for one in found["groups"])


def test_prompt_is_found_over_steps(client: TestClient) -> None:
    run = ids(client)["good"]
    hits = get(client, f"runs/{run}/rollouts/train/search", task="sums:3")["hits"]
    assert [hit["step"] for hit in hits] == list(range(37, 0, -4))


def test_tokens_have_a_value_for_every_piece(client: TestClient) -> None:
    run = ids(client)["good"]
    group = get(client, f"runs/{run}/rollouts/train/10/0")["group"]
    found = get(client, f"runs/{run}/tokens/10/{group['draw']}/1")
    assert "".join(found["pieces"]).strip() == group["completions"][1]["text"].strip()
    for name in ("logprob", "difference", "kl", "advantage", "ids", "trained"):
        assert len(found[name]) == len(found["pieces"])
    assert min(found["kl"]) >= 0
    assert client.get(f"/api/runs/{run}/tokens/11/{group['draw']}/1").status_code == 404


def test_rollouts_are_served_as_json_without_sniffing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1)
    write_groups(folder, 1, [conversation_group()])
    client = client_of(tmp_path)
    answer = client.get(f"/api/runs/{ids(client)['run']}/rollouts/train/1/0")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


# ---------------------------------------------------------------------- safety


def test_answers_have_no_path_and_requests_take_none(client: TestClient, results: Path) -> None:
    run = ids(client)["good"]
    for page in ("runs", f"runs/{run}", f"runs/{run}/cluster", f"runs/{run}/config", f"runs/{run}/doctor"):
        assert str(results) not in client.get(f"/api/{page}").text
    for attack in ("..%2f..%2fetc", "%2e%2e", "good", str(results).replace("/", "%2f")):
        assert client.get(f"/api/runs/{attack}").status_code == 404
        assert client.get(f"/api/runs/{run}/rollouts/train/{attack}").status_code in (404, 422)
    for name in ("../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "pages/../../app.py"):
        assert client.get(f"/{name}").status_code == 404


def test_page_may_load_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "://" not in page.text


def test_other_host_names_are_refused_without_a_token(client: TestClient) -> None:
    assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 421
    assert client.get("/", headers={"host": "evil.example:8411"}).status_code == 421
    assert client.get("/api/runs", headers={"host": "localhost:8411"}).status_code == 200
    assert client.get("/api/runs", headers={"host": "[::1]:8411"}).status_code == 200


def test_data_needs_the_token(results: Path) -> None:
    client = client_of(results, Access(TOKEN))
    for path in ("/api/runs", "/api/events", "/api/pipelines", "/api/unknown"):
        assert client.get(path).status_code == 401
    assert client.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}x"}).status_code == 401
    assert client.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert client.get("/").status_code == 200, "the page itself asks for the token"
    assert client.post("/api/login", json={"token": "wrong"}).status_code == 401
    assert client.get("/api/runs").status_code == 401
    login = client.post("/api/login", json={"token": TOKEN})
    assert "httponly" in login.headers["set-cookie"].lower()
    assert "samesite=strict" in login.headers["set-cookie"].lower()
    assert TOKEN not in login.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200


def test_run_folders_are_not_written(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3, sick=True)
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    client = client_of(tmp_path)
    run = ids(client)["run"]
    for page in (
        "",
        "/doctor?again=true",
        "/cluster",
        "/config",
        "/rollouts/train",
        "/rollouts/train/2",
        "/rollouts/train/search?q=the",
    ):
        get(client, f"runs/{run}{page}")
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before
    assert folder.is_dir()


def test_requests_other_than_reading_are_refused(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/api/runs").status_code == 405


# ---------------------------------------------------------------------- memory


def test_metrics_of_unused_runs_are_dropped_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        rows = [metrics_row(step, noise=random.Random(step)) for step in range(1, 101)]
        append(tmp_path / name / "metrics.jsonl", *rows)
    catalogue = Catalogue([LocalPlace(tmp_path)])
    runs = catalogue.runs
    one = catalogue.run(next(iter(runs)))
    assert one is not None
    limit = int(1.5 * one.metrics.num_bytes)
    monkeypatch.setattr("posttrain.apps.watch.catalogue.TABLE_BYTES", limit)
    for run_id in runs:
        assert catalogue.run(run_id) is not None
        assert sum(run.metrics.num_bytes for run in runs.values()) <= limit


def test_written_step_changes_the_stamps_of_its_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1, status="running")
    make_run(tmp_path / "other", steps=1)
    catalogue = Catalogue([LocalPlace(tmp_path)])
    before = stamps(catalogue, None)
    assert stamps(catalogue, None) == before
    write_step(folder, 2)
    after = stamps(catalogue, None)
    changed = [run for run in after if after[run] != before[run]]
    assert [catalogue.runs[run].name for run in changed] == ["run"]
    assert stamps(catalogue, changed[0]) == {changed[0]: after[changed[0]]}
    assert stamps(catalogue, "unknown") == {}


def test_streams_of_changes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.apps.watch.app.MAX_STREAMS", 1)
    app = create_app(Catalogue([LocalPlace(tmp_path)]), Access(None))
    first = TestClient(app, base_url="http://127.0.0.1")
    app.state.num_streams = 1
    assert first.get("/api/events").text == "retry: 30000\n\n"
    app.state.num_streams, app.state.is_ending = 0, lambda: True
    assert first.get("/api/events").text == "retry: 1000\n\n"
    assert app.state.num_streams == 0


PATHS = "//api/runs /./api/runs /x/../api/runs /api%2Fruns /API/runs /api;x/runs /%61pi/runs /api/./runs"
HOSTS = """localhost.evil.example evil.example#localhost localhost@evil.example evil@localhost [::1].evil.example
127.0.0.1.evil.example:8411 ::1.evil.example 0x7f.1 [::1%25eth0] [::1]evil localhost/evil.example localhost:80:80"""


@pytest.mark.parametrize("path", PATHS.split())
def test_no_spelling_of_a_path_gets_round_the_token(results: Path, path: str) -> None:
    answer = client_of(results, Access(TOKEN)).get(f"http://127.0.0.1{path}")
    assert answer.status_code in (401, 404)
    assert "runs" not in answer.text


@pytest.mark.parametrize("host", [*HOSTS.split(), "", "localhost evil.example"])
def test_no_spelling_of_a_host_passes_for_this_machine(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 421
    assert not is_loopback(host_of(host)), "what posttrain serve asks"


@pytest.mark.parametrize(
    "headers",
    [
        {"cookie": "posttrain_watch=" + "a" * 60_000},
        {"cookie": 'posttrain_watch="\\377\\000"; posttrain_watch=x'},
        {"cookie": ";=;,=,$Version=1;posttrain_watch"},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}, Bearer x"},
        {"x-forwarded-host": "localhost", "x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1;host=localhost"},
        {"x-original-url": "/", "x-rewrite-url": "/", "x-http-method-override": "POST"},
    ],
)
def test_no_header_replaces_the_token(results: Path, headers: dict[str, str]) -> None:
    assert client_of(results, Access(TOKEN)).get("/api/runs", headers=headers).status_code == 401


def test_there_is_no_socket_behind_the_guard(results: Path) -> None:
    with pytest.raises(WebSocketDisconnect), client_of(results, Access(TOKEN)).websocket_connect("/api/events"):
        pass
