"""Ranks that torchrun has started again meet each other, and not those that are gone."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta

from torch import distributed as dist

from hvd_hetero.errors import HeteroError

_RANK_0_WAITS_S = 60.0  # for rank 0 to end, start again and import (arbitrary)


def forget_former_ranks() -> None:
    """Clear torchrun's store of the addresses of ranks that are gone, once in each restart."""
    # init_process_group() writes them under the same names at each start, and reads them from there (PyTorch's issue
    # 135712). Rank 0 clears them; the others wait, so that no new address is among them. It happens on import, because
    # scripts import this package before they call that function. Rejected: refusing the restart, which can be mended;
    # a fresh port for ranks, because a firewall knows one.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if start == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    if dist.is_initialized() or multiprocessing.parent_process() is not None:
        return
    rank, port, done = os.environ["RANK"], int(os.environ["MASTER_PORT"]), f"hvd-hetero/cleared/{start}"
    timeout = timedelta(seconds=_RANK_0_WAITS_S)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, timeout=timeout)  # type: ignore[attr-defined]
    if rank == "0" and not store.check([done]):
        for key in store.list_keys() if hasattr(store, "list_keys") else ():
            if key.startswith("default_pg/"):  # of all groups that belong to the default one
                store.delete_key(key)
        store.set(done, "")
    try:
        store.wait([done])
    except RuntimeError as error:
        raise HeteroError(
            f"rank {rank} has waited for rank 0 for {_RANK_0_WAITS_S:g} s, in restart {start} of this job. All ranks "
            "must be started again together. Use TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend c10d "
            "--rdzv-endpoint HOST:PORT, without --master-port"
        ) from error
