"""Who works on what, in a folder that several processes share.

A claim is a file that its maker touches as long as it lives. One that nobody touches is
taken over after a while, and at once if its maker ran on this machine and is gone. Two
that work on the same after all write the same bytes: claims save work, no more.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator

from shardmap.plan.run.disk.owned import is_alive
from shardmap.plan.run.disk.results import Folder

LEASE = 60.0
"""For how many seconds a claim stands that nobody renews."""


class Claims:
    """The claims of one process.

    Args:
      folder: where they are.
      lease: for how many seconds a claim stands that nobody renews.
    """

    def __init__(self, folder: Folder, lease: float = LEASE) -> None:
        self._folder, self._lease = folder, lease
        self.token = secrets.token_hex(8)
        who = {"host": socket.gethostname(), "pid": os.getpid(), "token": self.token}
        self._who = json.dumps(who).encode()

    @contextlib.contextmanager
    def claimed(self, name: str) -> Iterator[bool]:
        """Claims a piece of work while the block runs.

        Yields:
          Whether nobody else has it.
        """
        name = f"{name}.claim"
        mine = self._folder.write(name, self._who, anew=True)
        if not mine and self._is_left(name) and self._take_away(name):
            mine = self._folder.write(name, self._who, anew=True)
        if not mine:
            yield False
            return
        over = threading.Event()
        renewing = threading.Thread(target=self._renew, args=(name, over), daemon=True)
        renewing.start()
        try:
            yield True
        finally:
            over.set()
            renewing.join()
            if self._folder.read(name) == self._who:
                (self._folder.path / name).unlink(missing_ok=True)

    def live(self, name: str) -> bool:
        """Whether somebody works on it."""
        name = f"{name}.claim"
        return (self._folder.path / name).exists() and not self._is_left(name)

    def _renew(self, name: str, over: threading.Event) -> None:
        while not over.wait(self._lease / 4):
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._folder.path / name)

    def _is_left(self, name: str) -> bool:
        """Whether a claim is one of a process that is no more."""
        try:
            touched = (self._folder.path / name).stat().st_mtime
            content = self._folder.read(name)
        except FileNotFoundError:
            return True
        if content is None or self._now() - touched > self._lease:
            return True
        try:
            who = json.loads(content)
            host, pid = who["host"], int(who["pid"])
        except (ValueError, KeyError, TypeError):
            return False  # Until nobody has touched it for long enough.
        return host == socket.gethostname() and not is_alive(pid)

    def _now(self) -> float:
        """The time by the clock of whoever holds the folder."""
        path = self._folder.path / f"{self.token}.now"
        path.touch()
        now = path.stat().st_mtime
        path.unlink(missing_ok=True)
        return now

    def _take_away(self, name: str) -> bool:
        """Removes a claim; of several that try, one does."""
        path = self._folder.path / name
        aside = path.with_name(f"{name}.{secrets.token_hex(8)}.part")
        try:
            path.rename(aside)
        except FileNotFoundError:
            return False
        aside.unlink(missing_ok=True)
        return True


def pause(seconds: float) -> None:
    """Lets others work."""
    time.sleep(seconds)
