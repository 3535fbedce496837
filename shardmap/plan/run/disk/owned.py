"""Names of temporary files, which tell the process that made them.

A process that is killed leaves its files behind. Whoever uses the folder next removes
them: a name says on which machine and in which process it was made.
"""

import os
import re
import secrets
import socket


def own_name() -> str:
    """A name that nobody has made before."""
    return f"{_machine()}.{os.getpid()}.{secrets.token_hex(8)}"


def is_left(name: str) -> bool:
    """Whether the process that made a name with `own_name` in it has ended.

    Of another machine nobody knows that here.
    """
    found = re.search(rf"{re.escape(_machine())}\.(\d+)\.[0-9a-f]{{16}}", name)
    return found is not None and not is_alive(int(found[1]))


def is_alive(process: int) -> bool:
    """Whether a process of this machine runs. On Windows the answer is always yes."""
    if os.name == "nt":  # Where signal 0 is not a question but Ctrl-C.
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _machine() -> str:
    """This machine, or this container if it numbers its processes by itself."""
    try:
        return f"{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()
