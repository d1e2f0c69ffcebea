"""The first sentence of a report, and what leaves a run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.core.protocol import Aborted, Finished, Snapshotted, StepDone, Waiting
from rallypoint.launch.engines.cluster import Exit
from rallypoint.launch.folder import REPORTS
from rallypoint.launch.observing.redaction import HIDDEN, LONGEST_LINE, KeptLines, Redaction, secrets_among, secrets_in
from rallypoint.launch.observing.reports import MOST, AutomaticReports, Picture, sentence_of
from rallypoint.launch.observing.stacks import ProcessStacks, StackOwner

OWNER = StackOwner("worker1", "worker", 4711, "node3")
STOPPED = ProcessStacks(OWNER, True, "stopped", "", "", "the process is stopped")
CRASHED = ProcessStacks(StackOwner("worker0", "worker", 12, "node3"), False, "", "Fatal Python error: Aborted", "...")
STEP, WAITS = StepDone(4, 1.0, 8), Waiting("waiting for worker1 on node3, 7 s so far")


@pytest.mark.parametrize(("running", "events", "processes", "sentence"), [
    (True, [STEP], [], "The run goes on after 5 steps."),
    (True, [STEP, WAITS], [], "After 5 steps the run is waiting for worker1 on node3, 7 s so far. The stacks say where "
     "each process is."),
    (True, [WAITS, STEP], [], "The run goes on after 5 steps."),
    (True, [STEP, WAITS], [STOPPED], "After 5 steps worker1 (process 4711 on node3) is stopped; the run is "
     "waiting for worker1 on node3, 7 s so far. `kill -CONT 4711` lets it go on, `kill -KILL 4711` lets "
     "another take its place."),
    (True, [STEP], [CRASHED], "worker0 on node3 crashed: Fatal Python error: Aborted. The run goes on after 5 steps: "
     "in stacks/worker0-12.txt is what it did."),
    (True, [STEP, WAITS], [CRASHED], "After 5 steps the run is waiting for worker1 on node3, 7 s so far. worker0 on "
     "node3 crashed: Fatal Python error: Aborted. The stacks say where each process is."),
    (False, [STEP, Snapshotted("s", 4, 1, 1.0)], [], "The run was interrupted after 5 steps, and nobody runs it now. "
     "`rallypoint resume run` goes on from version 4."),
    (False, [STEP, Aborted("worker0: no memory")], [], "The run failed after 5 steps: worker0: no memory."),
    (False, [STEP, Aborted("worker0: gone")], [CRASHED], "The run failed after 5 steps: worker0: gone. worker0 on "
     "node3 crashed: Fatal Python error: Aborted."),
    (False, [STEP, Finished()], [], "The run has finished after 5 steps."),
    (False, [STEP, Finished(stopped_at=5, why="the operator")], [], "The run has finished after 5 steps: it was "
     "stopped at step 5: the operator."),
    (False, [], [], "Nothing has happened in run: there is no log of events. Is it a run's folder?"),
])  # fmt: skip
def test_it_says_what_happened_to_whom_and_what_to_do(
    running: bool, events: list, processes: list[ProcessStacks], sentence: str
) -> None:
    picture = Picture("run", running=running, processes=processes, silent_s=0.5 if events else None)
    for event in events:
        picture.run.take(event, 0.0)
    assert sentence_of(picture) == sentence


def test_a_stall_leaves_one_report_and_there_are_only_so_many(tmp_path: Path) -> None:
    now = [0.0]
    reports = AutomaticReports(tmp_path, lambda: now[0])

    def made() -> int:
        reports.close()
        return len(list((tmp_path / REPORTS).glob("stall-*.zip")))

    for now[0], done, count in [
        (0.0, -1, 0), (100.0, -1, 0), (101.0, 0, 0), (102.0, 1, 0), (130.0, 1, 0), (133.0, 1, 1), (500.0, 1, 1),
        (501.0, 2, 1), (511.0, 3, 1), (561.0, 3, 1), (612.0, 3, 2), (613.0, -1, 2), (999.0, -1, 2),
    ]:  # fmt: skip
        reports.steps(done)
        assert made() == count, (now[0], done)
    for step in range(4, 30):
        now[0] += 1000.0
        reports.steps(step)
        now[0] += 1000.0
        reports.steps(step)
        reports.close()
    assert made() == MOST
    assert any("no step for" in line for line in reports.said())


def test_a_kill_is_no_crash(tmp_path: Path) -> None:
    reports = AutomaticReports(tmp_path)
    reports.ended("worker0", Exit(137, "SIGKILL"))
    assert not (tmp_path / REPORTS).exists()
    reports.ended("worker0", Exit(139, "SIGSEGV"))
    reports.close()
    assert len(list((tmp_path / REPORTS).glob("crash-*.zip"))) == 1


def test_printed_lines_are_kept_and_bounded(tmp_path: Path) -> None:
    lines = KeptLines(tmp_path, most=2000)
    for number in range(200):
        lines.add("worker0", f"line {number} \x1b[2J")
    lines.close()
    kept = (tmp_path / "console.log.1").read_text() + (tmp_path / "console.log").read_text()
    assert "worker0 | line 199 \\x1b[2J\n" in kept
    assert len(kept) < 6000


def test_no_half_of_a_secret_stands_at_the_end_of_a_long_line(tmp_path: Path) -> None:
    lines = KeptLines(tmp_path, ["open sesame"])
    for spaces in range(1950, 2000):
        lines.add("worker0", f"{'.' * spaces}open sesame")
    lines.close()
    assert "open" not in (tmp_path / "console.log").read_text()


# ---- What leaves a run's folder has no secrets and commands no terminal ----


PLANTED = "Pl4ntedS3cretV4lue"


@pytest.mark.parametrize("text", [
    f"token={PLANTED}", f'{{"token": "{PLANTED}"}}', f"API_KEY: {PLANTED}", f"Authorization: Bearer {PLANTED}",
    f"s3://{PLANTED}:x@bucket/run", f"https://host/path?X-Amz-Signature={PLANTED}&b=2", f"hf_{PLANTED}",
    f"my_secret_thing = '{PLANTED}'", f"-----BEGIN PRIVATE KEY-----\n{PLANTED}\nand more",
    f"{{\\\"password\\\": \\\"{PLANTED}\\\"}}", f"db_password={PLANTED}", f"bearer {PLANTED}",
    f"password='two words {PLANTED}'", f'{{\\"token\\": \\"a,b {PLANTED}\\"}}', f"s3://key:a/{PLANTED}@bucket/run",
    f"started as train.py --db-password {PLANTED} --steps 5",
])  # fmt: skip
def test_what_looks_like_a_secret_goes(text: str) -> None:
    shown = Redaction()(text)
    assert PLANTED not in shown
    assert HIDDEN in shown


def test_a_known_secret_goes_wherever_it_stands() -> None:
    known = [
        *secrets_among({"WANDB_API_KEY": "hunter-two", "HOME": "/home/me"}),
        *secrets_in(["--token", "open-sesame"]),
    ]
    assert Redaction(known)("xhunter-twoy and open-sesame in /home/me") == f"x{HIDDEN}y and {HIDDEN} in /home/me"
    assert Redaction(['six"\\words'])(r'{"text":"in six\"\\words"}') == f'{{"text":"in {HIDDEN}"}}', "as the log has it"
    assert secrets_in(["t.py", "--api-key=abcdefgh", "--steps", "5"]) == ["abcdefgh"]


def test_the_words_of_a_run_stay() -> None:
    text = (
        "worker12 on node-3: replica 5, tokens: 4096, layers.11.attention.query_key_value.weight at step 1234567; "
        "--tokens 4096 https://host:80/path by me@host"
    )
    assert Redaction()(text) == text
    assert Redaction()("0123456789abcdef" * 2) == HIDDEN


def test_the_hash_with_which_a_run_ends_is_no_secret() -> None:
    assert Redaction()(said := f"worker0 | weights sha256 {'0123456789abcdef' * 4}") == said


def test_escapes_are_shown_and_not_obeyed() -> None:
    assert Redaction()("a\x1b[2Jb\x07\u202e\nnext\tcolumn") == "a\\x1b[2Jb\\x07\\u202e\nnext    column"


def test_a_long_line_is_cut_and_takes_no_time() -> None:
    # A pattern that is quadratic in the text's length would run into the test's time limit.
    for piece in ("a", "token", "x://", "token=", "A1", "?&", "-----BEGIN ", "bearer "):
        assert len(Redaction()(piece * (200_000 // len(piece)))) < LONGEST_LINE + 4000
