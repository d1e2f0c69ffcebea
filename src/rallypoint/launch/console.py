"""The output of a run for a person: a live progress line in a terminal, occasional plain lines in a file."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.control import strip_control_codes
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Column
from rich.text import Text

from rallypoint.core import protocol
from rallypoint.core.shard.clip import phrase
from rallypoint.core.typed import counted, named
from rallypoint.errors import StartAgain, to_resume
from rallypoint.launch.engines.cluster import Exit
from rallypoint.launch.plan import Launch
from rallypoint.observe.lenient import Lenient, Unhurried
from rallypoint.store.manifest import age
from rallypoint.watch.state import RunState

_TRACEBACK = "Traceback (most recent call last):"
_SYNTAX = '  File "'  # the first line of a SyntaxError's report, which has no traceback header
_SENTENCE = "error: "  # how our own errors begin
_HELD_S = 3.0  # seconds: a process that lives on for so long after a traceback has only logged it
_MOST_HELD = 10_000  # lines: more than the traceback of a recursion has
_LAST_WORD_S = 1.0  # seconds in which the coordinator may say that this error has failed the run
_QUIET = ("KeyboardInterrupt", "SystemExit")


@dataclass(frozen=True, slots=True)
class ShownLine:
    """A line to show, and the process that printed it."""

    process: str
    text: str


@dataclass(slots=True)
class Output:
    """The lines of all processes. An error is held back until its process ends or continues.

    Two processes ended alike if their errors have one type and come from the same lines of code. One of our own errors
    (``error: ...``) is held back a little longer, because the final line ``failed: ...`` may repeat it.
    """

    ending: bool = False  # we are ending the processes: do not show what they print about that
    # process -> when it began with an error, and its lines from there on
    _held: dict[str, tuple[float, list[str]]] = field(default_factory=dict)
    _shown: dict[str, list[str]] = field(default_factory=dict)  # kind of error -> the processes that ended with it
    _last: dict[str, str] = field(default_factory=dict)  # process -> the sentence of ours that it ended with
    # (when it ended, the process, its lines)
    _sentences: list[tuple[float, str, list[str]]] = field(default_factory=list)
    _asked: set[str] = field(default_factory=set)  # the processes that want another one in their place

    def line(self, process: str, text: str, now: float) -> list[ShownLine]:
        """`process` has printed a line. Returns the lines to show now."""
        if text.endswith(StartAgain.LINE):  # a progress bar may stand before it, without an end of its line
            self._asked.add(process)
            text = text.removesuffix(StartAgain.LINE).rstrip()
            return [ShownLine(process, text)] if text and not self.ending else []
        held = self._held.get(process)
        if held is None and (text == _TRACEBACK or text.startswith((_SENTENCE, _SYNTAX))):
            held = self._held[process] = now, []
        if held is None:
            return [] if self.ending else [ShownLine(process, text)]
        held[1].append(text)
        if len(held[1]) < _MOST_HELD:
            return []
        del self._held[process]  # no error has so many: it goes on printing
        return [] if self.ending else [ShownLine(process, line) for line in held[1]]

    def ended(self, process: str, now: float, *, well: bool = False) -> list[ShownLine]:
        """`process` has ended, with status 0 if `well`. Returns which of its held lines to show now."""
        if process not in self._held:
            return []
        _, lines = self._held.pop(process)
        if well and not self.ending:  # it only printed something that looks like an error, such as "error: 0.25"
            return [ShownLine(process, text) for text in lines]
        kind = _kind(lines)
        if kind in _QUIET or (self.ending and kind not in self._shown):
            return []
        if kind.startswith(_SENTENCE):
            self._last[process] = lines[0].removeprefix(_SENTENCE)
        alike = self._shown.setdefault(kind, [])
        alike.append(process)
        if len(alike) > 1:
            return []
        if kind.startswith(_SENTENCE):
            self._sentences.append((now, process, lines))
            return []
        return [ShownLine(process, text) for text in lines]

    def exit_of(self, process: str, how: Exit) -> Exit:
        """How `process` has ended, with what it has said about that."""
        return how.having_asked(process in self._asked)

    def due(self, now: float) -> list[ShownLine]:
        """Return the held lines of processes that continued after an error, and the errors that did not end the run."""
        late = [process for process, (began, _) in self._held.items() if now - began > _HELD_S]
        shown = [ShownLine(process, text) for process in late for text in self._held.pop(process)[1]]
        while self._sentences and now - self._sentences[0][0] > _LAST_WORD_S:
            _, process, lines = self._sentences.pop(0)
            shown += [ShownLine(process, text) for text in lines]
        return shown

    def sentence_of(self, process: str) -> str:
        """Return the error message of ours that `process` ended with; "" if it ended in another way."""
        return self._last.get(process, "")

    def rest(self, failure: str) -> list[ShownLine]:
        """At the end of the run: return the held error messages, without those that `failure` repeats."""
        lines = failure.splitlines()  # of ``worker1: a sentence``, with and without the name
        said = {_alike(line) for line in (*lines, *(line.partition(": ")[2] for line in lines[:1]))}
        left = [
            ShownLine(process, text) for _, process, lines in self._sentences for text in lines
            if _alike(text.removeprefix(_SENTENCE)) not in said
        ]  # fmt: skip
        self._sentences.clear()
        return left

    def summary(self) -> list[str]:
        """Return a sentence for each error that several workers ended with."""
        return [
            f"{named(others)} ended with the same error as {first}"
            for first, *others in self._shown.values() if others
        ]  # fmt: skip


def _alike(sentence: str) -> str:
    """Return the sentence without its numbers: two workers say the same thing of replica 0 and of replica 1."""
    return re.sub(r"\d+", "#", sentence)


def _kind(lines: list[str]) -> str:
    """Return the places in the code and the type of the error; for our own errors the message without its numbers."""
    if lines[0].startswith(_SENTENCE):
        return _alike(lines[0])
    last = next((n for n in range(len(lines) - 1, -1, -1) if lines[n].startswith("  ")), -1)
    error = next((line for line in lines[last + 1 :] if line), "")
    name = error.partition(":")[0]
    if name in _QUIET:
        return name
    return "\n".join([*(line for line in lines if line.startswith(_SYNTAX)), name])


_PLAIN_EVERY_S = 5.0
_RATE_OVER_S = 10.0
_STARTING = 6  # times more patience with a coordinator while processes start, which takes all of a machine's cores
_WIDE = 80  # columns: a narrower terminal shows only the step and the loss
_REFUSED = "refused: "  # how the coordinator's message about a refused worker begins
_NO_MORE = " is gone: its connection ended"
_HURRIED_S = 2.0  # seconds for the last lines of a run that was interrupted


class OutputClosed(Exception):
    """Nobody reads our output any more."""


class Screen(Console):
    """A rich console that becomes silent when its reader is gone (``rallypoint run ... | head``).

    What it cannot print otherwise (a full disk, a character that the stream cannot encode) is left out: see `Lenient`.
    """

    closed = False
    hurried = False  # at the end of `unhurried`: do not wait long for the reader

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "emoji": False, **options})  # ``epoch:100:`` is said as it is

    @property
    def file(self) -> IO[str]:
        """Where it prints."""
        return cast(IO[str], Lenient(cast(TextIO, Console.file.fget(self))))  # type: ignore[attr-defined]

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """In the body, printing does not wait for the reader; what was not read by then is waited for at the end."""
        if not _has_descriptor(self.file):
            yield
            return
        before, output = self._file, Unhurried(cast(TextIO, self.file))
        self._file = cast(IO[str], output)
        try:
            yield
        finally:
            output.end(_HURRIED_S if self.hurried else None)
            self._file = before

    def on_broken_pipe(self) -> None:
        """Print nothing any more. The default would end the thread that has just printed."""
        self.quiet = self.closed = True
        with open(os.devnull, "w") as nowhere:  # also for what the interpreter flushes when it exits
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _has_descriptor(file: IO[str]) -> bool:
    try:
        return file.fileno() >= 0
    except (OSError, ValueError):  # (io.UnsupportedOperation is both)
        return False


def changes(before: protocol.Members, now: protocol.Members, replicas: int | None = None) -> list[str]:
    """Return sentences that say who has joined and left between two views, and who computes now.

    `replicas`: the job's, if they are known. A view names more workers than that while replicas move by speed: those
    that had one and those that get one.
    """
    said = []
    news = _news((*before.workers, *before.standby), (*now.workers, *now.standby))
    begins = not before.workers and (not news or not now.workers)  # or the first weights are not safe yet
    if (news and not begins) or (set(before.workers) != set(now.workers) and not begins):
        idle = f", {_listed(now.standby)} stand{'s' * (len(now.standby) == 1)} by" if now.standby else ""
        if replicas is not None and len(now.workers) > replicas:
            one = f"{replicas} of {_listed(now.workers)} compute{'s' * (replicas == 1)}"
            who = f"{one}: replicas are assigned by speed{idle}"
        else:
            who = f"{_listed(now.workers)} compute{'s' * (len(now.workers) < 2)}{idle}"
        said.append(f"{news}: {who}" if news else who)
    if news := _news(before.servers, now.servers):
        said.append(f"{news}: the parameters are on {_listed(now.servers)}")
    if news := _news(before.aggregators, now.aggregators):
        said.append(f"{news}: {len(now.through)} workers have an aggregator")
    return said


def _news(before: Sequence[str], now: Sequence[str]) -> str:
    gone = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    parts = [f"without {_listed(gone)}"] if gone else []
    return " and ".join([*parts, *([f"with {_listed(new)}"] if new else [])])


def _listed(names: Sequence[str]) -> str:
    """Return ``worker2, worker10``: ordered by their numbers."""
    return ", ".join(sorted(names, key=lambda name: (len(name), name))) or "nobody"


def account(accounted: protocol.Accounted) -> str:
    """Return a line that says what happened to the contributions."""
    said = [f"{accounted.applied:,} contributions applied"]
    said += [f"{accounted.folded:,} folded into another's update"] if accounted.folded else []
    said += [f"{accounted.dropped:,} dropped"] if accounted.dropped else []
    if late := sorted(accounted.staleness.items()):
        said.append(f"staleness p50 {_quantile(late, 0.5)}, p99 {_quantile(late, 0.99)}, at most {late[-1][0]} updates")
    return ", ".join(said)


def _quantile(counts: list[tuple[int, int]], share: float) -> int:
    total, seen = sum(count for _, count in counts), 0
    for value, count in counts:
        seen += count
        if seen >= share * total:
            return value
    return 0


def _sums(number: int) -> str:
    return f"{number:,} sum{'s' * (number != 1)}"


class _Figures(ProgressColumn):
    """What `micro.log` and evaluations say; as much of it as there is room for, on one line."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["metrics"], no_wrap=True, overflow="ellipsis")


def _columns(width: int, *, loss: bool, ends: bool) -> list[ProgressColumn]:
    """The parts of the live line. The bar and the figures give way where there is no room for all."""
    whole = Column(no_wrap=True)
    where = TextColumn("step {task.completed}/{task.total}" if ends else "step {task.completed}", table_column=whole)
    losses = [TextColumn("loss {task.fields[loss]}", table_column=whole)] if loss else []
    if width < _WIDE or not ends:
        return [where, *losses]
    return [
        where, BarColumn(bar_width=24), *losses, _Figures(),
        TextColumn("{task.fields[rate]}", style="green", table_column=whole),
        TimeRemainingColumn(compact=True, table_column=whole), TextColumn("left", table_column=whole),
    ]  # fmt: skip


class RunConsole:
    """Shows the coordinator's announcements, and the lines that workers print."""

    later = False  # the job was begun before: count from the first step that is told of

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Screen()
        self.state = RunState()
        self.failure: str | None = None
        self.finished = False
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._recent: deque[tuple[float, int]] = deque()  # when, and by then: the items, or bytes of sums
        self._sums_printed = 0
        self._start = time.monotonic()
        self._last_plain = 0.0
        # Requests to change the cluster's size
        self.sizes: queue.SimpleQueue[protocol.Resize | protocol.Drain] = queue.SimpleQueue()
        self._said: set[str] = set()
        self.started: set[str] = set()  # the launcher's processes: it says itself how they end
        self._unsaid: dict[str, str] = {}  # process -> what the coordinator has said of its end
        self._said_done = False
        self.holding = False  # members hold the newest version, which is not stored yet
        self.heard = time.monotonic()  # when the coordinator last sent something
        self._silence_said = self.heard  # when we last said that it sends nothing

    def ended(self, process: str, *, said: bool) -> None:
        """A process has ended. Unless the launcher has `said` so, show what the coordinator says of that."""
        text = self._unsaid.pop(process, "")
        self.started -= set() if said else {process}
        if text and not said and not self.finished:
            self.say(escape(text))

    def relay(self, process: str, line: str) -> None:
        """Show a line that a process printed. After the job, a worker's lines get no prefix."""
        own_words = process == "worker0" or (self.finished and process.startswith("worker"))
        prefix = "" if own_words or line.startswith("weights sha256 ") else f"{process} | "
        parts = [Segment(prefix, Style(dim=True)), Segment(strip_control_codes(line)), Segment.line()]
        self.console.print(Segments(parts), soft_wrap=True)  # (as text its tabs would become spaces)

    def relay_all(self, lines: Iterable[ShownLine]) -> None:
        for line in lines:
            self.relay(line.process, line.text)

    def show(self, message: protocol.Message) -> None:
        state, self.heard = self.state, time.monotonic()
        first, before, step = state.plan is None, state.view, state.step
        if not state.take(message, self.heard):
            return
        match message:
            case protocol.Planned() if first:
                self._begin(message)
            case protocol.StepDone():
                if message.step + 1 - step > self._every:  # nobody tells of the others: the coordinator was away
                    self._recent.clear()
                if self.later:
                    self.later, state.began_at, self._start = False, message.step + 1, self.heard
                self._step(message)
            case protocol.ScriptAt():
                self._sums_made(self.state.script)
            case protocol.Metrics(step=step, values=values):
                self.say(f"[cyan]step {step:>6}[/cyan]  {escape(_figures(values))}")
            case protocol.Say(text=text) if text.startswith(_REFUSED):
                if text not in self._said:
                    self._said.add(text)
                    self.say(escape(text))
            case protocol.Say(text=text) if text.endswith(_NO_MORE) and text.removesuffix(_NO_MORE) in self.started:
                self._unsaid[text.removesuffix(_NO_MORE)] = text
            case protocol.Say(text=text) | protocol.Waiting(text=text) | protocol.Ordered(text=text, refused=False):
                self.say(escape(text))
            case protocol.Held(text=text):
                self.holding = True
                self.say(f"[bold yellow]{escape(text)}[/bold yellow]")
            case protocol.Skipped():
                self._skipped_shown(message)
            case protocol.Members() if before is not None:
                replicas = state.plan.replicas if state.plan is not None else None
                for sentence in changes(before, message, replicas):
                    self.say(f"[dim]{escape(sentence)}[/dim]")
            case protocol.Resize(workers=workers, servers=servers):
                to = [f"workers {workers}"] * (workers > 0) + [f"servers {servers}"] * (servers > 0)
                self.say(f"changing the number of processes: {', '.join(to)}")
                self.sizes.put(message)
            case protocol.Drain():
                self.sizes.put(message)
            case protocol.Snapshotted(version=0):
                self._start = self.heard  # workers compute from now on
            case protocol.Snapshotted(nbytes=nbytes, seconds=seconds):
                size = f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"
                self.say(f"[dim]snapshot of step {self.steps_stored}: {size} in {seconds:.1f} s[/dim]")
            case _:
                if state.ended == "failed":
                    self.failure = state.why
                self.finished = self.finished or state.ended == "finished"

    def warn_of_silence(self, after: float) -> None:
        """Warn when the coordinator has sent nothing for `after` seconds: it cannot report that itself (I8).

        Before the job begins six times as long is allowed: imports of all processes compete with the coordinator.
        """
        now = time.monotonic()
        silence = now - self.heard
        after *= 1 if self.state.plan is not None else _STARTING
        if now - max(self.heard, self._silence_said) > after:
            self._silence_said = now
            what = "Sums" if self.state.of_sums else "Steps"
            without = "" if self.state.plan is None else f" {what} go on without it, but nobody can join or be replaced"
            self.say(
                f"nothing has been heard from the coordinator for {silence:.0f} s: is it stopped, or its machine "
                f"overloaded?{without}"
            )

    @property
    def steps_stored(self) -> int:
        """The steps of training in the last snapshot; -1 if there is none so far."""
        state = self.state
        return state.steps_in(state.snapshots[-1]["version"]) if state.snapshots else -1

    def say_how_to_go_on(self, plan: Launch, *, failed: bool) -> None:
        """Name the command that continues this run and the step it begins with, or say that there is no snapshot."""
        began, stored = age(plan.resume), self.steps_stored
        if stored < 0 and began is not None:
            stored = self.state.steps_in(began[0])
        if not plan.snapshots or stored < 0 or stored == self.state.step == 0:  # nothing was computed
            if self.state.step > 0:
                self.say("there is no snapshot of this run to go on from")
            return
        hint = " (--set KEY=VALUE changes settings)" if failed else ""
        way = f"{escape(to_resume(plan.folder))}{hint}"
        self.console.print(f"to go on from step {stored}, the last snapshot: {way}", soft_wrap=True)

    def close(self) -> None:
        """Remove the live line, and print what the run did."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        state, plan = self.state, self.state.plan
        if self.finished and plan is not None and not self._said_done:
            self._said_done = True
            seconds = (state.over_at if state.over_at >= 0 else time.monotonic()) - self._start
            if state.of_sums:
                self.say(
                    f"[bold]done[/bold]: the scripts have ended after {_sums(state.script.sums)}, "
                    f"{state.script.nbytes / 1e6:,.1f} MB from each worker, in {seconds:.1f} s"
                )
                return
            # Each item once, even if it was computed again
            (stopped_at, why), last = state.stopped, state.step if plan.loss == "never" else plan.steps
            steps = f"{last} steps"
            if stopped_at >= 0:
                last, steps = stopped_at, f"{stopped_at} of {last} steps ({escape(why)})"
            items = plan.items * (last - state.began_at)
            if state.began_at:  # the others were an earlier run's
                steps += f", of them {last - state.began_at} now"
            self.say(
                f"[bold]done[/bold]: {steps}, {items:,} {escape(plan.item)} "
                f"in {seconds:.1f} s ({items / max(seconds, 1e-9):,.0f} {escape(plan.item)}/s)"
            )
            for kind in ("steps", "contributions"):
                if state.skipped[kind]:
                    self.say(f"[yellow]{self._left_out(kind)}: a loss or a gradient was not finite[/yellow]")
            if state.accounted is not None:
                self.say(account(state.accounted))

    def _begin(self, plan: protocol.Planned) -> None:
        self._start = time.monotonic()
        if self.state.of_sums:
            self.say(
                f"sums of {counted(len(plan.workers), 'worker')} on {counted(len(plan.servers), 'server')}; the "
                "scripts decide when they end"
            )
            self._recent.append((self._start, 0))
            self._last_plain = self._start
            if self.console.is_terminal:
                self._progress = Progress(TextColumn("{task.description}"), console=self.console, transient=True)
                self._task = self._progress.add_task("0 sums", total=None)
                self._progress.start()
            return
        replica = "contributor" if plan.loss == "never" else "replica"
        words = f"{plan.words:,}" if plan.words < 100_000 else f"{plan.words / 1e6:,.2f} M"
        self.say(
            f"[bold]{words}[/bold] parameters in {counted(plan.shards, 'shard')} on "
            f"{counted(len(plan.servers), 'server')}; {counted(plan.replicas, replica)} on "
            f"{counted(min(len(plan.workers), plan.replicas), 'worker')}; "
            f"{counted(plan.steps, 'step') if plan.steps else 'the scripts decide when they end'}"
        )
        if self.console.is_terminal:
            columns = _columns(self.console.width, loss=plan.loss != "never", ends=plan.steps > 0)
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._task = self._progress.add_task(
                "train", total=plan.steps or None, completed=plan.done, loss="-", metrics="", rate=""
            )
            self._progress.start()

    def _sums_made(self, script: protocol.ScriptAt) -> None:
        """Show how many sums are made. The coordinator repeats it, also while none is made."""
        self._count(script.nbytes)
        line = f"{_sums(script.sums)}  {self._per_second / 1e6:,.1f} MB/s from each worker"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=line)
        elif self.heard - self._last_plain >= _PLAIN_EVERY_S and script.sums != self._sums_printed:
            self._last_plain, self._sums_printed = self.heard, script.sums
            self.say(line)

    def _skipped_shown(self, skipped: protocol.Skipped) -> None:
        """Show the first one, and the 10th, the 100th and so on: many of them say no more than their number."""
        kind = "contributions" if skipped.alone else "steps"
        count = self.state.skipped[kind]
        if str(count).rstrip("0") != "1":
            return
        why = phrase(skipped.replicas, skipped.gradients, skipped.parameter)
        named = self._named(skipped.step)
        what = f"a contribution to {named} dropped" if skipped.alone else f"{named} skipped"
        rest = f"; {self._left_out(kind)} so far" if count > 1 else ""
        scale = f"; the loss scale is {skipped.loss_scale:g} now" if skipped.loss_scale else ""
        self.say(f"[yellow]{what}: {escape(why)}{scale}{rest}[/yellow]")

    def say(self, sentence: str) -> None:
        """Print a sentence, which may have markup: in a terminal wrapped between words, in a file as one line."""
        self.console.print(sentence, soft_wrap=not self.console.is_terminal)

    def _step(self, done: protocol.StepDone) -> None:
        now, state, plan = self.heard, self.state, self.state.plan
        assert plan is not None
        self._count(state.items)
        loss = f"{done.loss:.4f}" if done.has_loss(plan) else ""
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, completed=state.step, loss=loss or "-", rate=self._rate(plan.item).strip(),
                metrics=_figures({**done.figures, **state.evaluation[1]}),
            )  # fmt: skip
        elif now - self._last_plain >= _PLAIN_EVERY_S or state.step == plan.steps:
            self._last_plain = now
            here = max(1, state.step - state.began_at)  # steps since this run began, or went on
            left = f"  {(now - self._start) / here * (plan.steps - state.step):.0f} s left" if plan.steps else ""
            # The first step's time is no estimate
            estimate = f"{self._rate(plan.item)}{left}" if here > 1 else ""
            logged = f"  {escape(_figures(done.figures))}" if done.figures else ""
            told, of = f"  loss {loss}" if loss else "", f"/{plan.steps}" if plan.steps else ""
            self.say(f"step {state.step}{of}{told}{logged}{estimate}")

    def _named(self, round: int) -> str:
        """Name one of the servers' rounds in the user's words: a step, or the steps of the round."""
        every = self._every
        return f"step {round}" if every == 1 else f"the round of {every} steps from step {round * every} on"

    @property
    def _every(self) -> int:
        return self.state.plan.steps_per_round if self.state.plan is not None else 1

    def _left_out(self, kind: str) -> str:
        """How many steps were skipped, or contributions dropped, as a phrase."""
        count, unit, what = self.state.skipped[kind], "round" if self._every > 1 else "step", "skipped"
        if kind == "contributions":
            unit, what = "contribution", "dropped"
        return f"{count:,} {unit}{'s' * (count != 1)} {what}"

    def _rate(self, item: str) -> str:
        return "" if len(self._recent) < 2 else f"  {self._per_second:,.0f} {escape(item)}/s"

    def _count(self, by_now: int) -> None:
        self._recent.append((self.heard, by_now))
        while self._recent[0][0] < self.heard - _RATE_OVER_S and len(self._recent) > 2:
            self._recent.popleft()

    @property
    def _per_second(self) -> float:
        (before, fewer), (now, more) = self._recent[0], self._recent[-1]
        return (more - fewer) / max(now - before, 1e-9)


def _figures(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {f'{value:#.4g}'.rstrip('.')}" for name, value in values.items())
