"""Real Gloo processes fold their balances into the same figures and the same answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch.distributed as distributed
from trainer_rank.admission.agree import Agreement
from trainer_rank.release.account import Balance, Reason, permit
from trainer_rank.release.distributed import exchange
rank, store = int(sys.argv[1]), sys.argv[2]
store = distributed.FileStore(store, 2)
distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
gather = Agreement(store).gather
for mine in (
    [Balance(15.0, 4.0, 600.0, 1, False), Balance(25.0, 6.0, 1000.0, 1, True)],
    [Balance(15.5, 4.0, 600.0, 1, False), Balance(25.0, 6.0, 1000.0, 1, True)],
    [Balance(0.0, 1.0, 600.0, 1, False), Balance(0.0, 1.0, 1000.0, 1, False)],
    [Balance(0.0, 1.0, 600.0, 1, True, Reason.CLOCK), Balance(0.0, 1.0, 1000.0, 1, True)],
    [Balance(0.0, None, 600.0, 1, True), Balance(0.0, 1.0, 1000.0, 1, True)],
    [Balance(need=False), Balance(need=True)],
):
    permission = permit(exchange(mine[rank], gather), 50_000)
    b = permission.balance
    print(permission.granted, permission.reason.name, b.cost, b.dearest, b.work, b.releases, b.need)
distributed.destroy_process_group()
"""

ANSWERS = [
    "True WITHIN 40.0 10.0 1000.0 1 True",
    "False OVER 40.5 10.0 1000.0 1 True",
    "False NOT_NEEDED 0.0 2.0 1000.0 1 False",
    "False CLOCK 0.0 2.0 1000.0 1 True",
    "False NO_DEAREST 0.0 None 1000.0 1 True",
    "True FIRST 0.0 None 0.0 0 True",
]


def test_every_rank_gets_the_same_answer(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    finished = [(*rank.communicate(timeout=120), rank.returncode) for rank in ranks]
    assert [(out.splitlines(), code) for out, _, code in finished] == [(ANSWERS, 0)] * 2, finished
