"""Messages about a run, from the events that its display shows."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from outlast.events import AnyEvent, Note, RunEnded, RunStarted
from outlast.launch.bundles.secret_redaction import SecretRedaction
from outlast.launch.notify.notify_payloads import Notification, bodies, notified, time_text
from outlast.launch.notify.notify_sender import NotifySender
from outlast.launch.notify.notify_targets import Message, read_target
from outlast.launch.run_display import Display
from outlast.telemetry.history.incident_course import Incident
from outlast.telemetry.live_view import LiveFeed
from outlast.telemetry.run_board import Beats, headline, milestone
from outlast.text_formatting import plural

CLOSE_S = 5.0
TEXT_MAX = 500  # characters
_ENDS: dict[str, Message] = {"done": "done", "interrupted": "interrupted"}


class RunNotifier:
    """A display that passes everything on to another one, and sends messages about its board.

    `feed`: that of the other display. An incident is announced once, even if its cause is known
    later, and again when it has recovered; requests are none.
    """

    def __init__(
        self,
        inner: Display,
        feed: LiveFeed,
        run_dir: Path,
        senders: Sequence[NotifySender],
        redact: Callable[[str], str],
    ) -> None:
        self._inner, self._feed, self._run_dir = inner, feed, run_dir
        self._senders, self._redact = senders, redact
        self._settled = 0  # incidents that are over, or of an earlier launcher
        self._announced = 0  # number of the newest announced one

    def event(self, event: AnyEvent) -> None:
        """Pass an event on, and send a message where it is one."""
        self._inner.event(event)
        with self._feed.lock:
            if isinstance(event, RunStarted):
                self._settled = self._announced = self._feed.board.tracker.count
                self._notify("start", event.t_ns, milestone(event))
            last = self._look()
            if isinstance(event, RunEnded):
                self._end(event, last)

    def beats(self, beats: Beats) -> None:
        """Pass the workers' positions on, and send messages about recoveries."""
        self._inner.beats(beats)
        with self._feed.lock:
            self._feed.poll()
            self._look()
        for sender in self._senders:
            if text := sender.news():
                note = Note(t_ns=self._feed.now_ns(), worker="", seat=-1, text=text)
                self._inner.event(note)

    def line(self, text: str, *, is_error: bool) -> None:
        """Pass a line of a worker's output on."""
        self._inner.line(text, is_error=is_error)

    def close(self) -> None:
        """End the display; the senders go on."""
        self._inner.close()

    def _look(self) -> Incident | None:
        """Send messages about incidents that began or ended; return the last one that was
        announced and is not over by a recovery."""
        tracker = self._feed.board.tracker
        last, count = None, tracker.count - self._settled
        for one in tracker.found(count) if count else ():
            if not one.is_request and one.number > self._announced:
                self._announced = one.number
                self._notify("incident", one.t_ns, headline(one), incident=one)
            if one.state == "open":
                return one if not one.is_request else None
            self._settled = one.number
            last = one if not one.is_request else None
            if one.state == "recovered" and last is not None:
                text = f"{headline(one)}; {one.rung}: {one.reason}"
                self._notify("recovery", self._feed.now_ns(), text, incident=one)
                last = None
        return last

    def _end(self, event: RunEnded, last: Incident | None) -> None:
        message = _ENDS.get(event.outcome, "failure")
        text = f"{event.outcome.replace('_', ' ')} at {plural(event.step, 'step')}"
        if event.cause is not None and message != "done":
            text += f": {event.cause.kind}: {event.cause.detail}"
        self._notify(message, event.t_ns, text, end=event, incident=last)

    def _notify(
        self,
        message: Message,
        t_ns: int,
        text: str,
        *,
        end: RunEnded | None = None,
        incident: Incident | None = None,
    ) -> None:
        board = self._feed.board
        about = notified(incident, self._clean(incident.reason)) if incident else None
        notification = Notification(
            message=message,
            text=self._clean(text),
            run=board.run,
            run_dir=str(self._run_dir),
            script=Path(board.script).name,
            host=socket.gethostname(),
            time=time_text(t_ns),
            step=end.step if end else board.step,
            world=board.world,
            outcome=end.outcome if end else None,
            exit_code=end.exit_code if end else None,
            incident=about,
        )
        for sender in self._senders:
            sender.put(bodies(notification, sender.target), is_last=end is not None)

    def _clean(self, text: str) -> str:
        """Return a text on one line, without secrets; redacted before it is cut."""
        line = " ".join(self._redact(text).split())
        return line if len(line) <= TEXT_MAX else f"{line[: TEXT_MAX - 3]}..."


Wrap = Callable[[Display, LiveFeed, Path], Display]


@contextlib.contextmanager
def notifying(
    texts: Sequence[str], environment: Mapping[str, str], tell: Callable[[str], None]
) -> Iterator[Wrap]:
    """Yield what makes a display send messages; without targets, the same display. At the end,
    wait for messages for at most CLOSE_S, and tell how many were lost.

    Raises UsageError for a target that cannot be used, before anything starts.
    """
    targets = [read_target(text, environment) for text in texts]
    senders = [NotifySender(target) for target in targets]
    redact = SecretRedaction(environment).text

    def wrap(inner: Display, feed: LiveFeed, run_dir: Path) -> Display:
        if not senders:
            return inner
        return RunNotifier(inner, feed, run_dir.absolute(), senders, redact)

    try:
        yield wrap
    finally:
        until_s = time.monotonic() + CLOSE_S
        for sender in senders:
            sender.begin_close()
        with contextlib.suppress(KeyboardInterrupt):  # the run has ended: keep its exit code
            for sender in senders:
                if text := sender.close(until_s):
                    tell(f"outlast: {text}")
