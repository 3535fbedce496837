"""The lines of the user's program that the instructions of a compiled one are of.

XLA's text has them as four tables, each row of which begins with its number: files,
functions, places in both, and frames, each of a place and of the frame around it.
"""

import re
from collections.abc import Iterator
from typing import Any

from shardmap.explain.read.source import user_line

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_NAME = re.compile(r'^(\d+) "(.*)"$')
_FIELDS = re.compile(r"(\w+)=(\d+)")


class Frames:
    """The tables of a program."""

    def __init__(self, text: str) -> None:
        self._tables: dict[str, dict[int, Any]] = {
            name: dict(_rows(text, name)) for name in _TABLES
        }

    def source(self, frame: int) -> str | None:
        """The innermost line of the user's that a frame is in."""
        return user_line(map(self.place, self.stack(frame)))

    def place(self, frame: int) -> tuple[str, int, str]:
        """File, line and function of a frame."""
        files, functions, places, frames = (self._tables[name] for name in _TABLES)
        place = places.get(frames[frame]["file_location_id"], {})
        return (
            files.get(place.get("file_name_id"), ""),
            place.get("line", 0),
            functions.get(place.get("function_name_id"), ""),
        )

    def stack(self, frame: int) -> Iterator[int]:
        """The frame, then those around it."""
        frames = self._tables["StackFrames"]
        while fields := frames.get(frame):
            yield frame
            # Zero stands for none, and all others are one too high.
            around = fields.get("parent_frame_id", 0) - 1
            if around >= frame:
                return
            frame = around


def _rows(text: str, table: str) -> Iterator[tuple[int, Any]]:
    """The rows of a table: a name, or numbers by their names."""
    found = re.search(rf"^{table}\n((?:\d.*\n)*)", text, re.MULTILINE)
    for row in found[1].splitlines() if found else ():
        name = _NAME.match(row)
        if name is not None:
            yield int(name[1]), name[2]
        else:
            fields = {key: int(value) for key, value in _FIELDS.findall(row)}
            yield int(row.split(" ", 1)[0]), fields
