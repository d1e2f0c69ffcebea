"""Machines that are recorded (`RALLYPOINT_RECORD=FOLDER`) or checked after every call (`RALLYPOINT_CHECK=1`).

    machine = observed(WorkerMachine(...), "worker0")

With neither variable `observed` returns the machine itself, and costs nothing. Otherwise it changes the object's class
to a derived one, in which every public method reports to the observer. Methods that only answer a question
(`QUESTIONS`) are not recorded.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rallypoint.observe.lenient import say
from rallypoint.observe.recording import LIMIT_BYTES, PackingError, Recorder, answered, call_of

RECORD, RECORD_MB, CHECK = "RALLYPOINT_RECORD", "RALLYPOINT_RECORD_MB", "RALLYPOINT_CHECK"
QUESTIONS = frozenset({
    "contributes", "here", "is_primary", "is_queued", "lateness", "machine", "may_fill", "may_prepare", "next_action",
    "ready", "state", "takes_from", "validate", "waiting_for",
})  # fmt: skip
BROKEN_STATUS = 70  # the exit status of a process whose machine broke an invariant
Machine = TypeVar("Machine")
Broken = Callable[[str], None]


def observed(machine: Machine, name: str) -> Machine:
    """Observe `machine` as the environment variables say. Returns the same object."""
    folder, check = os.environ.get(RECORD, ""), os.environ.get(CHECK, "") not in ("", "0")
    if not folder and not check:
        return machine
    megabytes = os.environ.get(RECORD_MB, "")
    limit = int(megabytes) << 20 if megabytes.isdecimal() else LIMIT_BYTES
    recorder = Recorder(Path(folder), name, limit) if folder else None
    return watched(machine, name, recorder, end_process if check else None)


def watched(machine: Machine, name: str, recorder: Recorder | None = None, broken: Broken | None = None) -> Machine:
    """Report every call of `machine` to `recorder`. With `broken`, run `validate` after each call too.

    `broken` is called with a sentence when `validate` fails. When a method of the machine calls another one of its own,
    only the outer call is reported.
    """
    observer = _Observer(name, recorder, broken)
    kind = type(machine)
    methods = {method: _watching(observer, method, vars_of(kind)[method]) for method in changing_methods(kind)}
    body = {"__slots__": (), "observed_class": kind, **methods}
    machine.__class__ = types.new_class(kind.__name__, (kind,), exec_body=lambda space: space.update(body))
    if recorder is not None:
        recorder.begin(machine)
    return machine


def end_process(sentence: str) -> NoReturn:
    """Print the sentence and end the process at once, with all its threads: its state cannot be trusted."""
    say(sentence, error=True)
    os._exit(BROKEN_STATUS)


def changing_methods(kind: type) -> list[str]:
    """The public methods of a machine that may change it: all except QUESTIONS."""
    return sorted(
        name for name, value in vars_of(kind).items()
        if isinstance(value, types.FunctionType) and not name.startswith("_") and name not in QUESTIONS
    )  # fmt: skip


def vars_of(kind: type) -> dict[str, Any]:
    """What a class and its bases define, by name."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        found.update(vars(base))
    return found


class _Observer:
    """Reports one machine's calls."""

    def __init__(self, name: str, recorder: Recorder | None, broken: Broken | None) -> None:
        self._name, self._recorder, self._broken = name, recorder, broken
        self._inside = False

    def call(
        self, machine: Any, name: str, method: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Call the method, and report it unless it is part of another call."""
        if self._inside:
            return method(machine, *arguments, **keywords)
        self._inside = True
        try:
            call = self._recorded(lambda: call_of(name, arguments, keywords))
            try:
                result = method(machine, *arguments, **keywords)
            except BaseException as error:
                self._tell(machine, call, error)
                raise
            self._tell(machine, call, result)
            self._check(machine, name, arguments)
        finally:
            self._inside = False
        return result

    def _tell(self, machine: Any, call: Any, result: Any) -> None:
        whole = self._recorded(lambda: answered(call, result)) if call is not None else None
        if whole is not None and self._recorder is not None:
            self._recorder.called(machine, whole)

    def _recorded(self, make: Callable[[], Any]) -> Any:
        """The value to record; None if nothing is recorded."""
        if self._recorder is None:
            return None
        try:
            return make()
        except PackingError as error:
            self._recorder.fail(error)
            self._recorder = None
            return None

    def _check(self, machine: Any, method: str, arguments: tuple[Any, ...]) -> None:
        validate = getattr(machine, "validate", None)
        if self._broken is None or validate is None:
            return
        try:
            validate()
        except AssertionError as error:
            said, why = ", ".join(map(repr, arguments)), str(error).partition("\n")[0]  # pytest adds lines
            self._broken(f"the machine of {self._name} broke a rule in {method}({said}): {why}")


def _watching(observer: _Observer, name: str, method: Any) -> Any:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return observer.call(self, name, method, arguments, keywords)

    return call
