"""A page that lays the curves of several runs over each other. It can only be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rallypoint.watch.follow import Follower
from rallypoint.watch.locked import Lock, file, healthy, middleware
from rallypoint.watch.state import RunState

_FILES = {"": "compare.html", **{name: name for name in ("ask.js", "compare.js", "page.css", "uplot.js", "uplot.css")}}


class Comparison:
    """The application for several runs: ``Comparison({name: follower}, {name: settings}, token).app``.

    ``GET /runs`` has all of them; ``/runs?seen=STATE`` answers 204 while nothing has changed since that state.
    """

    def __init__(
        self, followers: Mapping[str, Follower], settings: Mapping[str, Mapping[str, str]], token: str
    ) -> None:
        self._followers, self.closing, lock = followers, False, Lock(token)
        self._differ = _differing(settings)
        routes = [Route("/healthz", healthy), Route("/runs", lock(self._runs))]
        routes += [Route(f"/{path}", file(name)) for path, name in _FILES.items()]
        self.app = Starlette(routes=routes, middleware=middleware())

    async def _runs(self, request: Request) -> Response:
        state = "-".join(f"{one.generation}.{one.run.revision}" for one in self._followers.values())
        if request.query_params.get("seen") == state:
            return Response(status_code=204)
        runs = []
        for name, follower in self._followers.items():
            with follower.lock:
                runs.append({"name": name, **_told(follower.run), "settings": self._differ.get(name, {})})
        return Response(msgspec.json.encode({"state": state, "runs": runs}), media_type="application/json")


def _told(run: RunState) -> dict[str, Any]:
    times = run.times
    curves = {**run.curves, **{f"{name} (evaluation)": curve for name, curve in run.evaluations.items()}}
    return {
        "step": run.step, "steps": 0 if run.plan is None else run.plan.steps, "ended": run.ended, "why": run.why,
        "p50": times.quantile(0.5), "p99": times.quantile(0.99), "goodput": round(times.goodput, 4),
        "stalls": times.stalls, "curves": {
            name: {key: column for key, column in curve.columns().items() if key in ("step", "mean")}
            for name, curve in curves.items()
        },
    }  # fmt: skip


def _differing(settings: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """For each run the settings that are not the same in all of them."""
    names = {name for own in settings.values() for name in own}
    differ = sorted(name for name in names if len({own.get(name, "") for own in settings.values()}) > 1)
    return {run: {name: own.get(name, "") for name in differ} for run, own in settings.items()}
