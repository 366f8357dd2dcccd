r"""Small problems, trained for real, so that the value of an order of updates is computed and not assumed.

N training samples (z_j, y_j) of C classes; parameters ω as one flat vector.

    multinomial logistic regression   l_j(ω) = -log softmax(A z_j + c)[y_j]                 convex
    a small network                   l_j(ω) = -log softmax(A relu(B z_j + d) + c)[y_j]     not convex

    loss(ω) = (1/N) sum_j l_j(ω) + (λ/2) |ω|²,     gradient over a batch: of the mean of its l_j, plus λ ω

The data are the 1,797 handwritten digits (8 x 8) that come with scikit-learn, four fifths to train on. Their size fits
the purpose: a thousand updates take a second, so that stale gradients of 32 workers can be had exactly. Larger models
differ in how much staleness and batch size cost them; the order of the schemes is what carries over, if anything does.

Shapes: b samples of a batch, D features, H hidden units, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Samples to train on and samples to judge by."""

    train_x: Floats
    train_y: Ints
    test_x: Floats
    test_y: Ints
    classes: int


def digits(seed: int = 0) -> Data:
    """Handwritten digits, scaled to [0, 1]; which fifth is the test set follows from the seed."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError(
            "the digits problem needs scikit-learn, which brings the data: pip install scikit-learn, or leave the "
            "problem out (times and throughput need none)"
        ) from None
    loaded = load_digits()
    x, y = np.asarray(loaded.data, dtype=np.float64) / 16.0, np.asarray(loaded.target, dtype=np.int64)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(x))
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    return Data(x[train], y[train], x[test], y[test], 10)


class TrainingProblem(ABC):
    """A loss over training samples, with its gradient."""

    def __init__(self, data: Data, decay: float = 1e-4) -> None:
        self.data = data
        self.decay = decay

    @property
    def samples(self) -> int:
        """The number of training samples, N."""
        return len(self.data.train_y)

    @abstractmethod
    def start(self, seed: int) -> Floats:
        """Return the parameters to begin with."""

    @abstractmethod
    def gradient(self, parameters: Floats, samples: Ints) -> Floats:
        """Return the mean gradient over these training samples."""

    @abstractmethod
    def scores(self, parameters: Floats, x: Floats) -> Floats:
        """Return the scores before the softmax, (b, C)."""

    def loss(self, parameters: Floats) -> float:
        """Return the loss over all training samples."""
        scores = self.scores(parameters, self.data.train_x)
        likely = _log_softmax(scores)[np.arange(self.samples), self.data.train_y]
        return float(-likely.mean() + 0.5 * self.decay * parameters @ parameters)

    def accuracy(self, parameters: Floats) -> float:
        """Return the share of test samples that are classified right."""
        return float((self.scores(parameters, self.data.test_x).argmax(axis=1) == self.data.test_y).mean())

    def _error(self, scores: Floats, labels: Ints) -> Floats:
        """Return the gradient of the mean loss by the scores, (b, C)."""
        error = np.exp(_log_softmax(scores))
        error[np.arange(len(labels)), labels] -= 1.0
        return np.asarray(error / len(labels))


class SoftmaxRegression(TrainingProblem):
    """Multinomial logistic regression; starts at zero."""

    def start(self, seed: int) -> Floats:
        """Return zeros, whatever the seed: the problem is convex."""
        return np.zeros((self.data.train_x.shape[1] + 1) * self.data.classes)

    def scores(self, parameters: Floats, x: Floats) -> Floats:
        """Return scores that are linear in x."""
        matrix = parameters.reshape(-1, self.data.classes)
        return np.asarray(x @ matrix[:-1] + matrix[-1])

    def gradient(self, parameters: Floats, samples: Ints) -> Floats:
        """Return the gradient by the chain rule."""
        x = self.data.train_x[samples]
        error = self._error(self.scores(parameters, x), self.data.train_y[samples])
        return np.concatenate([x.T @ error, error.sum(axis=0)[np.newaxis]]).ravel() + self.decay * parameters


class SmallNetwork(TrainingProblem):
    """One hidden layer of rectified units."""

    def __init__(self, data: Data, decay: float = 1e-4, hidden: int = 32) -> None:
        super().__init__(data, decay)
        self.hidden = hidden

    def start(self, seed: int) -> Floats:
        """Return He's initialisation."""
        rng = np.random.Generator(np.random.PCG64([seed, 1]))
        inputs = self.data.train_x.shape[1]
        first = rng.normal(scale=np.sqrt(2.0 / inputs), size=(inputs, self.hidden))
        second = rng.normal(scale=np.sqrt(2.0 / self.hidden), size=(self.hidden, self.data.classes))
        zeros = np.zeros(self.hidden), np.zeros(self.data.classes)
        return np.concatenate([first.ravel(), zeros[0], second.ravel(), zeros[1]])

    def scores(self, parameters: Floats, x: Floats) -> Floats:
        """Return the scores through the hidden layer."""
        first, bias, second, out = self._parts(parameters)
        return np.asarray(np.maximum(x @ first + bias, 0.0) @ second + out)

    def gradient(self, parameters: Floats, samples: Ints) -> Floats:
        """Return the gradient by the chain rule."""
        first, bias, second, out = self._parts(parameters)
        x = self.data.train_x[samples]
        inner = np.maximum(x @ first + bias, 0.0)
        error = self._error(inner @ second + out, self.data.train_y[samples])
        back = (error @ second.T) * (inner > 0)
        parts = (x.T @ back).ravel(), back.sum(axis=0), (inner.T @ error).ravel(), error.sum(axis=0)
        return np.concatenate(parts) + self.decay * parameters

    def _parts(self, parameters: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        inputs, classes = self.data.train_x.shape[1], self.data.classes
        a, b = inputs * self.hidden, self.hidden * classes
        first, bias, second, out = np.split(parameters, [a, a + self.hidden, a + self.hidden + b])
        return first.reshape(inputs, -1), bias, second.reshape(-1, classes), out


def _log_softmax(scores: Floats) -> Floats:
    shifted = scores - scores.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
