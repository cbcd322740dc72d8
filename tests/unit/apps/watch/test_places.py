"""Folders elsewhere, as fsspec shows them: a whole dashboard over S3, and few requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fastapi.testclient import TestClient
from made_runs import make_run

from posttrain.apps.watch.access import Access
from posttrain.apps.watch.app import create_app
from posttrain.apps.watch.catalogue import Catalogue
from posttrain.apps.watch.metric_table import MetricTable
from posttrain.apps.watch.places import RemotePlace, place_of
from posttrain.errors import InputError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class CountingFileSystem:
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.num_listings = 0

    def ls(self, path: str, **options: Any) -> Any:
        self.num_listings += 1
        return self.inner.ls(path, detail=options["detail"])

    def cat_file(self, path: str, start: int, end: int) -> Any:
        return self.inner.cat_file(path, start=start, end=end)


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def test_growing_remote_file_is_read_from_its_last_end(memory: Any) -> None:
    clock, counted = Clock(), CountingFileSystem(memory)
    memory.pipe("/runs/a/metrics.jsonl", b'{"step": 1, "train/reward": 1.0}\n')
    place = RemotePlace(counted, "/runs/a", "memory://runs/a", clock)
    table = MetricTable(place).refresh()
    assert table.last_step == 1
    memory.pipe("/runs/a/metrics.jsonl", b'{"step": 1, "train/reward": 1.0}\n{"step": 2, "train/reward": 2.0}\n')
    assert table.refresh().last_step == 1, "a listing is kept for a moment"
    clock.now += 2
    assert table.refresh().last_step == 2
    assert counted.num_listings == 2


def test_empty_remote_folder_is_refused(memory: Any) -> None:
    with pytest.raises(InputError, match="memory://nothing"):
        place_of("memory://nothing")


def test_runs_on_s3_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs = pytest.importorskip("s3fs", reason="the s3 extra is not installed")
    moto_server = pytest.importorskip("moto.server", reason="the dev extra is not installed")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        local = make_run(tmp_path / "qwen3-0.6b", steps=10, sick=True)
        filesystem = s3fs.S3FileSystem()
        filesystem.mkdir("runs-bucket")
        filesystem.put(str(local), "runs-bucket/results/qwen3-0.6b", recursive=True)
        catalogue = Catalogue([place_of("s3://runs-bucket/results")])
        client = TestClient(create_app(catalogue, Access(None)), base_url="http://127.0.0.1")
        (run,) = client.get("/api/runs").json()["runs"]
        assert (run["name"], run["step"], run["findings"]["error"]) == ("qwen3-0.6b", 10, 1)
        path = f"/api/runs/{run['id']}"
        assert len(client.get(f"{path}/curves", params={"key": "train/reward"}).json()["train/reward"]["steps"]) == 10
        assert client.get(f"{path}/rollouts/train").json() == {"steps": list(range(1, 11)), "with_tokens": [10]}
        group = client.get(f"{path}/rollouts/train/10/2").json()["group"]
        assert len(group["completions"]) == 4
        assert client.get(f"{path}/tokens/10/{group['draw']}/0").json()["pieces"]
        assert client.get(f"{path}/rollouts/train/search", params={"q": "boxed"}).json()["hits"]
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()
