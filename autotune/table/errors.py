"""What goes wrong with a table, in one line each."""

from __future__ import annotations


def show(value: object, limit: int = 60) -> str:
    """``repr`` of foreign data, on one line and short enough for a log."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


class TableError(ValueError):
    """A table that must not be used. ``str(error)`` is one line: place, problem, remedy."""

    def __init__(self, place: str, problem: str) -> None:
        self.place = place
        self.problem = problem
        super().__init__(" ".join(f"{place}: {problem}".split()))

    def within(self, file: str) -> TableError:
        """The same error with the file's name in front."""
        return TableError(f"{file}: {self.place}" if self.place else file, self.problem)


class TableWriteError(OSError):
    """A table could not be written; the previous file, if there was one, is untouched."""
