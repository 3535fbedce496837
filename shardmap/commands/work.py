"""`python -m shardmap work`: runs a plan that `ShardPlan.save` has written."""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shardmap.commands.parsing import Parser, one_line
from shardmap.plan.away.cores import take_share

EXAMPLES = (
    "python -m shardmap work job/ --task 17",
    "python -m shardmap work job/ --processes 4",
    "python -m shardmap work job/ --status",
    "python -m shardmap work job/ --finish",
)
# The variables of array jobs: a task's number, the first number, how many there are.
ARRAYS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT"),
    ("JOB_COMPLETION_INDEX", None, None),
    ("AWS_BATCH_JOB_ARRAY_INDEX", None, "AWS_BATCH_JOB_ARRAY_SIZE"),
    ("BATCH_TASK_INDEX", None, "BATCH_TASK_COUNT"),
    ("SGE_TASK_ID", "SGE_TASK_FIRST", None),
    ("PBS_ARRAY_INDEX", None, None),
)


def array_task(around: Mapping[str, str]) -> tuple[int, int | None] | None:
    """The task that this process is of an array job, and of how many, if it is one.

    >>> array_task({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "1"})
    (2, None)
    >>> array_task({"JOB_COMPLETION_INDEX": "5"})
    (5, None)
    >>> array_task({"SGE_TASK_ID": "undefined"})
    """
    for name, first, count in ARRAYS:
        if around.get(name, "").isdecimal():
            start = int(around.get(first, "0")) if first else 0
            of = around.get(count) if count else None
            return int(around[name]) - start, int(of) if of else None
    return None


def main(arguments: Sequence[str]) -> int:
    """Runs what was asked for, and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.processes is not None:
        if options.processes < 1:
            parser.error(f"--processes must be at least 1, got {options.processes}")
        return _several(options.processes, arguments)
    if options.share:
        take_share(*map(int, options.share.split("/")))
    if options.modules and "" not in sys.path:
        sys.path.insert(0, "")  # As Python itself does, but not the installed script.
    try:
        for module in options.modules:
            importlib.import_module(module)
        return _work(parser, options)
    except (ValueError, OSError, ImportError) as error:
        print(f"{parser.prog}: {one_line(str(error))}", file=sys.stderr)
        return 2


def _parser() -> Parser:
    parser = Parser(
        "work",
        "Run a plan that made.save(FOLDER) has written: one task of it, which in an\n"
        "array job is the task's number in that, or all that is left. Several may\n"
        "work on one folder at a time, and one that was stopped may be run again.",
        EXAMPLES,
    )
    parser.add_argument("folder", metavar="FOLDER", help="the folder")
    parser.add_argument("--task", type=int, metavar="N", help="run this task only")
    parser.add_argument(
        "--of", type=int, metavar="COUNT", help="of so many tasks, if not as saved"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="tell how far it is")
    what.add_argument(
        "--finish", action="store_true", help="run what is left, and tell the results"
    )
    what.add_argument(
        "--check", action="store_true", help="read all that was made, as a check"
    )
    parser.add_argument(
        "--processes", type=int, metavar="P", help="so many, each with its cores"
    )
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument(
        "--lease",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="when a task that shows no life is given up (default %(default)g)",
    )
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module that registers how values travel",
    )
    return parser


def _several(count: int, arguments: Sequence[str]) -> int:
    """Runs as many processes, each of which has its share of the cores."""
    rest = list(arguments)
    for place, text in enumerate(rest):
        if text == "--processes":
            del rest[place : place + 2]
            break
        if text.startswith("--processes="):
            del rest[place]
            break
    command = [sys.executable, "-m", "shardmap", "work", *rest, "--share"]
    started = [
        subprocess.Popen([*command, f"{number}/{count}"]) for number in range(count)
    ]
    codes = [process.wait() for process in started]
    return max(code if code >= 0 else 128 - code for code in codes)


def _work(parser: Parser, options: argparse.Namespace) -> int:
    # JAX starts when the job is opened, which `--share` comes before.
    folder = importlib.import_module("shardmap.plan.away.folder.work")
    jobs = importlib.import_module("shardmap.plan.away.folder.job")
    job = jobs.Job(options.folder)
    worker = folder.Worker(job, options.lease, lambda line: print(line, flush=True))
    if options.status:
        return _status(job, worker)
    if options.check:
        bad = worker.check()
        print(f"{bad} shards are to be run again" if bad else "all is as it was made")
        return 1 if bad else 0
    task, of = options.task, options.of
    if task is None and not options.finish:
        found = array_task(os.environ)
        if found is not None:
            task, count = found
            of = of or count
    count = of or job.tasks
    if task is not None and not 0 <= task < count:
        parser.error(
            f"--task must be from 0 to {count - 1}, got {task}: {options.folder} was "
            f"saved for {job.tasks} tasks, --of says otherwise"
        )
    worker.run(None if options.finish else task, of)
    if task is None or options.finish:
        for name, where in folder.results(job).items():
            print(f"{name}: {where}")
    return 0


def _status(job: Any, worker: Any) -> int:
    wrote = ", ".join(f"{k} {v}" for k, v in job.body["versions"].items())
    print(f"written by {wrote}")
    for stage in worker.status():
        state = "done" if stage.over else f"{stage.claimed} under way"
        print(
            f"stage {stage.stage}: {stage.done} of {stage.units} parts done "
            f"({stage.shards:,} shards), {state}"
        )
    return 0
