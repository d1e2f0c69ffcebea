"""TensorBoard's event files, by tensorboardX (``pip install 'rallypoint[tensorboard]'``)."""

from __future__ import annotations

import html
import importlib.util
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rallypoint.errors import UsageError, to_install
from rallypoint.watch.tracking.tracker import RunFacts


def check_tensorboard() -> None:
    """UsageError if what writes its files is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise UsageError(f"--tensorboard needs tensorboardX: {to_install('tensorboard')}")


class TensorBoard:
    """Writes event files into ``folder/NAME``, NAME being the run's.

    A run that goes back begins a new file, which says from which step on older ones are void: TensorBoard then shows no
    step twice. Written at once, by no thread: what `flush` returns from is in the file.
    """

    def __init__(self, folder: str, clean: Callable[[str], str] = str) -> None:
        """`clean` takes out of the texts of events what others must not see."""
        check_tensorboard()
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2, summary_pb2

        self._open: Any = event_file_writer.EventsWriter
        self._text: Any = summary.text
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._folder, self._clean = Path(folder), clean
        self._file: Any = None

    def start(self, run: RunFacts) -> None:
        """See `Tracker`."""
        self.close()
        place = self._folder / run.name
        place.mkdir(parents=True, exist_ok=True)
        count = len(list(place.glob("events.out.tfevents.*")))
        # Readers take files in the order of their names: seconds, host, suffix
        self._file = self._open(str(place / "events"), f".{count:06d}")
        if count:
            begins = self._events.SessionLog(status=self._events.SessionLog.START)
            self._file.write_event(self._events.Event(wall_time=time.time(), step=run.step, session_log=begins))
        if run.settings and not run.step:
            rows = "\n".join(f"| {_plain(name)} | {_plain(value)} |" for name, value in run.settings.items())
            self._write(0, self._text("settings", f"| setting | value |\n|---|---|\n{rows}"))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`."""
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(step, self._summaries.Summary(value=values))

    def event(self, step: int, text: str) -> None:
        """See `Tracker`."""
        self._write(step, self._text("events", _plain(self._clean(text))))

    def flush(self) -> None:
        """See `Tracker`."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """See `Tracker`."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, step: int, summary: Any) -> None:
        self._file.write_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))


def _plain(text: str) -> str:
    """A text that is Markdown and HTML no more."""
    return html.escape(text).replace("|", "&#124;").replace("`", "&#96;")
