"""The entrypoint of a rendered RayJob, on a Ray cluster of this machine with the nodes that KubeRay would make."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from manifests import rendered, the
from test_pods import SCRIPT, wanted

from support.programs import run_program

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

from ray_nodes import no_leaks, ray_nodes

__all__ = ["wanted"]  # a fixture

pytest.importorskip("ray")
pytestmark = [pytest.mark.programs, pytest.mark.slow, pytest.mark.timeout(600)]  # as other jobs on Ray


@pytest.fixture(autouse=True)
def _leak_police() -> Iterator[None]:
    yield from no_leaks()


def test_the_entrypoint_of_a_ray_job_makes_the_same_bytes(wanted: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "gate").touch()
    script = str(tmp_path / "train.py")
    spec = the("RayJob", rendered(script, "digest", "20", kind="kuberay", workers="2", servers=2))["spec"]
    cluster = spec["rayClusterSpec"]
    (nodes,) = cluster["workerGroupSpecs"]
    cpus = [float(nodes["rayStartParams"]["num-cpus"])] * nodes["replicas"]
    words = [word.replace("/rallypoint/", f"{tmp_path}/") for word in shlex.split(spec["entrypoint"])]
    with ray_nodes(float(cluster["headGroupSpec"]["rayStartParams"]["num-cpus"]), *cpus, connect=False):
        status, text = run_program(
            ["-m", "rallypoint.cli", *words[1:]], tmp_path / "output", env={**os.environ}, cwd=tmp_path, timeout=300.0
        )
    assert status == 0, text
    assert (tmp_path / "gpt" / "digest").read_text() == wanted
