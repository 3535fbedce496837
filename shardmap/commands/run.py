"""`python -m shardmap run`: starts a script in several processes on this machine.

The processes find each other as those of a cluster do, by environment variables that
`jax.distributed.initialize()` reads: each sees a SLURM job of one machine.
"""

import argparse
import contextlib
import math
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO, Any

from shardmap.commands.cpu_threads import enough_threads
from shardmap.commands.parsing import Parser

EXAMPLES = (
    "python -m shardmap run -n 2 train.py",
    "python -m shardmap run -n 4 --devices-per-process 2 train.py --steps 100",
    "python -m shardmap run -n 16 --sbatch 2 train.py",
)
SCRIPT_RUNNER = pathlib.Path(__file__).with_name("run_script.py")
GRACE = 5.0
MOST = 1024
"""The most processes, and devices of each: more must be a mistake."""
HERE = "127.0.0.1"
# JAX prefers the variables of these launchers to SLURM's.
OTHER_LAUNCHERS = re.compile("OMPI_|PMIX_|SLURM_")
PROXIES = {"grpc_proxy", "https_proxy", "http_proxy"}
"""The variables that gRPC takes a proxy from."""
DEVICE_FLAG = re.compile(r"--xla_force_host_platform_device_count=\d+")


def main(arguments: Sequence[str]) -> int:
    """Runs the script, and returns the exit code of the first process that failed."""
    parser = Parser(
        "run",
        "Start a script in several processes on this machine. The script calls\n"
        "jax.distributed.initialize() without arguments, as on a cluster. Each line\n"
        "of output begins with the number of its process. When a process fails, the\n"
        "others are ended.",
        EXAMPLES,
    )
    parser.add_argument(
        "-n",
        "--processes",
        type=_count,
        required=True,
        metavar="N",
        help="how many processes",
    )
    parser.add_argument(
        "--devices-per-process",
        type=_count,
        default=1,
        metavar="D",
        help="how many devices each has: virtual ones on CPU (default 1)",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=GRACE,
        metavar="SECONDS",
        help="how many seconds processes have to end (default %(default)g)",
    )
    parser.add_argument(
        "--sbatch",
        type=_count,
        metavar="STAGES",
        help="start nothing, but print the commands that start the script as an array "
        "job of N tasks on SLURM, for a plan of so many stages; the script gets the "
        "index of its task, N and, in jobs by stage, the stage",
    )
    parser.add_argument("script", help="the Python file")
    parser.add_argument("arguments", nargs="...", help="the script's own arguments")
    options = parser.parse_args(arguments)
    if not os.path.isfile(options.script):
        parser.error(f"there is no file {options.script}")
    if options.sbatch:
        script = shlex.join(["python", options.script, *options.arguments])
        print(array_jobs(script, options.processes, options.sbatch))
        return 0
    count, devices, port = options.processes, options.devices_per_process, free_port()
    environments = [
        environment(process, count, devices, port, os.environ)
        for process in range(count)
    ]
    command = [options.script, *options.arguments]
    return Launch(command, environments).run(options.grace)


def array_jobs(command: str, count: int, stages: int) -> str:
    """The commands of SLURM that run a plan as an array job.

    >>> print(array_jobs("python script.py", 4, 2))
    # All tasks at the same time, each with its part of every stage:
    sbatch --array=0-3 --wrap 'python script.py $SLURM_ARRAY_TASK_ID 4'
    # Or a job for each stage, which begins when the one before has ended:
    job=$(sbatch --parsable --array=0-3 --wrap 'python script.py $SLURM_ARRAY_TASK_ID 4 0')
    job=$(sbatch --parsable --dependency=afterok:$job --array=0-3 --wrap 'python script.py $SLURM_ARRAY_TASK_ID 4 1')
    """  # noqa: E501
    task = f"{command} $SLURM_ARRAY_TASK_ID {count}"
    array = f"--array=0-{count - 1} --wrap"
    lines = [
        "# All tasks at the same time, each with its part of every stage:",
        f"sbatch {array} {shlex.quote(task)}",
        "# Or a job for each stage, which begins when the one before has ended:",
    ]
    after = ""
    for stage in range(stages):
        wrapped = shlex.quote(f"{task} {stage}")
        lines.append(f"job=$(sbatch --parsable {after}{array} {wrapped})")
        after = "--dependency=afterok:$job "
    return "\n".join(lines)


def _count(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= MOST):
        raise argparse.ArgumentTypeError(
            f"must be a whole number from 1 to {MOST:,}, got {text!r}"
        )
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"must be a number of seconds, got {text!r}")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HERE, 0))
        return int(sock.getsockname()[1])


def environment(
    process: int, processes: int, devices: int, port: int, around: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables of one process.

    >>> given = environment(1, 2, 2, 5000, {"OMPI_COMM_WORLD_SIZE": "9", "HOME": "/"})
    >>> given["SLURM_PROCID"], given["JAX_LOCAL_DEVICE_IDS"], len(given)
    ('1', '2,3', 11)
    """
    kept = {
        name: value for name, value in around.items() if not OTHER_LAUNCHERS.match(name)
    }
    if "XLA_FLAGS" in kept:
        kept["XLA_FLAGS"] = DEVICE_FLAG.sub("", kept["XLA_FLAGS"])
    if PROXIES & kept.keys():
        # Otherwise gRPC uses the proxy even on this machine. JAX warns about it.
        kept["no_grpc_proxy"] = f"localhost,{HERE}"
    ids = range(process * devices, (process + 1) * devices)
    return (
        kept
        | enough_threads(kept)
        | {
            "JAX_COORDINATOR_ADDRESS": f"{HERE}:{port}",
            # By default JAX listens on all interfaces, without authentication.
            "JAX_COORDINATOR_BIND_ADDRESS": f"{HERE}:{port}",
            "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, ids)),
            "JAX_NUM_CPU_DEVICES": str(devices),
            "SLURM_JOB_ID": str(port),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": str(processes),
            "SLURM_PROCID": str(process),
            "SLURM_LOCALID": str(process),
        }
    )


class Launch:
    """Processes that start and end together.

    Args:
      command: the script and its arguments.
      environments: the environment of each process.
    """

    def __init__(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> None:
        self._command = command
        self._environments = environments
        self._processes: list[subprocess.Popen[bytes]] = []
        self._writing = threading.Lock()
        self._signal: int | None = None
        self._is_over = False

    def run(self, grace: float) -> int:
        """Starts all, waits for all, and returns the exit code.

        Args:
          grace: seconds between SIGTERM and SIGKILL to the rest.
        """
        before = {
            number: signal.signal(number, self._pass_on)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        # The processes end when the other end of this pipe is closed, which happens
        # however this process ends.
        parent, held = os.pipe()
        try:
            streams = []
            for environment in self._environments:
                if self._signal is None:
                    streams.append(self._start(parent, environment))
            return self._wait(streams, grace)
        except (OSError, RuntimeError) as error:  # Too many open files or threads.
            self._say(f"process {len(self._processes)} cannot start: {error}")
            return 2
        finally:
            self._send(signal.SIGKILL)
            for process in self._processes:
                process.wait()
            with self._writing:
                self._is_over = True
            os.close(parent)
            os.close(held)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(
        self, parent: int, environment: Mapping[str, str]
    ) -> list[threading.Thread]:
        """Starts the next process, and threads that copy its output."""
        number = len(self._processes)
        process = subprocess.Popen(
            [sys.executable, "-u", str(SCRIPT_RUNNER), str(parent), *self._command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[parent],
            # Ctrl-C in a terminal reaches only this process, which passes it on.
            start_new_session=True,
        )
        self._processes.append(process)
        if self._signal is not None:  # It may have arrived during the start.
            _send_to_group(process, signal.SIGTERM)
        # Daemons, as children in other sessions may keep the pipes open.
        streams = [
            threading.Thread(target=self._copy, args=(number, source, to), daemon=True)
            for source, to in (
                (process.stdout, sys.stdout),
                (process.stderr, sys.stderr),
            )
        ]
        for thread in streams:
            thread.start()
        return streams

    def _copy(self, number: int, source: IO[bytes], to: IO[Any]) -> None:
        with source:
            for line in source:
                text = line.decode(errors="replace").rstrip("\n")
                with self._writing:
                    if self._is_over:
                        continue
                    try:
                        print(f"[{number}] {text}", file=to, flush=True)
                    except BrokenPipeError:  # The reader has gone, as with ``| head``.
                        self._is_over = True
                        self._signal = signal.SIGPIPE
                        self._send(signal.SIGTERM)

    def _wait(self, streams: Sequence[Sequence[threading.Thread]], grace: float) -> int:
        code, deadline = 0, math.inf
        running = set(range(len(self._processes)))
        while running:
            if self._signal is not None:
                deadline = min(deadline, time.monotonic() + grace)
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            time.sleep(0.05)
            for number in sorted(running):
                process = self._processes[number]
                if process.poll() is None:
                    continue
                running.remove(number)
                for thread in streams[number]:
                    thread.join(timeout=1)  # Its children may keep the pipes open.
                _send_to_group(process, signal.SIGKILL)
                if process.returncode and not code:
                    ended = process.returncode
                    code = ended if ended > 0 else 128 - ended
                    if self._signal is None:
                        self._say(f"process {number} ended with code {code}")
                        self._send(signal.SIGTERM)
                    deadline = min(deadline, time.monotonic() + grace)
        return code if not code or self._signal is None else 128 + self._signal

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                _send_to_group(process, number)

    def _say(self, text: str) -> None:
        with self._writing:
            print(f"python -m shardmap run: {text}", file=sys.stderr, flush=True)


def _send_to_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to a process and its children."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):  # macOS raises the latter, too.
        pass
