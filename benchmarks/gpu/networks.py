"""The networks of the proofs on GPUs, and their batches: on a CPU the same ones, small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

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


class _Transformer(torch.nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = torch.nn.Embedding(1000, width)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


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
            lambda device: _Transformer(width, layers).to(device),
            lambda samples, device: torch.randint(1000, (samples, length), device=device),
            48 if small else 768,
        ),
    }
