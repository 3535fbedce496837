"""Runs a script as `python script.py` does, but ends at once when it fails.

After `jax.distributed.initialize`, a Python program that fails waits for the others at
its end, while they wait for it. `python -m shardmap run` starts this file by its path,
so that the script is the first to import JAX.
"""

import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable

# Frames around the program.
ABOVE = (os.path.dirname(__file__), "<frozen")


def main() -> None:
    """Runs ``sys.argv[2:]``; ``sys.argv[1]`` is a pipe from the parent."""
    parent, script = int(sys.argv[1]), sys.argv[2]
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if code := exit_code(lambda: runpy.run_path(script, run_name="__main__")):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def exit_code(program: Callable[[], object]) -> int:
    """Runs a program, prints its error as Python does, and returns its exit code."""
    try:
        program()
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return exit.code or 0
        print(exit.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename.startswith(ABOVE):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end_with(parent: int) -> None:
    """Ends this process and its children when the parent has ended."""
    os.read(parent, 1)  # Returns when the other end is closed: nothing is written.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
