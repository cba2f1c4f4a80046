"""Which processes are shown: the filter, as it is typed and as it is applied."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Query:
    """A filter; what is empty lets everything through."""

    user: str = ""
    """A user name, with `*` and `?` as in a shell."""
    gpus: tuple[str, ...] = ()
    """Labels of GPUs; that of a whole GPU includes its MIG instances."""
    text: tuple[str, ...] = ()
    """Words that all must occur, in whatever case."""

    def __bool__(self) -> bool:
        return bool(self.user or self.gpus or self.text)

    def __str__(self) -> str:
        parts = [f"user:{self.user}"] if self.user else []
        if self.gpus:
            parts.append(f"gpu:{','.join(self.gpus)}")
        return " ".join([*parts, *self.text])

    def admits(self, *, user: str, gpus: Iterable[str], text: str) -> bool:
        """Whether a process of this user, on these GPUs, with this command line passes."""
        if self.user and not fnmatchcase(user, self.user):
            return False
        if self.gpus and not any(_is_part(label, wanted) for label in gpus for wanted in self.gpus):
            return False
        return all(word in text for word in self.text) or all(
            word.lower() in text.lower() for word in self.text
        )


def parse(typed: str) -> Query:
    """`user:ada gpu:0,2-3 train` as a filter; anything can be left out."""
    user, gpus = "", ()  # type: tuple[str, tuple[str, ...]]
    text: list[str] = []
    for word in typed.split():
        name, colon, value = word.partition(":")
        if colon and name == "user":
            user = value
        elif colon and name == "gpu":
            gpus = tuple(label for part in value.split(",") if part for label in _labels(part))
        else:
            text.append(word)
    return Query(user, gpus, tuple(text))


def _labels(part: str) -> list[str]:
    first, dash, last = part.partition("-")
    if dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 1000:
        return [str(index) for index in range(int(first), int(last) + 1)]
    return [part]


def _is_part(label: str, wanted: str) -> bool:
    return label == wanted or label.startswith(f"{wanted}:")


def following(current: str, choices: Iterable[str]) -> str:
    """The choice after the current one; nothing comes first and after the last."""
    ordered = ["", *choices]
    return ordered[(ordered.index(current) + 1) % len(ordered)] if current in ordered else ""
