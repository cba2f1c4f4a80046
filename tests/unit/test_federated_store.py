"""A head's disk and a shared database that fails: which answers are incomplete, and which are errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulse.errors import GpulseError
from gpulse.store.federated import Backend, FederatedStore
from gpulse.store.incomplete_answers import BackendOutage, collect_missing
from gpulse.store.local import LocalStore
from gpulse.store.store import Query, Store
from tests.queries import query


class _FailingStore(Store):
    """A database that does not answer."""

    def _fail(self, *_: object) -> list[object]:
        raise GpulseError("PostgreSQL is away")

    sessions = events = findings = processes = job_events = job_names = _fail  # type: ignore[assignment]


_QUESTIONS: dict[str, Callable[[Store], object]] = {
    "sessions": lambda store: store.sessions(),
    "events": lambda store: store.events(query(start=0.0, end=100.0)),
    "findings": lambda store: store.findings(query(start=0.0, end=100.0)),
    "processes": lambda store: store.processes(query(start=0.0, end=100.0)),
    "job events": lambda store: store.job_events("1"),
    "job names": lambda store: store.job_names(),
}


@pytest.mark.parametrize("question", _QUESTIONS.values(), ids=_QUESTIONS)
def test_a_strict_store_does_not_answer_without_the_shared_database(
    tmp_path: Path, question: Callable[[Store], object]
) -> None:
    """A report says that a part is missing; an export fails."""
    with LocalStore(str(tmp_path)) as local:
        store = FederatedStore(local, None, _FailingStore(), now=lambda: 100.0)
        with collect_missing() as incomplete:
            assert question(store) == []
        with pytest.raises(GpulseError, match="PostgreSQL is away"):
            question(store.strict)

    assert incomplete == ["some data is missing: PostgreSQL is away"]


def test_a_backend_may_recover_while_another_question_looks_at_it() -> None:
    """Another thread may find that it answers again at any moment."""
    backend = Backend(_FailingStore(), lambda: 0.0)
    backend.outage = BackendOutage(0.0, "PostgreSQL is away")
    backend._pause = (0.0, 10.0)

    def recover() -> float:
        backend.outage = None
        return 5.0

    backend._now = recover
    with collect_missing() as incomplete:
        assert backend.ask(lambda store, part: store.events(part), Query(0.0, 1.0), is_strict=False) is None

    assert incomplete == ["some data is missing: PostgreSQL is away"]
