"""The wire of ranks that are threads of one process (``hvd_hetero.testing.run_on_threads``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_hetero.communication.thread_wire import CollectiveCall, ThreadWire


class TorchThreadWire(ThreadWire):
    """Adds tensors (``hvd_hetero.communication.wire.TensorWire``), with sums in the order of ranks."""

    def start_sum(self, tensor: torch.Tensor, name: str) -> CollectiveCall:
        """Sum a tensor over all ranks, in place."""

        def in_place(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            total = _total(tensors)
            for each in tensors:
                each.data.copy_(total)  # raises no version: it is no change by the user
            return tensors

        return self._call(("sum", tensor.shape, tensor.dtype), name, tensor, in_place)

    def start_gather(self, rows: torch.Tensor, name: str) -> CollectiveCall:
        """Lay the rows of all ranks end to end."""

        def gathered(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [torch.cat([part.detach() for part in parts]) for _ in parts]

        return self._call(("gather", rows.shape[1:], rows.dtype), name, rows, gathered)

    def start_exchange(self, numbers: torch.Tensor, splits: Sequence[int], name: str) -> CollectiveCall:
        """Send the first ``splits[0]`` numbers to rank 0, and so on; return what came, and how much from each."""

        def received(sent: Sequence[Sequence[torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [
                (torch.cat(to_one), torch.tensor(list(map(len, to_one)), device="cpu"))
                for to_one in zip(*sent, strict=True)
            ]

        return self._call(("exchange", numbers.dtype), name, torch.split(numbers.detach(), list(splits)), received)

    def start_broadcast(self, tensor: torch.Tensor, name: str) -> CollectiveCall:
        """Give all ranks the numbers of rank 0's tensor, in place."""

        def in_place(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            for each in tensors[1:]:
                each.data.copy_(tensors[0])
            return tensors

        return self._call(("broadcast", tensor.shape, tensor.dtype), name, tensor, in_place)


def _total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        total += tensor.detach()
    return total
