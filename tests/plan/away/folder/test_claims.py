"""Claims: who works on what, and what becomes of those who died."""

import json
import os
import time

from shardmap.plan.away.folder.claims import Claims
from shardmap.plan.run.disk.results import Folder


def test_claims_of_the_living_stand_and_of_the_dead_do_not(tmp_path):
    folder = Folder(tmp_path, "claims")
    one, other = Claims(folder), Claims(folder)
    with one.claimed("0-0") as mine, other.claimed("0-0") as theirs:
        assert (mine, theirs) == (True, False)
        assert other.live("0-0")
    assert not other.live("0-0")
    who = {"host": os.uname().nodename, "pid": 2**22 + 1, "token": "x"}
    (tmp_path / "0-1.claim").write_text(json.dumps(who))
    with one.claimed("0-1") as mine:
        assert mine
    (tmp_path / "0-2.claim").write_text(json.dumps({**who, "host": "elsewhere"}))
    with one.claimed("0-2") as mine:
        assert not mine
    os.utime(tmp_path / "0-2.claim", (0, 0))
    with one.claimed("0-2") as mine:
        assert mine
    assert list(tmp_path.iterdir()) == []


def test_a_claim_is_renewed(tmp_path):
    claims = Claims(Folder(tmp_path, "claims"), lease=0.2)
    with claims.claimed("0-0"):
        os.utime(tmp_path / "0-0.claim", (0, 0))
        for _ in range(200):
            if (tmp_path / "0-0.claim").stat().st_mtime > 0:
                break
            time.sleep(0.02)
        assert Claims(Folder(tmp_path, "claims"), lease=5).live("0-0")
