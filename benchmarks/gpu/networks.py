"""The networks of the proofs on GPUs, and their batches: on a CPU the same ones, small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Network:
    """How a network and a batch of its samples are made, and how many samples ranks share in a round."""

    make: Callable[[str], torch.nn.Module]
    inputs: Callable[[int, str], torch.Tensor]
    global_batch: int

    def batch(self, samples: int, device: str, seed: int = 0) -> Batch:
        """Return samples of ten classes, on the device."""
        torch.manual_seed(seed)
        return self.inputs(samples, device), torch.randint(10, (samples,), device=device)


def _convolutional(device: str) -> torch.nn.Module:
    """Return the network of LB-BSP's first figure: a small one, on images of 32 x 32."""
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 64), (64, 64), (64, 128), (128, 128)):
        layers += [torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.ReLU()]
    layers += [torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(2048, 10)]
    return torch.nn.Sequential(*layers).to(device)


class Transformer(torch.nn.Module):
    """Encoder layers over tokens, with ten classes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = torch.nn.Embedding(1000, width)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a number for each class."""
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def reduced(model: torch.nn.Module, reducer: str, device: str, *, apart: bool = True) -> torch.nn.Module:
    """Return the model in DDP or FSDP2. ``apart``: FSDP2 shards each layer with weights by itself."""
    if reducer == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in [layer for child in model.children() for layer in getattr(child, "layers", [child])]:
        if apart and list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def networks(device: str) -> dict[str, Network]:
    """Return the networks, of a size for this device."""
    small = device == "cpu"
    length, width, layers = (8, 16, 1) if small else (128, 256, 4)
    return {
        "convolutional": Network(
            _convolutional,
            lambda samples, device: torch.randn(samples, 3, 8 if small else 32, 8 if small else 32, device=device),
            48 if small else 3072,
        ),
        "transformer": Network(
            lambda device: Transformer(width, layers).to(device),
            lambda samples, device: torch.randint(1000, (samples, length), device=device),
            48 if small else 768,
        ),
    }
