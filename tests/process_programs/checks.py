"""What holds in each of several processes; test_processes.py starts them.

Every function whose name begins with `check_` is run, in this order in all processes,
and a line says how it went.
"""

import sys
import traceback

import check_agreement
import check_as_jax_tests
import check_parts
import check_process_local
import check_the_rest
import pytest


def main(wanted):
    modules = [
        check_process_local,
        check_the_rest,
        check_parts,
        check_agreement,
        check_as_jax_tests,
    ]
    checks = {
        name: check
        for module in modules
        for name, check in vars(module).items()
        if name.startswith("check_")
    }
    for name in wanted or checks:
        try:
            checks[name]()
        except (Exception, pytest.fail.Exception):
            print(f"{name} failed\n{traceback.format_exc()}", flush=True)
        else:
            print(f"{name} passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
