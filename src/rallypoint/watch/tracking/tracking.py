"""Gives a run's events to a tracker: no step twice, whatever goes back, dies or is resumed. Pure."""

from __future__ import annotations

import msgspec

from rallypoint.net.messages import (
    Aborted,
    Finished,
    Members,
    Message,
    Metrics,
    Skipped,
    Snapshotted,
    StepDone,
    Waiting,
)
from rallypoint.observe.lines import printable
from rallypoint.watch.members import Timelines
from rallypoint.watch.tracking.tracker import RunFacts, Tracker

EVALUATION = "evaluation/"  # before the names of evaluations: the training loss may have the same name


class Position(msgspec.Struct, frozen=True):
    """How far a log was given to a tracker: what is needed to go on.

    Attributes:
        file: the log's number on its disk; `offset`: bytes of it.
        step: the next step.
        evaluated: the version of the newest evaluation, and its `values`: it belongs to the step before the next one,
            and has its number.
    """

    file: int = -1
    offset: int = 0
    step: int = 0
    evaluated: int = -1
    values: dict[str, float] = {}


class Tracking:
    """Gives the events of one run to `tracker`, beginning at a position."""

    def __init__(self, tracker: Tracker, facts: RunFacts, at: Position | None = None) -> None:
        at = at or Position()
        self._tracker, self._facts = tracker, facts
        self.step, self.evaluated, self.values = at.step, at.evaluated, at.values
        self._members = Timelines()
        self._begun = False

    def take(self, message: Message) -> None:
        """Take one event of the run."""
        if not self._begun:
            self._begun = True
            self._begin()
        match message:
            case StepDone():
                self._step(message)
            case Metrics(step=step, values=values):
                if step != self.evaluated or values != self.values:  # else a new coordinator was told again
                    self.evaluated, self.values = step, values
                    self._log_evaluation()
            case Members():
                self._changed(message)
            case Skipped(step=step):
                self._event(f"step {step} skipped: not finite")
            case Snapshotted(version=version):
                self._event(f"snapshot of version {version}")
            case Waiting(text=text):
                self._event(text)
            case Finished(stopped_at=at, why=why):
                self._event(f"stopped at step {at}: {why}" if at >= 0 else "finished")
            case Aborted(reason=reason):
                self._event(f"failed: {reason}")
            case _:
                pass

    def _begin(self) -> None:
        """Whatever the tracker has of `step` on is void; but not the evaluation of the version that the step begins
        with."""
        self._tracker.start(RunFacts(self._facts.name, self._facts.settings, self.step))
        if self.evaluated == self.step:
            self._log_evaluation()
        elif self.evaluated > self.step:
            self.evaluated, self.values = -1, {}

    def _step(self, done: StepDone) -> None:
        if done.step < self.step:
            self.step = done.step
            self._begin()
            self._event(f"back to step {done.step}")
        rate = {} if done.lr is None else {"lr": done.lr}
        self._tracker.log(done.step, {**done.figures, "loss": done.loss, **rate})
        self.step = done.step + 1

    def _log_evaluation(self) -> None:
        self._tracker.log(self.evaluated, {f"{EVALUATION}{name}": value for name, value in self.values.items()})

    def _changed(self, members: Members) -> None:
        begins = not self._members.spans
        came, went = self._members.take(members, 0.0)
        if came and not begins:
            self._event(f"with {', '.join(came)}")
        if went:
            self._event(f"without {', '.join(went)}")

    def _event(self, text: str) -> None:
        # At the last step that is done: one that goes on from here makes the next one void
        self._tracker.event(max(0, self.step - 1), printable(text))
