"""The network of `keras_cnn` in PyTorch, with weights from and to the layout of Keras."""

import numpy as np
import torch
from torch import nn

# Keras flattens height x width x channels, PyTorch channels x height x width.
_POOLED = (14, 14, 64)


def build() -> nn.Sequential:
    """[N, 3, 32, 32] to logits [N, 10]."""
    convolutions = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*convolutions, nn.Linear(int(np.prod(_POOLED)), 128), nn.ReLU(), nn.Linear(128, 10))


def images(x: np.ndarray, scale: float, shift: float) -> torch.Tensor:
    """uint8 [N, 32, 32, 3] to float [N, 3, 32, 32], x * scale + shift."""
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2))).float().mul_(scale).add_(shift)


def labels(y: np.ndarray) -> torch.Tensor:
    """int [N] to int64 [N]."""
    return torch.from_numpy(y.astype(np.int64))


def from_keras(weights: list) -> list[np.ndarray]:
    """Arrays in the order of `parameters()`."""
    return [np.ascontiguousarray(_turned(w, i, (2, 0, 1), _POOLED), np.float32) for i, w in enumerate(weights)]


def to_keras(weights: list) -> list[np.ndarray]:
    """The inverse of `from_keras`."""
    channels_first = (_POOLED[2], *_POOLED[:2])
    back = [w.transpose(2, 3, 1, 0) if w.ndim == 4 else w.T for w in weights]
    back[4] = back[4].reshape(*channels_first, -1).transpose(1, 2, 0, 3).reshape(back[4].shape)
    return [np.ascontiguousarray(w) for w in back]


def _turned(w, position, order, shape):
    if w.ndim == 4:
        return w.transpose(3, 2, 0, 1)
    if position == 4:
        w = w.reshape(*shape, -1).transpose(*order, 3).reshape(w.shape)
    return w.T


def load(model: nn.Module, weights: list) -> None:
    """Copies arrays in PyTorch's layout into the model."""
    with torch.no_grad():
        for parameter, w in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(w))


def dump(model: nn.Module) -> list[np.ndarray]:
    """Copies of the model's weights, in PyTorch's layout."""
    return [p.detach().numpy().copy() for p in model.parameters()]
