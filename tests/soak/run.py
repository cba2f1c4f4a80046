"""One soak: starts the parts and observers, carries out the schedule, reads the results and checks them."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from tests.integration.browser import Tab
from tests.integration.cluster import until
from tests.soak import checks, schedule
from tests.soak.observations import Claim, SessionFile, tolerance
from tests.soak.observers import (
    AnswerObserver,
    Observer,
    PageObserver,
    ScrapeObserver,
    UsageObserver,
)
from tests.soak.parts import FAULT, FAULTY, HEALTHY, INTERVAL_SECONDS, NODES, STEADY, Parts
from tests.soak.report import Summary
from tests.soak.results import read_database, read_history, read_session, read_stored, seconds_of

_START_AND_END_SECONDS = 60.0
"""What starting everything and the checks at the end usually take; part of the run's minutes."""
_MIN_ACTIVE_SECONDS = 60.0
_PROGRESS_SECONDS = 8.0
_SHORT_SESSION_SECONDS = 4.0
_DATABASE_DOWN_SECONDS = 3.0
_WHOLE = "whole"
_FAULT_START = f"start of the constant fault of {FAULTY}"
_PATIENCE_SECONDS = 120.0
_SETTLE_SECONDS = 30.0
Times = dict[tuple[str, str], list[float]]


class Soak:
    """One run."""

    def __init__(self, directory: Path, *, minutes: float, seed: int) -> None:
        self.minutes, self.seed = minutes, seed
        self.done: Counter[str] = Counter()
        self.counts: dict[str, int] = {}
        self.violations: list[str] = []
        self.parts = Parts(directory)
        self._phase = "starting"
        self._begun = time.monotonic()
        self._since = time.time()
        self._claims: list[Claim] = []
        self._statements: list[tuple[float, str]] = []
        self._short = 0
        self._progress_done = threading.Event()
        self._pages: PageObserver
        self._usage = UsageObserver(self.parts)
        self._answers = AnswerObserver(self.parts)
        self._scrapes = ScrapeObserver(self.parts, STEADY[0])

    def run(self) -> None:
        """Run to the end; whatever stops it early is a violation, too."""
        progress = threading.Thread(target=self._progress, name="soak-progress", daemon=True)
        progress.start()
        with ExitStack() as stack:
            stack.callback(progress.join)
            stack.callback(self._progress_done.set)
            stack.enter_context(self.parts)
            try:
                self._run(stack)
            except Exception as error:  # noqa: BLE001  everything seen so far is still reported
                self.violations.append(f"the soak could not go on while {self._phase}: {error!r}")
                traceback.print_exc(file=sys.stdout)
                self._check_observations(time.time())

    def summary(self) -> Summary:
        """Return what the report shows."""
        return Summary(
            self.seed,
            self.minutes,
            (time.monotonic() - self._begun) / 60,
            self.done,
            self.counts,
            self._usage.usages,
            self.parts.outages,
            self.violations,
        )

    def _run(self, stack: ExitStack) -> None:
        self.parts.start()
        self._pages = PageObserver(self.parts.head.http_port)
        observers: list[Observer] = [self._pages, self._usage, self._answers, self._scrapes]
        for observer in observers:
            stack.callback(observer.stop)
            observer.start()
        until(lambda: self._pages.received or self._pages.failure, "the page is live", _PATIENCE_SECONDS)
        active = max(_MIN_ACTIVE_SECONDS, self.minutes * 60 - _START_AND_END_SECONDS)
        others = [node for node in NODES if node not in (*STEADY, FAULTY)]
        actions = schedule.plan(self.seed, active, faulty=FAULTY, others=others)
        print(schedule.describe(self.seed, actions), flush=True)
        self._phase = "running"
        self._session("start", _WHOLE)
        begin = time.monotonic()
        for action in actions:
            self._wait(begin + action.at_seconds)
            print(f"{_now()} {action.kind} {action.node}".rstrip(), flush=True)
            self._phase = f"{action.kind} {action.node}".rstrip()
            self._carry_out(action)
            self.done[action.kind] += 1
            self._phase = "running"
        self._wait(begin + active)
        self._finish(observers)

    def _wait(self, moment: float) -> None:
        left = moment - time.monotonic()
        if left > 0:
            time.sleep(left)  # time is what a soak is about

    # --- disturbances ---

    def _carry_out(self, action: schedule.Action) -> None:
        parts = self.parts
        match action.kind:
            case schedule.HEAD_RESTART:
                parts.restart_head(action.kind, kill=False, auto_resume=True)
            case schedule.HEAD_KILL:
                parts.restart_head(action.kind, kill=True, auto_resume=False)
                self._recover()
            case schedule.HEAD_KILL_TWICE:
                parts.restart_head(action.kind, kill=True, auto_resume=True)
                until(parts.connected, "an agent is connected", _PATIENCE_SECONDS)
                parts.restart_head(action.kind, kill=True, auto_resume=True)
            case schedule.AGENT_RESTART:
                parts.stop_agent(action.node, action.kind, kill=False)
                parts.start_agent(action.node)
            case schedule.AGENT_KILL:
                parts.stop_agent(action.node, action.kind, kill=True)
                parts.start_agent(action.node)
            case schedule.AGENT_OUTAGE:
                parts.stop_agent(action.node, action.kind, kill=True)
                self._claim_last_heard(action.node)
                parts.start_agent(action.node)
            case schedule.DATABASE_KILL:
                parts.restart_database(action.kind, _DATABASE_DOWN_SECONDS)
            case schedule.PAGE_RELOAD:
                self._pages.reload()
            case schedule.SHORT_SESSION:
                parts.wait_until_caught_up()
                self._short += 1
                self._session("start", f"short-{self._short}")
                time.sleep(_SHORT_SESSION_SECONDS)
                self._session("stop", f"short-{self._short}")

    def _session(self, verb: str, name: str) -> None:
        ended = self.parts.run("session", verb, name)
        self._statements.append((time.time(), ended.out))

    def _recover(self) -> None:
        """Resume the session that the killed head left, as an operator does.

        It goes on by itself when that head had got no frame yet after it resumed the session.
        """
        listed = (self.parts.get("/api/v1/sessions") or {"sessions": ()})["sessions"]
        if not any(one["name"] == _WHOLE and one["is_active"] for one in listed):
            self._session("recover", _WHOLE)

    # --- times as different sources state them ---

    def _claim(self, subject: str, source: str, moment: float | None, resolution: float) -> None:
        if moment is None:
            self.violations.append(f"{subject}: {source} does not state it")
        else:
            self._claims.append(Claim(subject, source, moment, resolution))

    def _claim_last_heard(self, node: str) -> None:
        subject = f"{node} last heard ({_now()})"

        def of(document: dict[str, Any] | None) -> float | None:
            entries = (document or {}).get("nodes", ())
            return next((seconds_of(one["last_seen"]) for one in entries if one["name"] == node), None)

        def card(staying: Tab, _: Tab) -> str:
            place = staying.page.locator(f'article[data-node="{node}"] .card-head')
            place.scroll_into_view_if_needed()
            expect(place).to_contain_text(" since ", timeout=_PATIENCE_SECONDS * 1000)
            return place.text_content() or ""

        shown = self._pages.ask(card)
        listed = json.loads(self.parts.run("status", "--json").out or "{}")
        self._claim(subject, "GET /status", of(self.parts.get("/status")), 0.001)
        self._claim(subject, "gpulse status", of(listed), 0.001)
        self._claim(subject, "overview page", _clock_near(shown, time.time()), 1.0)

    def _claim_session(self, file: SessionFile) -> None:
        documents = {
            "GET /api/v1/sessions": self.parts.get("/api/v1/sessions"),
            "gpulse session list": json.loads(self.parts.run("session", "list", "--json").out or "{}"),
        }
        for word, stated in (("start", file.start), ("end", file.end)):
            subject = f"{word} of session {_WHOLE}"
            for source, document in documents.items():
                times = [
                    seconds_of(one[f"{word}_time"])
                    for one in (document or {}).get("sessions", ())
                    if one["name"] == _WHOLE and one[f"{word}_time"] is not None
                ]
                self._claim(subject, source, times[0] if times else None, 0.0)
            self._claim(subject, "session file", stated, 0.0)

    def _claim_on_pages(self) -> None:
        def rows(_: Tab, walking: Tab) -> str:
            walking.go("sessions")
            walking.settled()
            row = walking.page.locator("main tbody tr").filter(
                has=walking.page.get_by_role("link", name=_WHOLE, exact=True)
            )
            row.first.wait_for()
            return row.first.locator('[data-label="Start"]').inner_text()

        def facts(_: Tab, walking: Tab) -> str:
            walking.go("findings", query=f"?node={FAULTY}")
            walking.settled()
            walking.page.locator(".finding-row").filter(has_text=FAULTY).first.wait_for()
            return walking.page.locator(".finding-figures").inner_text()

        now = time.time()
        self._claim(
            f"start of session {_WHOLE}", "sessions page", _clock_near(self._pages.ask(rows), now), 1.0
        )
        since = _clock_near(self._pages.ask(facts), now)
        self._claim(_FAULT_START, "findings page", since, 60.0)
        for source, document in (
            ("GET /api/v1/findings", self.parts.get("/api/v1/findings")),
            ("GET /status", self.parts.get("/status")),
            ("gpulse status", json.loads(self.parts.run("status", "--json").out or "{}")),
        ):
            starts = [
                one["start"]
                for one in (document or {}).get("findings", ())
                if (one["node"], one["label"], one["id"]) == FAULT
            ]
            self._claim(_FAULT_START, source, starts[0] if starts else None, 0.001)

    # --- the end ---

    def _finish(self, observers: list[Observer]) -> None:
        self._phase = "finishing"
        self._claim_on_pages()
        self.parts.wait_until_caught_up()
        self._session("stop", _WHOLE)
        whole = read_session(self._file(_WHOLE))
        self._claim_session(whole)
        self._claim(_FAULT_START, "session file", whole.finding_starts.get(FAULT), 0.001)
        spans, start = self._fault_history()
        self._claim(_FAULT_START, "GET /api/v1/findings/history", spans[-1][0] if spans else None, 0.001)
        subject = f"start of the constant fault in session {_WHOLE}"
        for node, kind, label, first, _ in whole.findings:
            if (node, label, kind) == FAULT and start is not None:
                self._claim(subject, "session file", first, 0.001)
                # A file may state the beginning of the session for what began before it.
                is_cut = abs(first - whole.start) < 0.01
                self._claim(
                    subject, "GET /api/v1/findings", max(start, whole.start) if is_cut else start, 1.0
                )
        page_end = time.time()
        for observer in observers:
            observer.stop()
            if observer.failure is not None:
                self.violations.append(f"the observer {observer.name} failed: {observer.failure.strip()}")
        for node in NODES:
            self.parts.stop_agent(node, "end", kill=False)
        self.parts.wait_until_sent()
        database, history = self._settled()
        self.parts.end_head()
        stored = read_stored(self.parts.head.data_dir)
        found = self.violations
        found += checks.frames(stored, self.parts.lives, INTERVAL_SECONDS)
        found += checks.same_times(stored.samples, database, "time-series database")
        found += checks.same_times(stored.samples, history, "history over HTTP")
        files = [whole, *(read_session(self._file(f"short-{n}")) for n in range(1, self._short + 1))]
        for file in files:
            found += checks.session_file(file, stored)
        found += checks.stated_gaps(self._statements, whole)
        found += checks.finding_spans(spans, start)
        found += checks.session_findings(whole, self.parts.outages, faulty=FAULT, healthy=HEALTHY)
        self._check_observations(page_end)
        self.counts |= {
            "agent starts": len(self.parts.lives),
            "frames stored": sum(len(run.frames) for run in stored.runs),
            "frames counted by agents": sum(life.counted or 0 for life in self.parts.lives),
            "utilization samples stored": sum(map(len, stored.samples.values())),
            "utilization samples in the database": sum(map(len, database.values())),
            "sessions": len(files),
            f"frames in the file of {_WHOLE}": len(whole.times),
        }

    def _settled(self) -> tuple[Times, Times]:
        """Return what the database and the head answer, once both are the same or after a while."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            self.parts.database.settle()
            database = read_database(self.parts)
            history = read_history(self.parts, NODES, self._since)
            if not checks.same_times(history, database, "") or time.monotonic() > deadline:
                return database, history
            time.sleep(0.5)

    def _file(self, name: str) -> Path:
        return self.parts.head.output_dir / f"{name}.json"

    def _fault_history(self) -> tuple[list[tuple[float, float | None]], float | None]:
        node, label, kind = FAULT
        answer = self.parts.get(f"/api/v1/findings/history?from={self._since}&nodes={node}")
        spans = [
            (one["from"], one["to"])
            for one in (answer or {"spans": ()})["spans"]
            if (one["label"], one["id"]) == (label, kind)
        ]
        polls = self._answers.polls
        starts = [
            one.start
            for poll in polls[-1:]
            for one in poll.findings
            if (one.node, one.label, one.id) == FAULT
        ]
        return spans, starts[0] if starts else None

    def _check_observations(self, page_end: float) -> None:
        outages = list(self.parts.outages)
        found = self.violations
        found += self.parts.problems
        if hasattr(self, "_pages"):
            found += checks.pages(self._pages.events, outages)
            found += checks.streams(self._pages.received, outages, page_end)
            closed = [event for event in self._pages.events if event.kind == "close"]
            self.counts |= {
                "page visits": self._pages.visits.total(),
                "kinds of pages": len(self._pages.visits),
                "WebSocket connections": sum(event.kind == "open" for event in self._pages.events),
                "WebSocket closes": len(closed),
            }
        lines = self.parts.log_lines()
        found += checks.logs(lines, outages)
        found += checks.growth(self._usage.usages, tolerance(self.minutes))
        found += checks.findings(self._answers.polls, outages, faulty=FAULT, healthy=HEALTHY)
        found += checks.reconnects(self._answers.contacts, outages, NODES)
        found += checks.scrapes(self._scrapes.scrapes, outages)
        found += checks.times_agree(self._claims)
        self.counts |= {
            "scrapes": len(self._scrapes.scrapes),
            "answers with findings": len(self._answers.polls),
            "log lines": len(lines),
            "times compared": len(self._claims),
        }

    # --- what people see meanwhile ---

    def _progress(self) -> None:
        while not self._progress_done.wait(_PROGRESS_SECONDS):
            passed = time.monotonic() - self._begun
            connected = self._answers.contacts[-1].connected if self._answers.contacts else ()
            pages = getattr(self, "_pages", None)
            statuses = [event.text for event in pages.events if event.kind == "status"] if pages else []
            print(
                f"{_now()} {passed / 60:4.1f} of {self.minutes:g} min, {self._phase}: {len(connected)} nodes connected,"
                f" page {statuses[-1][:40] if statuses else 'not open'}",
                flush=True,
            )


def _now() -> str:
    return datetime.now(UTC).strftime("%H:%M:%S")


def _clock_near(text: str, now: float) -> float | None:
    """Return the first clock time in a text as epoch seconds, on the day that brings it closest to now."""
    match = re.search(r"(\d\d):(\d\d)(?::(\d\d))?", text)
    if match is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    midnight = now - now % 86_400
    moments = [midnight + day * 86_400 + hours * 3600 + minutes * 60 + seconds for day in (-1, 0, 1)]
    return min(moments, key=lambda moment: abs(moment - now))


def save(directory: Path, target: Path, soak: Soak) -> None:
    """Copy logs, events and data of a run to a directory that stays."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(
        directory,
        target / "files",
        dirs_exist_ok=True,
        symlinks=True,
        ignore=shutil.ignore_patterns("driver-*"),
    )
    with (target / "log.txt").open("w", encoding="utf-8") as file:
        file.writelines(
            f"{line.part}: {line.time} {line.level} {line.text}\n" for line in soak.parts.log_lines()
        )
    with (target / "events.txt").open("w", encoding="utf-8") as file:
        file.writelines(f"{outage}\n" for outage in soak.parts.outages)
        pages = getattr(soak, "_pages", None)
        file.writelines(f"{event}\n" for event in (pages.events if pages else ()))
