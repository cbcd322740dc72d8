"""The HTTP interface of the dashboard: JSON from run folders, a stream of changes, and the page itself; and its server.

Everything is named by ids, steps and indices: no request contains a path, and no answer does. All requests read.
"""

import asyncio
import json
import math
import mimetypes
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, TypeVar

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi import Path as PathPart
from fastapi.responses import Response, StreamingResponse

from posttrain.apps.serve.listener import listen, url_of
from posttrain.apps.watch.access import COOKIE, Access, Guard
from posttrain.apps.watch.catalogue import Catalogue
from posttrain.apps.watch.places import Unreadable, read_whole
from posttrain.apps.watch.rollout_filters import Filters, Range
from posttrain.apps.watch.rollout_store import Cursor, Kind, token_table
from posttrain.apps.watch.run_view import RunView, config_differences
from posttrain.apps.watch.shipping import pipeline_page, pipeline_row, registry_page
from posttrain.errors import InputError
from posttrain.files.json_files import parse_json
from posttrain.reporting.image_files import media_type
from posttrain.reporting.run_files import IMAGES_FOLDER

T = TypeVar("T")

MAX_POINTS = 1000
MAX_IMAGE_BYTES = 1 << 20
MAX_KEYS = 64
MAX_LOGIN_BYTES = 16 * 1024
UNREADABLE_STATUS = 422
CHANGE_PERIOD_S = 0.7
PING_S = 15.0
MAX_STREAMS = 64  # of changes, at once; further browsers ask again later
_FLUSH_S = 1  # for answers that are being sent; streams of changes end by themselves
ASSETS = files("posttrain.apps.watch") / "assets"
SHARED = files("posttrain.reporting") / "assets"  # with the pages that a run writes


def as_json(value: object) -> bytes:
    """Numbers that JSON does not have, which a damaged file may hold, become null."""
    try:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=str)
    return text.encode("utf-8", "backslashreplace")


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class UiResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return as_json(content)


def filters_of(
    q: Annotated[str, Query(max_length=500)] = "",
    task: Annotated[str, Query(max_length=500)] = "",
    reward_min: float | None = None,
    reward_max: float | None = None,
    spread_min: float | None = None,
    spread_max: float | None = None,
    length_min: float | None = None,
    length_max: float | None = None,
    part: Annotated[str, Query(max_length=200)] = "",
    part_min: float | None = None,
    part_max: float | None = None,
    finish: Annotated[str, Query(max_length=20)] = "",
    error: bool | None = None,
) -> Filters:
    return Filters(
        text=q,
        task=task,
        reward=Range(reward_min, reward_max),
        spread=Range(spread_min, spread_max),
        length=Range(length_min, length_max),
        part=part,
        part_value=Range(part_min, part_max),
        finish=finish,
        error=error,
    )


def stamps(catalogue: Catalogue, run_id: str | None) -> dict[str, object]:
    """The stamps of the files of one run, or of all; by id."""
    runs = catalogue.runs
    if run_id is not None:
        runs = {run_id: runs[run_id]} if run_id in runs else {}
    return {one: run.stamps() for one, run in runs.items()}


def catalogue_of(request: Request) -> Catalogue:
    found: Catalogue = request.app.state.catalogue
    return found


Known = Annotated[Catalogue, Depends(catalogue_of)]


def run_of(run_id: str, catalogue: Known) -> RunView:
    found = catalogue.run(run_id)
    if found is None:
        raise HTTPException(404, "no such run")
    return found


Run = Annotated[RunView, Depends(run_of)]
router = APIRouter(prefix="/api")


def _known(found: Mapping[str, T], name: str) -> T:
    if name not in found:
        raise HTTPException(404, "not found")
    return found[name]


# -------------------------------------------------------------- runs


@router.get("/runs")
def runs(catalogue: Known) -> UiResponse:
    return UiResponse({"now": time.time(), "runs": [run.row() for run in catalogue.runs.values()]})


@router.get("/runs/{run_id}")
def run_page(run: Run) -> UiResponse:
    return UiResponse({"now": time.time(), **run.page()})


@router.get("/runs/{run_id}/curves")
def curves(
    run: Run,
    key: Annotated[list[str], Query(max_length=MAX_KEYS)],
    points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 300,
    first: int | None = None,
    last: int | None = None,
) -> UiResponse:
    return UiResponse({name: run.metrics.curve(name, points, first, last) for name in key})


@router.get("/runs/{run_id}/doctor")
def doctor(run: Run, again: bool = False) -> UiResponse:
    found = run.examined() if again else run.findings
    return UiResponse({"findings": [one.to_json() for one in found], "unscored": run.unscored()})


@router.get("/runs/{run_id}/cluster")
def cluster(run: Run) -> UiResponse:
    return UiResponse(run.cluster())


@router.get("/runs/{run_id}/config")
def config(run: Run) -> UiResponse:
    return UiResponse({"configs": [{"from_step": step, "text": text} for step, text in run.configs().items()]})


@router.get("/config-differences")
def differences(catalogue: Known, run: Annotated[list[str], Query(min_length=2, max_length=8)]) -> UiResponse:
    return UiResponse(config_differences([run_of(one, catalogue) for one in run]))


# ------------------------------------------------------------------------------------------- rollouts


@router.get("/runs/{run_id}/rollouts/{kind}")
def steps(run: Run, kind: Kind) -> UiResponse:
    return UiResponse({"steps": run.rollouts.steps(kind), "with_tokens": run.rollouts.steps(kind, with_tokens=True)})


@router.get("/runs/{run_id}/rollouts/{kind}/search")
def search(
    run: Run,
    kind: Kind,
    filters: Annotated[Filters, Depends(filters_of)],
    step: Annotated[int | None, Query(ge=0)] = None,
    index: Annotated[int, Query(ge=0)] = 0,
) -> UiResponse:
    found = run.rollouts.search(kind, filters, None if step is None else Cursor(step, index))
    cursor = None if found.cursor is None else {"step": found.cursor.step, "index": found.cursor.index}
    return UiResponse({"hits": found.hits, "cursor": cursor, "num_steps_left": found.num_steps_left})


@router.get("/runs/{run_id}/rollouts/{kind}/{step}")
def step_groups(
    run: Run,
    kind: Kind,
    step: int,
    filters: Annotated[Filters, Depends(filters_of)],
    sort: str = "order",
    offset: Annotated[int, Query(ge=0)] = 0,
) -> UiResponse:
    found = run.rollouts.listing(kind, step, filters, sort, offset)
    return UiResponse(
        {
            "total": found.num_groups,
            "matching": found.num_matching,
            "groups": found.groups,
            "offset": offset,
            "unreadable": found.num_unreadable,
            "is_cut": found.is_cut,
        }
    )


@router.get("/runs/{run_id}/rollouts/{kind}/{step}/{index}")
def group(run: Run, kind: Kind, step: int, index: Annotated[int, PathPart(ge=0)]) -> UiResponse:
    found = run.rollouts.group(kind, step, index)
    if found is None:
        raise HTTPException(404, "no such group")
    lines = run.rollouts.lines(kind, step)
    return UiResponse({"group": found, "num_groups": len(lines) if lines else 0})


@router.get("/runs/{run_id}/images/{name}")
def image(run: Run, name: Annotated[str, PathPart(max_length=80)]) -> Response:
    """An image of a prompt. Its type follows from its content, and other content is not sent."""
    content = read_whole(run.place, f"{IMAGES_FOLDER}/{name}", MAX_IMAGE_BYTES) if media_type(name, b"BM") else b""
    kind = media_type(name, content)
    if kind is None:
        raise HTTPException(404, "no such image")
    return Response(content, media_type=kind, headers={"Cache-Control": "private, max-age=86400"})


@router.get("/runs/{run_id}/tokens/{step}/{draw}/{sample}")
def tokens(run: Run, step: int, draw: int, sample: int) -> UiResponse:
    found = token_table(run.place, step, draw, sample)
    if found is None:
        raise HTTPException(404, "no token data of this answer")
    return UiResponse(found)


# ------------------------------------------------------------------------------------------- pipelines and registries


@router.get("/pipelines")
def pipelines(catalogue: Known) -> UiResponse:
    return UiResponse({"pipelines": [pipeline_row(one, home) for one, home in catalogue.pipelines.items()]})


@router.get("/pipelines/{pipeline_id}")
def pipeline(catalogue: Known, pipeline_id: str) -> UiResponse:
    return UiResponse(pipeline_page(pipeline_id, _known(catalogue.pipelines, pipeline_id)))


@router.get("/registries")
def registries(catalogue: Known) -> UiResponse:
    found = catalogue.registries
    names = {one: Path(where).name if isinstance(where, str) else where.name for one, where in found.items()}
    return UiResponse({"registries": [{"id": one, "name": name} for one, name in names.items()]})


@router.get("/registries/{registry_id}")
def registry(catalogue: Known, registry_id: str) -> UiResponse:
    return UiResponse(registry_page(_known(catalogue.registries, registry_id)))


# ------------------------------------------------------------------------------------------- changes, login, files


@router.get("/events")
async def events(request: Request, catalogue: Known, run: str | None = None) -> StreamingResponse:
    async def stream() -> AsyncIterator[str]:
        state = request.app.state
        if state.num_streams >= MAX_STREAMS:
            yield "retry: 30000\n\n"
            return
        state.num_streams += 1
        try:
            yield "retry: 1000\n\n"
            seen, quiet_s = await asyncio.to_thread(stamps, catalogue, run), 0.0
            while not state.is_ending() and not await request.is_disconnected():
                await asyncio.sleep(CHANGE_PERIOD_S)
                found = await asyncio.to_thread(stamps, catalogue, run)
                changed = [one for one in {**seen, **found} if seen.get(one) != found.get(one)]
                quiet_s = 0.0 if changed else quiet_s + CHANGE_PERIOD_S
                if changed:
                    yield f"event: change\ndata: {as_json(changed).decode()}\n\n"
                elif quiet_s > PING_S:
                    quiet_s = 0.0
                    yield ": still here\n\n"
                seen = found
        finally:
            state.num_streams -= 1

    return StreamingResponse(stream(), media_type="text/event-stream")


@router.post("/login")
async def login(request: Request) -> UiResponse:
    """The body is an object with the token. It is read before anything is proved, so it is short."""
    access: Access = request.app.state.access
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_LOGIN_BYTES:
            raise HTTPException(413, f"more than {MAX_LOGIN_BYTES} bytes")
    try:
        given = parse_json(bytes(content))["token"]
    except (ValueError, TypeError, KeyError):
        raise HTTPException(422, "expected an object with the token") from None
    if not isinstance(given, str) or not access.is_token(given):
        raise HTTPException(401, "this is not the token")
    answer = UiResponse({})
    answer.set_cookie(COOKIE, access.cookie, httponly=True, samesite="strict", max_age=30 * 86400)
    return answer


def create_app(catalogue: Catalogue, access: Access, is_ending: Callable[[], bool] = lambda: False) -> FastAPI:
    app = FastAPI(
        title="posttrain watch", docs_url=None, redoc_url=None, openapi_url=None, default_response_class=UiResponse
    )
    app.state.catalogue, app.state.access, app.state.is_ending = catalogue, access, is_ending
    app.state.num_streams = 0
    app.add_middleware(Guard, access=access)
    app.include_router(router)

    @app.exception_handler(InputError)
    def unreadable(request: Request, error: InputError) -> UiResponse:
        """The text of other errors may name a path."""
        reason = str(error) if isinstance(error, Unreadable) else "a record cannot be read"
        return UiResponse({"error": reason}, UNREADABLE_STATUS)

    _add_files(app)
    return app


def _add_files(app: FastAPI) -> None:
    """The page: a fixed list of files, read once."""
    shared = [("", SHARED / name) for name in ("theme.css", "chart.css", "chart.js")]
    own = [(prefix, entry) for prefix in ("", "pages/") for entry in (ASSETS / prefix).iterdir() if entry.is_file()]
    served: dict[str, tuple[bytes, str]] = {}
    for prefix, entry in [*shared, *own]:
        kind = "text/javascript" if entry.name.endswith(".js") else mimetypes.guess_type(entry.name)[0]
        served[prefix + entry.name] = (entry.read_bytes(), kind or "application/octet-stream")

    @app.get("/{name:path}")
    def file(name: str) -> Response:
        content, kind = served.get(name or "index.html", (None, ""))
        if content is None:
            raise HTTPException(404, "not found")
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})


class WatchServer(uvicorn.Server):
    def __init__(self, catalogue: Catalogue, access: Access, on_ready: Callable[[], None] = lambda: None) -> None:
        app = create_app(catalogue, access, is_ending=lambda: self.should_exit)
        config = uvicorn.Config(
            app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=_FLUSH_S
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def run(catalogue: Catalogue, access: Access, host: str, port: int, *, on_ready: Callable[[str], None]) -> int:
    """Serve until a signal."""
    with listen(host, port) as listener:
        server = WatchServer(catalogue, access, lambda: on_ready(url_of(listener)))
        server.run(sockets=[listener])
    print("posttrain watch: ended", file=sys.stderr)
    return 0
