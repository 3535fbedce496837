"""The Python files that `old --check` reads."""

from collections.abc import Iterable, Iterator
from pathlib import Path


def python_files(paths: Iterable[str]) -> Iterator[Path]:
    """The Python files of ``paths``, which are files and folders.

    Raises:
      ValueError: there is no such file or folder.
    """
    for text in paths:
        path = Path(text)
        if not path.exists():
            raise ValueError(f"there is no file or folder {text}")
        if path.is_file():
            yield path
            continue
        for file in sorted(path.rglob("*.py")):
            inside = file.relative_to(path).parts[:-1]
            if file.is_dir() or any(part.startswith(".") for part in inside):
                continue
            yield file
