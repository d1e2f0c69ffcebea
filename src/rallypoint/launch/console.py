"""The output of a run for a person: a live progress line in a terminal, occasional plain lines in a file."""

from __future__ import annotations

import queue
import time
from collections import Counter, deque
from collections.abc import Iterable

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from rallypoint.core.shard.clip import phrase
from rallypoint.launch.output import Line
from rallypoint.launch.plan import Launch
from rallypoint.launch.showing.contributions import account
from rallypoint.launch.showing.members import changes
from rallypoint.launch.showing.screen import Screen
from rallypoint.launch.showing.sums import SumsShown, is_of_sums
from rallypoint.net.messages import (
    Aborted,
    Accounted,
    Drain,
    Finished,
    Held,
    Members,
    Message,
    Metrics,
    Ordered,
    Planned,
    Resize,
    Say,
    Skipped,
    Snapshotted,
    StepDone,
    Waiting,
)
from rallypoint.net.sampling.messages import ScriptAt
from rallypoint.observe.lines import Once
from rallypoint.store.manifest import age

_PLAIN_EVERY_S = 5.0
_RATE_OVER_S = 10.0
_STARTING = 6  # times more patience with a coordinator while processes start, which takes all of a machine's cores
_WIDE = 80  # columns: a narrower terminal shows only the step and the loss
_REFUSED = "refused: "  # how the coordinator's message about a refused worker begins


class _Figures(ProgressColumn):
    """What `micro.log` and evaluations say; as much of it as there is room for, on one line."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["metrics"], no_wrap=True, overflow="ellipsis")


def _columns(width: int, *, loss: bool) -> list[ProgressColumn]:
    """The parts of the live line. The bar and the figures give way where there is no room for all."""
    whole = Column(no_wrap=True)
    where = TextColumn("step {task.completed}/{task.total}", table_column=whole)
    losses = [TextColumn("loss {task.fields[loss]}", table_column=whole)] if loss else []
    if width < _WIDE:
        return [where, *losses]
    return [
        where, BarColumn(bar_width=24), *losses, _Figures(),
        TextColumn("{task.fields[rate]}", style="green", table_column=whole),
        TimeRemainingColumn(compact=True, table_column=whole), TextColumn("left", table_column=whole),
    ]  # fmt: skip


class RunConsole:
    """Shows the coordinator's announcements, and the lines that workers print."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Screen(highlight=False)
        self.failure: str | None = None
        self._accounted: Accounted | None = None
        self.finished = False
        self._stopped = (-1, "")  # the step with which the script has stopped the job, and why
        self._over_at = 0.0  # when the job ended: what comes after that is no training
        self._plan: Planned | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._recent: deque[tuple[float, int]] = deque()
        self._sums = SumsShown()
        self._metrics: dict[str, float] = {}
        self._skipped = Counter[bool]()  # contributions (True), or whole steps
        self._start = time.monotonic()
        self._last_plain = 0.0
        self.steps_done = 0
        self.again = 0
        self.members: Members | None = None
        self.sizes: queue.SimpleQueue[Resize | Drain] = queue.SimpleQueue()  # requests to change the cluster's size
        self._said: set[str] = set()
        self._evaluated = Once()
        self.snapshots = 0
        self.version = -1  # of the last snapshot; -1: none so far
        self._said_done = False
        self.holding = False  # members hold the newest version, which is not stored yet
        self.heard = time.monotonic()  # when the coordinator last sent something
        self._silence_said = self.heard  # when we last said that it sends nothing

    def relay(self, process: str, line: str) -> None:
        """Show a line that a process printed. After the job, a worker's lines get no prefix."""
        own_words = process == "worker0" or (self.finished and process.startswith("worker"))
        prefix = "" if own_words else f"[dim]{escape(process)} |[/dim] "
        self.console.print(prefix + escape(line), soft_wrap=True)

    def relay_all(self, lines: Iterable[Line]) -> None:
        """Show these lines that processes printed."""
        for line in lines:
            self.relay(line.process, line.text)

    def show(self, message: Message) -> None:
        """Show one announcement of the coordinator."""
        self.heard = time.monotonic()
        match message:
            case Planned():
                self._plan_shown(message)
            case StepDone():
                self._step(message)
            case ScriptAt():
                self._sums_made(message)
            case Metrics(step=step, values=values, generation=generation):
                if not self._evaluated.is_new((step, generation, str(values))):
                    return  # workers have repeated it to the next coordinator
                self._metrics = values
                self.console.print(f"[cyan]step {step:>6}[/cyan]  {_figures(values)}")
            case Say(text=text) if text.startswith(_REFUSED):
                if text not in self._said:
                    self._said.add(text)
                    self.say(escape(text))
            case Say(text=text) | Waiting(text=text) | Ordered(text=text, refused=False):
                self.say(escape(text))
            case Held(text=text):
                self.holding = True
                self.say(f"[bold yellow]{escape(text)}[/bold yellow]")
            case Skipped():
                self._skipped_shown(message)
            case Members():
                self._members_shown(message)
            case Resize(workers=workers, servers=servers):
                to = [f"workers {workers}"] * (workers > 0) + [f"servers {servers}"] * (servers > 0)
                self.console.print(f"changing the number of processes: {', '.join(to)}")
                self.sizes.put(message)
            case Drain():
                self.sizes.put(message)
            case Snapshotted():
                self.snapshots += 1
                self.version = message.version
                if message.version == 0:
                    self._start = time.monotonic()  # workers compute from now on
                else:
                    size, seconds = _size(message.nbytes), message.seconds
                    self.console.print(f"[dim]snapshot of step {self.steps_stored}: {size} in {seconds:.1f} s[/dim]")
            case Accounted():
                self._accounted = message
            case Aborted(reason=reason):
                self.failure = reason
            case Finished(stopped_at=stopped_at, why=why):
                self._stopped = (stopped_at, why)
                self._over_at = self._over_at or time.monotonic()
                self.finished = True

    def warn_of_silence(self, after: float) -> None:
        """Warn when the coordinator has sent nothing for `after` seconds: it cannot report that itself (I8).

        Before the job begins six times as long is allowed: imports of all processes compete with the coordinator.
        """
        now = time.monotonic()
        silence = now - self.heard
        after *= 1 if self._plan is not None else _STARTING
        if now - max(self.heard, self._silence_said) > after:
            self._silence_said = now
            what = "Sums" if self.of_sums else "Steps"
            without = "" if self._plan is None else f" {what} go on without it, but nobody can join or be replaced"
            self.say(
                f"nothing has been heard from the coordinator for {silence:.0f} s: is it stopped, or its machine "
                f"overloaded?{without}"
            )

    @property
    def steps_stored(self) -> int:
        """The steps of training in the last snapshot; -1 if there is none so far."""
        every, steps = (1, self.version) if self._plan is None else (self._plan.steps_per_round, self._plan.steps)
        return min(self.version * every, steps) if self.version >= 0 else -1

    def say_how_to_go_on(self, plan: Launch, *, failed: bool) -> None:
        """Name the command that continues this run and the step it begins with, or say that there is no snapshot."""
        began = age(plan.resume)
        if self.version < 0 and began is not None:
            self.version = began[0]
        if not plan.snapshots or self.steps_stored < 0:
            if self.steps_done > 0:
                self.say("there is no snapshot of this run to go on from")
            return
        hint = " (--set KEY=VALUE changes settings)" if failed else ""
        way = f"rallypoint resume {escape(plan.folder)}{hint}"
        self.console.print(f"to go on from step {self.steps_stored}, the last snapshot: {way}", soft_wrap=True)

    def close(self) -> None:
        """Remove the live line, and print what the run did."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self.finished and self._plan is not None and not self._said_done:
            self._said_done = True
            seconds = (self._over_at or time.monotonic()) - self._start
            if self.of_sums:
                self.console.print(f"[bold]done[/bold]: {self._sums.done(seconds)}")
                return
            # Each item once, even if it was computed again
            (stopped_at, why), last = self._stopped, self._plan.steps
            steps = f"{last} steps"
            if stopped_at >= 0:
                last, steps = stopped_at, f"{stopped_at} of {last} steps ({escape(why)})"
            items = self._plan.items * (last - self._plan.done)
            if self._plan.done:  # the others were an earlier run's
                steps += f", of them {last - self._plan.done} now"
            self.console.print(
                f"[bold]done[/bold]: {steps}, {items:,} {escape(self._plan.item)} "
                f"in {seconds:.1f} s ({items / max(seconds, 1e-9):,.0f} {escape(self._plan.item)}/s)"
            )
            for alone in sorted(self._skipped):
                self.console.print(f"[yellow]{self._left_out(alone)}: a loss or a gradient was not finite[/yellow]")
            if self._accounted is not None:
                self.console.print(account(self._accounted))

    def _plan_shown(self, plan: Planned) -> None:
        if self._plan is not None:  # from a coordinator that took over: this run started earlier than it
            self._plan = msgspec.structs.replace(plan, done=self._plan.done)
            return
        self._plan = plan
        self._start = time.monotonic()
        if self.of_sums:
            self._sums_begin(plan)
            return
        replica = "contributor" if plan.loss == "never" else "replica"
        self.console.print(
            f"[bold]{_millions(plan.words)}[/bold] parameters in {_count(plan.shards, 'shard')} on "
            f"{_count(len(plan.servers), 'server')}; {_count(plan.replicas, replica)} on "
            f"{_count(min(len(plan.workers), plan.replicas), 'worker')}; {_count(plan.steps, 'step')}"
        )
        if self.console.is_terminal:
            columns = _columns(self.console.width, loss=plan.loss != "never")
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._task = self._progress.add_task(
                "train", total=plan.steps, completed=plan.done, loss="-", metrics="", rate=""
            )
            self._progress.start()

    @property
    def of_sums(self) -> bool:
        """True if the job makes sums for scripts: it has no steps."""
        return is_of_sums(self._plan)

    def _sums_begin(self, plan: Planned) -> None:
        self.console.print(
            f"sums of {_count(len(plan.workers), 'worker')} on {_count(len(plan.servers), 'server')}; the scripts "
            "decide when they end"
        )
        if self.console.is_terminal:
            self._progress = Progress(TextColumn("{task.description}"), console=self.console, transient=True)
            self._task = self._progress.add_task("0 sums", total=None)
            self._progress.start()

    def _sums_made(self, script: ScriptAt) -> None:
        self._sums.take(script)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=self._sums.line)
        elif line := self._sums.plain():
            self.console.print(line)

    def _members_shown(self, members: Members) -> None:
        before, self.members = self.members, members
        if before is None:
            return
        for sentence in changes(before, members, self._plan.replicas if self._plan is not None else None):
            self.say(f"[dim]{escape(sentence)}[/dim]")

    def _skipped_shown(self, skipped: Skipped) -> None:
        """Show the first one, and the 10th, the 100th and so on: many of them say no more than their number."""
        self._skipped[skipped.alone] += 1
        count = self._skipped[skipped.alone]
        if str(count).rstrip("0") != "1":
            return
        why = phrase(skipped.replicas, skipped.gradients, skipped.parameter)
        named = self._named(skipped.step)
        what = f"a contribution to {named} dropped" if skipped.alone else f"{named} skipped"
        rest = f"; {self._left_out(skipped.alone)} so far" if count > 1 else ""
        scale = f"; the loss scale is {skipped.loss_scale:g} now" if skipped.loss_scale else ""
        self.say(f"[yellow]{what}: {escape(why)}{scale}{rest}[/yellow]")

    def say(self, sentence: str) -> None:
        """Print a sentence, which may have markup: in a terminal wrapped between words, in a file as one line."""
        self.console.print(sentence, soft_wrap=not self.console.is_terminal)

    def _step(self, done: StepDone) -> None:
        now = time.monotonic()
        self.steps_done, self.again = done.step + 1, done.again
        self._recent.append((now, done.items))
        while self._recent[0][0] < now - _RATE_OVER_S and len(self._recent) > 2:
            self._recent.popleft()
        assert self._plan is not None
        loss = f"{done.loss:.4f}" if done.has_loss(self._plan) else ""
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, completed=done.step + 1, loss=loss or "-", rate=self._rate(),
                metrics=_figures({**done.figures, **self._metrics}),
            )  # fmt: skip
        elif now - self._last_plain >= _PLAIN_EVERY_S or done.step + 1 == self._plan.steps:
            self._last_plain = now
            here = max(1, done.step + 1 - self._plan.done)  # steps since this run began, or went on
            left = (now - self._start) / here * (self._plan.steps - done.step - 1)
            # The first step's time is no estimate
            estimate = f"  {self._rate()}  {left:.0f} s left" if here > 1 else ""
            logged = f"  {_figures(done.figures)}" if done.figures else ""
            told = f"  loss {loss}" if loss else ""
            self.console.print(f"step {done.step + 1}/{self._plan.steps}{told}{logged}{estimate}")

    def _named(self, round: int) -> str:
        """Name one of the servers' rounds in the user's words: a step, or the steps of the round."""
        every = self._plan.steps_per_round if self._plan is not None else 1
        return f"step {round}" if every == 1 else f"the round of {every} steps from step {round * every} on"

    def _left_out(self, alone: bool) -> str:
        """How many steps were skipped, or (`alone`) contributions dropped, as a phrase."""
        count, unit = self._skipped[alone], "step"
        if self._plan is not None and self._plan.steps_per_round > 1:
            unit = "round"
        unit, what = ("contribution", "dropped") if alone else (unit, "skipped")
        return f"{count:,} {unit}{'s' * (count != 1)} {what}"

    def _rate(self) -> str:
        if len(self._recent) < 2 or self._plan is None:
            return ""
        seconds = self._recent[-1][0] - self._recent[0][0]
        items = sum(count for _, count in list(self._recent)[1:])
        return f"{items / max(seconds, 1e-9):,.0f} {self._plan.item}/s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _millions(number: int) -> str:
    """Return ``0.84 M``; of a small number all digits."""
    return f"{number:,}" if number < 100_000 else f"{number / 1e6:,.2f} M"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"


def _figures(values: dict[str, float]) -> str:
    return escape("  ".join(f"{name} {f'{value:#.4g}'.rstrip('.')}" for name, value in values.items()))
