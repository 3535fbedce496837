"""`python -m shardmap run`, with scripts that do not import JAX."""

import errno
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from shardmap.commands import run
from tests import command_line

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(
            "import os, signal, sys, time\n"
            "me = int(os.environ['SLURM_PROCID'])\n" + textwrap.dedent(text)
        )
        return str(path)

    return write


def test_lines_begin_with_the_number_of_the_process(script, capfd):
    path = script("print('out', sys.argv[1:]); print('error', file=sys.stderr)")
    assert run.main(["-n", "2", path, "--steps", "3", "-n"]) == 0
    out, error = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        f"[{k}] out ['--steps', '3', '-n']" for k in range(2)
    ]
    assert sorted(error.splitlines()) == ["[0] error", "[1] error"]


def test_what_a_process_is_told(script, capfd, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{run.DEVICE_FLAG.pattern[:-3]}8 --other")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "9")
    path = script(
        """
        names = ["SLURM_NTASKS", "JAX_NUM_CPU_DEVICES", "JAX_LOCAL_DEVICE_IDS"]
        print(*(os.environ[name] for name in names), os.environ["XLA_FLAGS"].strip())
        print("OMPI_COMM_WORLD_SIZE" in os.environ, os.environ["HOME"])
        print("address", os.environ["JAX_COORDINATOR_ADDRESS"])
        """
    )
    assert run.main(["-n", "2", "--devices-per-process", "3", path]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    addresses = [line[4:] for line in lines if "address" in line]
    assert len(set(addresses)) == 1
    assert re.fullmatch(r"address 127\.0\.0\.1:\d+", addresses[0])
    assert [line for line in lines if "address" not in line] == [
        "[0] 2 3 0,1,2 --other",
        f"[0] False {os.environ['HOME']}",
        "[1] 2 3 3,4,5 --other",
        f"[1] False {os.environ['HOME']}",
    ]


def test_the_script_is_the_main_module(script, tmp_path, capfd):
    (tmp_path / "beside.py").write_text("value = 7")
    path = script(
        "import beside; print(__name__, __file__ == sys.argv[0], beside.value)"
    )
    assert run.main(["-n", "1", path]) == 0
    assert capfd.readouterr().out == "[0] __main__ True 7\n"


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        ("raise KeyError('lost')", 1, "[1] KeyError: 'lost'"),
        ("sys.exit(7)", 7, "process 1 ended with code 7"),
        ("sys.exit('no data')", 1, "[1] no data"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "process 1 ended with code 137"),
    ],
)
def test_when_one_fails_all_end(failure, code, text, script, capfd):
    path = script(
        f"""
        if me == 1:
            {failure}
        time.sleep(60)
        print("went on")
        """
    )
    assert run.main(["-n", "3", path]) == code
    output, error = capfd.readouterr()
    assert "went on" not in output
    assert text in error
    assert "run_script" not in error


def test_the_first_failure_counts(script):
    path = script("time.sleep(0.5 * me); sys.exit(3 + me)")
    assert run.main(["-n", "2", path]) == 3


def test_who_does_not_end_is_ended(script, capfd):
    path = script(
        """
        signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
        time.sleep(0.5)
        if me == 0:
            sys.exit(4)
        while True:
            time.sleep(1)
        """
    )
    assert run.main(["-n", "2", "--grace", "0.5", path]) == 4
    assert "[1] asked" in capfd.readouterr().out


def started(path, *options):
    """The command in a process of its own, once its processes run, and their ids."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shardmap", "run", "-n", "2", *options, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    ids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    return process, ids


def are_gone(ids):
    """Whether these processes end within ten seconds."""
    deadline = time.monotonic() + 10
    while any(pathlib.Path(f"/proc/{number}").exists() for number in ids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.skipif(not pathlib.Path("/proc/self").exists(), reason="looks into /proc")
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.deep),
    ],
)
def test_signals_are_passed_on(number, code, script):
    path = script(
        """
        def asked(number, frame):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent when a process ends
            print(me, "asked", number, flush=True)
            sys.exit(1)
        for number in signal.SIGINT, signal.SIGTERM:
            signal.signal(number, asked)
        print(os.getpid())
        time.sleep(60)
        """
    )
    process, ids = started(path)
    process.send_signal(number)
    out, _ = process.communicate(timeout=300)
    assert sorted(out.splitlines()) == [
        f"[{k}] {k} asked {number.value}" for k in range(2)
    ]
    assert process.returncode == code
    assert are_gone(ids)


def test_a_signal_ends_the_start(script, monkeypatch):
    begun = []

    class Interrupting(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            begun.append(self)
            if len(begun) == 2:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupting)
    assert run.main(["-n", "20", script("time.sleep(60)")]) == 130
    assert len(begun) == 2
    assert all(process.returncode for process in begun)


def test_too_many_processes_for_this_machine(script, monkeypatch, capfd):
    begun = []

    class Full(subprocess.Popen):
        def __init__(self, *args, **options):
            if len(begun) == 1:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            super().__init__(*args, **options)
            begun.append(self)

    monkeypatch.setattr(subprocess, "Popen", Full)
    assert run.main(["-n", "3", script("time.sleep(60)")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("python -m shardmap run: process 1 cannot start: [Errno 24]")
    assert begun[0].returncode == -signal.SIGKILL


def test_a_reader_that_goes_away_ends_all(script):
    path = script("while True: print(os.getpid()); time.sleep(0.01)")
    with subprocess.Popen(
        [sys.executable, "-m", "shardmap", "run", "-n", "2", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(not pathlib.Path("/proc/self").exists(), reason="looks into /proc")
def test_a_killed_command_leaves_no_process_behind(script):
    path = script(
        """
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        print(os.getpid(), child.pid, flush=True)
        time.sleep(60)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "shardmap", "run", "-n", "2", path],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    lines = [process.stdout.readline().split()[1:] for _ in range(2)]
    process.kill()
    process.communicate(timeout=300)
    assert are_gone([int(number) for line in lines for number in line])


@pytest.mark.skipif(not pathlib.Path("/proc/self").exists(), reason="looks into /proc")
@pytest.mark.parametrize("session", [False, True])
def test_a_child_that_keeps_the_output_open_keeps_nothing(session, script):
    path = script(
        f"""
        import subprocess
        child = subprocess.Popen(["sleep", "100"], start_new_session={session})
        print(os.getpid(), child.pid)
        """
    )
    result = command_line.shardmap("run", "-n", "1", path, timeout=80)
    assert result.returncode == 0
    ids = result.stdout.split()[1:]
    assert are_gone(map(int, ids[:1] if session else ids))
    if session:
        os.kill(int(ids[1]), signal.SIGKILL)


def test_processes_find_each_other_past_proxies():
    around = {"https_proxy": "c", "no_grpc_proxy": "b", "no_proxy": "a"}
    made = run.environment(0, 1, 1, 5000, around)
    assert made["no_grpc_proxy"] == f"localhost,{run.HERE}"
    assert made["no_proxy"] == "a"
    # JAX warns about each variable whose name has "_proxy".
    assert not [name for name in run.environment(0, 1, 1, 7, {}) if "_proxy" in name]


def test_where_the_coordinator_listens_is_not_for_the_caller_to_say():
    made = run.environment(0, 1, 1, 7, {"JAX_COORDINATOR_BIND_ADDRESS": "0.0.0.0:7"})
    assert made["JAX_COORDINATOR_BIND_ADDRESS"] == f"{run.HERE}:7"


def test_jaxlib_gets_threads_enough_unless_told():
    assert int(run.environment(0, 1, 1, 7, {})["NPROC"]) >= 64
    assert run.environment(0, 1, 1, 7, {"NPROC": "3"})["NPROC"] == "3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2", "nowhere.py"], "run: there is no file nowhere.py"),
        *(
            (
                ["-n", text, "x.py"],
                "argument -n/--processes: must be a whole number from 1 to 1,024, got "
                f"{text!r}",
            )
            for text in ("100000", "0", "x")
        ),
        *(
            (["-n", "1", f"--grace={text}", "x.py"], f"of seconds, got {text!r}")
            for text in ("soon", "nan", "inf", "-1")
        ),
        (["x.py"], "the following arguments are required: -n/--processes"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        run.main(arguments)
    assert message in capsys.readouterr().err
