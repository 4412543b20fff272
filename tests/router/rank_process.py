"""One rank of a gloo group: compares tables in several situations and prints what it found as JSON lines.

Arguments: rank, world size, folder with the tables ``a.yaml`` and ``b.yaml``, address of the rendezvous.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from autotune.router import Router
from autotune.router.ranks import assert_same_table
from tests.table import samples


def main(rank: int, world: int, folder: Path, init: str) -> None:
    mine = folder / f"rank{rank}.yaml"
    mine.write_bytes((folder / "a.yaml").read_bytes())
    router = Router.load(mine, facts=samples.FACTS)
    bound = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096)

    def report(step: str, same: bool, detail: str) -> None:
        line = {"step": step, "same": same, "detail": detail, "route": bound.route(2, 4, 100)}
        line |= {"state": router.status.state, "reason": router.status.reason}
        sys.stdout.write(json.dumps(line) + "\n")

    report("alone", *assert_same_table(router))
    dist.init_process_group(
        "gloo", init_method=init, rank=rank, world_size=world, timeout=timedelta(seconds=90)
    )
    report("equal", *assert_same_table(router, timeout_s=60))
    if rank == world - 1:
        mine.write_bytes((folder / "b.yaml").read_bytes())
        assert router.poll(min_interval_s=0.0)
    report("one differs", *assert_same_table(router, timeout_s=60))
    if rank == world - 1:
        mine.write_bytes((folder / "a.yaml").read_bytes())
        assert router.poll(min_interval_s=0.0)
    report("equal again", *assert_same_table(router, timeout_s=60))
    pair = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        report("two of them", *assert_same_table(router, pair, timeout_s=60))
    if rank == 1:  # comes when the others have given up
        while not all((folder / f"done{other}").exists() for other in range(world) if other != rank):
            time.sleep(0.02)
    report("one is late", *assert_same_table(router, timeout_s=0.5))
    (folder / f"done{rank}").touch()
    dist.barrier()
    router = Router.load(folder / "absent.yaml", facts=samples.FACTS)
    bound = router.bind(samples.SHAPE, samples.DTYPES, max_context=4096)
    report("none has one", *assert_same_table(router, timeout_s=60))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
