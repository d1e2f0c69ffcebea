"""What a person sees of a run: a live progress line in a terminal, a plain line now and then in a file."""

from __future__ import annotations

import time
from collections import deque

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from rallypoint.net.messages import (
    Aborted,
    Accounted,
    Finished,
    Members,
    Message,
    Metrics,
    Planned,
    Say,
    Skipped,
    Snapshotted,
    StepDone,
    Waiting,
)

_PLAIN_EVERY_S = 5.0
_RATE_OVER_S = 10.0


class _Rate(ProgressColumn):
    """Items per second over the last seconds."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["rate"], style="green")


class RunConsole:
    """Turns the coordinator's announcements, and lines that workers print, into what is shown."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.failure: str | None = None
        self._accounted: Accounted | None = None
        self.finished = False
        self._plan: Planned | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._recent: deque[tuple[float, int]] = deque()
        self._metrics: dict[str, float] = {}
        self._start = time.monotonic()
        self._last_plain = 0.0
        self.steps_done = 0
        self.again = 0
        self.members: Members | None = None
        self.snapshots = 0
        self._said_done = False
        self.heard = time.monotonic()  # when the coordinator last said something, or we that it does not

    def relay(self, child: str, line: str) -> None:
        """A line that a child printed; a worker's own words stand without a prefix once the job is over."""
        own_words = child == "worker0" or (self.finished and child.startswith("worker"))
        prefix = "" if own_words else f"[dim]{escape(child)} |[/dim] "
        self.console.print(prefix + escape(line), soft_wrap=True)

    def show(self, message: Message) -> None:
        """One announcement of the coordinator."""
        self.heard = time.monotonic()
        match message:
            case Planned():
                self._plan_shown(message)
            case StepDone():
                self._step(message)
            case Metrics(step=step, values=values):
                self._metrics = values
                self.console.print(f"[cyan]step {step:>6}[/cyan]  {_figures(values)}")
            case Say(text=text) | Waiting(text=text):
                self.console.print(escape(text), soft_wrap=True)
            case Skipped(step=step, replicas=replicas):
                who = f"the loss of replica {', '.join(map(str, replicas))}" if replicas else "the gradient"
                self.console.print(f"[yellow]{self._named(step)} skipped: {who} is not finite[/yellow]")
            case Members():
                self._members_shown(message)
            case Snapshotted():
                self.snapshots += 1
                if message.version > 0:
                    size = message.nbytes / 1e6
                    self.console.print(
                        f"[dim]snapshot of version {message.version}: {size:.1f} MB in {message.seconds:.1f} s[/dim]"
                    )
            case Accounted():
                self._accounted = message
            case Aborted(reason=reason):
                self.failure = reason
            case Finished():
                self.finished = True
            case _:
                pass

    def warn_of_silence(self, after: float) -> None:
        """Name the coordinator when it has said nothing for so many seconds: it cannot do so itself (I8)."""
        silence = time.monotonic() - self.heard
        if silence > after:
            self.heard = time.monotonic()
            self.console.print(
                f"nothing has been heard from the coordinator for {silence:.0f} s: is it stopped, or its machine "
                "overloaded? Steps go on without it, but nobody can join or be replaced", soft_wrap=True,
            )  # fmt: skip

    def close(self) -> None:
        """Take the live line away; say what the run did."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self.finished and self._plan is not None and not self._said_done:
            self._said_done = True
            seconds = time.monotonic() - self._start
            items = self._plan.items * (self._plan.steps - self._plan.done)  # each once, whatever was computed again
            self.console.print(
                f"[bold]done[/bold]: {self._plan.steps} steps, {items:,} {escape(self._plan.item)} "
                f"in {seconds:.1f} s ({items / max(seconds, 1e-9):,.0f} {escape(self._plan.item)}/s)"
            )
            if self._accounted is not None:
                self.console.print(account(self._accounted))

    def _plan_shown(self, plan: Planned) -> None:
        again, self._plan = self._plan is not None, plan
        if again:
            return  # from a coordinator that took over
        self._start = time.monotonic()
        self.console.print(
            f"[bold]{plan.words / 1e6:.2f} M[/bold] parameters in {plan.shards} shards on {len(plan.servers)} "
            f"server{'s' * (len(plan.servers) != 1)}; {plan.replicas} replica{'s' * (plan.replicas != 1)} on "
            f"{len(plan.workers)} worker{'s' * (len(plan.workers) != 1)}; {plan.steps} steps"
        )
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=24),
                TextColumn("loss {task.fields[loss]}"), TextColumn("{task.fields[metrics]}"), _Rate(),
                TimeRemainingColumn(compact=True), TextColumn("left"), console=self.console, transient=True,
            )  # fmt: skip
            self._task = self._progress.add_task("train", total=plan.steps, loss="-", metrics="", rate="")
            self._progress.start()

    def _members_shown(self, members: Members) -> None:
        before, self.members = self.members, members
        if before is None or (before.workers, before.servers) == (members.workers, members.servers):
            return
        standing = f" (+{len(members.standby)} standing by)" if members.standby else ""
        self.console.print(
            f"[dim]view {members.view}: workers {', '.join(members.workers) or 'none'}{standing}; "
            f"servers {', '.join(members.servers)}[/dim]"
        )

    def _step(self, done: StepDone) -> None:
        now = time.monotonic()
        self.steps_done, self.again = done.step + 1, done.again
        self._recent.append((now, done.items))
        while self._recent[0][0] < now - _RATE_OVER_S and len(self._recent) > 2:
            self._recent.popleft()
        assert self._plan is not None
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task, completed=done.step + 1, loss=f"{done.loss:.4f}", metrics=_figures(self._metrics),
                rate=self._rate(),
            )  # fmt: skip
        elif now - self._last_plain >= _PLAIN_EVERY_S or done.step + 1 == self._plan.steps:
            self._last_plain = now
            left = (now - self._start) / (done.step + 1) * (self._plan.steps - done.step - 1)
            estimate = f"  {self._rate()}  {left:.0f} s left" if done.step else ""  # the first step is no guide
            self.console.print(f"step {done.step + 1}/{self._plan.steps}  loss {done.loss:.4f}{estimate}")

    def _named(self, round: int) -> str:
        """What the servers call a step, as a user does."""
        every = self._plan.steps_per_round if self._plan is not None else 1
        return f"step {round}" if every == 1 else f"the round of {every} steps from step {round * every} on"

    def _rate(self) -> str:
        if len(self._recent) < 2 or self._plan is None:
            return ""
        seconds = self._recent[-1][0] - self._recent[0][0]
        items = sum(count for _, count in list(self._recent)[1:])
        return f"{items / max(seconds, 1e-9):,.0f} {self._plan.item}/s"


def _figures(values: dict[str, float]) -> str:
    return escape("  ".join(f"{name} {value:.4g}" for name, value in values.items()))


def account(accounted: Accounted) -> str:
    """What has become of the contributions, as a line."""
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
