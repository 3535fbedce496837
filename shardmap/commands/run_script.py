"""Runs a script as `python script.py` does, but ends at once when it fails.

A Python program that has called `jax.distributed.initialize` waits for the others at
its end, also if it has failed, while they wait for it. `python -m shardmap run` starts
this file by its path, so that the script is the first to import JAX.
"""

import os
import runpy
import signal
import sys
import threading
import traceback


def main() -> None:
    """Called with the read end of a pipe from the parent, the script, its arguments."""
    parent, script = int(sys.argv[1]), sys.argv[2]
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        code = exit.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        show(error, script)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    else:
        code = 0
    if code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))


def show(error: BaseException, script: str) -> None:
    """Prints an exception as Python would, beginning in the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace or error.__traceback__))


def end_with(parent: int) -> None:
    """Ends this process, and those that it has started, when the parent has ended."""
    os.read(parent, 1)  # Returns when the other end is shut: nothing is written.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
