"""The code of the README and the examples keep the promise as they stand: alone, on one worker and one server, and on
three workers and two servers that are killed, they end with the same bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs import run_program
from test_survival import Cluster

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parent.parent
STEPS, AT, LATER = 12, 4, 8
README = "README.md"
FEWER = {  # what is shown, and the number of steps in it
    README: ("steps=2000", f"steps={STEPS}"), "digits.py": ("steps=200", f"steps={STEPS}"),
    "recommender.py": ("steps=600", f"steps={STEPS}"), "stream.py": ("steps=1000", f"steps={STEPS}"),
    "gan.py": ("default=500", f"default={STEPS}"), "reinforce.py": ("default=60", f"default={STEPS}"),
    "evolution.py": (" = 200, 8,", f" = {STEPS}, 8,"),
}  # fmt: skip
# Runs the code, which waits for the gate at each step. As with OMP_NUM_THREADS=1, which the README says:
# on some processors (AMD's) torch rounds differently with two threads.
SCRIPT = """
import os, runpy, sys, time
from pathlib import Path
import torch
from rallypoint.worker.keys import KeyStore
from rallypoint.worker.loop.micro import Micro
torch.set_num_threads(1)
gate, code = Path(sys.argv[1]), sys.argv[2]
enter, due = Micro.__enter__, KeyStore.due
def wait(step):
    while step >= int(gate.read_text()):
        gate.with_name(f"{os.environ['RALLYPOINT_ID']} waits before {gate.read_text()}").touch()
        time.sleep(0.005)
def entered(self):
    wait(self.step)
    return enter(self)
def gated(self, names, steps):
    for one in due(self, names, steps):
        wait(one.step)
        yield one
Micro.__enter__, KeyStore.due = entered, gated
sys.argv[1:] = []
runpy.run_path(code, run_name="__main__")
"""


def shown(name: str) -> str:
    """The code, as it is shown but for its number of steps."""
    if name == README:
        text = (ROOT / README).read_text()
        (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    else:
        code = (ROOT / "examples" / name).read_text()
    before, after = FEWER[name]
    assert code.count(before) == 1, f"{name} has another number of steps"
    return code.replace(before, after)


def digests(output: str) -> set[str]:
    return set(re.findall(r"(?:models|policy|weights(?: sha256)?) ([0-9a-f]{16,64})$", output, re.MULTILINE))


class Shown(Cluster):
    """Its workers run what is shown."""

    def show(self, name: str, *options: str) -> None:
        code = self.home / f"shown_{Path(name).stem}.py"
        code.write_text(shown(name))
        self.script.write_text(SCRIPT.replace("sys.argv[2]", repr(str(code))))
        self.run(*options)

    def ends_with(self) -> set[str]:
        self.open(STEPS)
        assert self.ended() == 0, self.output
        assert "going back" not in self.output
        return digests(self.output)


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[list[Shown]]:
    made = []
    for name in ("one", "three"):
        (tmp_path / name).mkdir()
        made.append(Shown(tmp_path / name))
    yield made
    for cluster in made:
        cluster.close()


def alone(name: str, home: Path) -> set[str]:
    """What the code ends with as ``python NAME``."""
    (home / "code.py").write_text(shown(name))
    (home / "script.py").write_text(SCRIPT.replace("sys.argv[2]", repr(str(home / "code.py"))))
    (home / "gate").write_text(str(STEPS))
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    status, output = run_program([str(home / "script.py"), str(home / "gate")], home / "output", env=env, cwd=home)
    assert status == 0, output
    return digests(output)


def test_the_readmes_code_ends_with_the_same_bytes_alone_and_on_a_cluster(
    tmp_path: Path, clusters: list[Shown]
) -> None:
    clusters[0].show(README, "--workers", "1", "--servers", "1")
    expected = clusters[0].ends_with()
    assert len(expected) == 1
    assert alone(README, tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", FEWER)
def test_what_is_shown_ends_with_the_same_bytes_alone_and_whatever_is_killed(
    name: str, tmp_path: Path, clusters: list[Shown]
) -> None:
    one, three = clusters
    one.show(name, "--workers", "1", "--servers", "1")
    expected = one.ends_with()
    assert len(expected) == 1
    assert alone(name, tmp_path) == expected
    three.show(name, "--workers", "3", "--servers", "2")
    three.until_at(AT, workers=3)
    three.until(lambda: three.members["exposed"] == 0)  # every shard is on both servers
    three.processes()["server0"].kill()
    three.until(lambda: "server0 was killed (SIGKILL)" in three.output)
    # Four replicas: on a busy machine two workers are as fast as three, and the slowest may stand by meanwhile.
    waiting = three.until_at(LATER, workers=2)
    three.processes()[waiting[-1]].kill()
    three.processes()["coordinator"].kill()
    assert three.ends_with() == expected


def test_the_table_of_examples_has_each_and_says_why_some_cannot_promise_bytes() -> None:
    rows = re.findall(r"^\| (`.*?) \| .*? \| (.*?) \|$", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    said = {name: bytes for names, bytes in rows for name in re.findall(r"`(\S+\.py)`", names)}
    assert sorted(said) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    promised = {name for name, bytes in said.items() if re.match(r"yes($| \()", bytes)}
    assert promised == FEWER.keys() - {README}
    assert all(bytes.startswith(("yes", "no: ", "for ")) for bytes in said.values())
