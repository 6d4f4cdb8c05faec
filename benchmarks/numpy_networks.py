"""PFLEGO rounds written by hand in NumPy, as the yardstick of `device_speed.py`.

A network computes with one flat theta, in the order of the Keras model's weights, and writes its gradient into one flat
array. Convolutions are products of patches (im2col), their input's gradient is put back pixel by pixel, pools remember
which pixel won, and large arrays are made once and used again. Every layer counts the floating point operations of its
products: 2 for a multiplication and an addition. What is done number by number is not counted.
"""

import numpy as np


class Layer:
    """A layer: `weights` and `gradients` are views into theta and its gradient, `flops` what both passes did."""

    shapes: tuple = ()
    first = False  # whether nobody needs the gradient of the layer's input

    def __init__(self):
        self.flops, self._kept = 0, {}

    def parts(self):
        """The layers that have weights, in their order."""
        return [self] if self.shapes else []

    def product(self, a, b, out=None):
        """The matrix product a b, counted."""
        y = np.matmul(a, b, out=out)
        self.flops += 2 * y.size * a.shape[-1]
        return y

    def room(self, name, shape):
        """An array for results that is made once."""
        if name not in self._kept or self._kept[name].shape != tuple(shape):
            self._kept[name] = np.zeros(shape, np.float32)
        return self._kept[name]


class Chain(Layer):
    """Layers one after the other; with `residual` their result is added to the input."""

    def __init__(self, *layers, residual=False):
        super().__init__()
        self.layers, self.residual = layers, residual

    def parts(self):
        return [p for layer in self.layers for p in layer.parts()]

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = layer.forward(y)
        return x + y if self.residual else y

    def backward(self, dy):
        dx = dy.copy() if self.residual else dy  # layers may write over what they are given
        for layer in reversed(self.layers):
            dx = layer.backward(dx)
        return dy + dx if self.residual else dx


class Dense(Layer):
    """x kernel + bias, over the last axis."""

    def __init__(self, inputs, units, bias=True):
        super().__init__()
        self.shapes = ((inputs, units), (units,))[: 1 + bias]

    def forward(self, x):
        self.x, self.shape = x.reshape(-1, x.shape[-1]), x.shape
        y = self.product(self.x, self.weights[0])
        if len(self.weights) > 1:
            y += self.weights[1]
        return y.reshape(*x.shape[:-1], -1)

    def backward(self, dy):
        dy = dy.reshape(-1, dy.shape[-1])
        self.product(self.x.T, dy, out=self.gradients[0])
        if len(self.weights) > 1:
            np.sum(dy, 0, out=self.gradients[1])
        return None if self.first else self.product(dy, self.weights[0].T).reshape(self.shape)


class Images(Layer):
    """What convolutions and pools share: the geometry of their windows."""

    def __init__(self, size, stride=1, same=False):
        super().__init__()
        self.size, self.stride, self.same = size if isinstance(size, tuple) else (size, size), stride, same

    def measure(self, x, fill=0.0):
        """x with its border, and the height and width of the result."""
        _, height, width, channels = self.shape = x.shape
        (kh, kw), s = self.size, self.stride
        self.out, border = [], []
        for n, k in ((height, kh), (width, kw)):
            out = -(-n // s) if self.same else (n - k) // s + 1
            missing = max((out - 1) * s + k - n, 0) if self.same else 0
            self.out.append(out)
            border.append((missing // 2, missing - missing // 2))
        self.top, self.left = border[0][0], border[1][0]
        if not any(map(any, border)):
            return x
        padded = self.room("padded", (len(x), height + sum(border[0]), width + sum(border[1]), channels))
        if fill and (self.top or self.left or padded[0, -1, -1, 0] != fill):
            padded.fill(fill)  # the zeros of a new array stay
        padded[:, self.top : self.top + height, self.left : self.left + width] = x
        return padded

    def places(self, padded):
        """The pixels of all windows at each offset, as views."""
        (h, w), s = self.out, self.stride
        for a in range(self.size[0]):
            for b in range(self.size[1]):
                yield padded[:, a : a + s * (h - 1) + 1 : s, b : b + s * (w - 1) + 1 : s]

    def inside(self, padded):
        """The image within its border."""
        _, height, width, _ = self.shape
        return padded[:, self.top : self.top + height, self.left : self.left + width]


class Conv(Images):
    """A convolution: patches times kernel."""

    def __init__(self, inputs, filters, size, stride=1, same=False, bias=True):
        super().__init__(size, stride, same)
        self.shapes = ((*self.size, inputs, filters), (filters,))[: 1 + bias]

    def forward(self, x):
        padded = self.measure(x)
        kernel = self.weights[0].reshape(-1, self.weights[0].shape[-1])
        self.padded = padded.shape
        if self.size == (1, 1) and self.stride == 1:
            self.patches = x.reshape(-1, x.shape[-1])
        else:
            self.patches = self.room("patches", (len(x), *self.out, kernel.shape[0]))
            windows = np.lib.stride_tricks.sliding_window_view(padded, self.size, (1, 2))
            windows = windows[:, :: self.stride, :: self.stride].transpose(0, 1, 2, 4, 5, 3)
            self.patches.reshape(windows.shape)[:] = windows
            self.patches = self.patches.reshape(-1, kernel.shape[0])
        y = self.product(self.patches, kernel, out=self.room("y", (len(self.patches), kernel.shape[1])))
        if len(self.weights) > 1:
            y += self.weights[1]
        return y.reshape(len(x), *self.out, -1)

    def backward(self, dy):
        kernel, rows = self.weights[0].reshape(-1, dy.shape[-1]), dy.reshape(-1, dy.shape[-1])
        self.product(self.patches.T, rows, out=self.gradients[0].reshape(kernel.shape))
        if len(self.weights) > 1:
            np.sum(rows, 0, out=self.gradients[1])
        if self.first:
            return None
        pixels = self.product(rows, kernel.T, out=self.room("pixels", self.patches.shape))
        if self.size == (1, 1) and self.stride == 1:
            return pixels.reshape(self.shape)
        dx = self.room("dx", self.padded)
        dx.fill(0)
        parts = pixels.reshape(*dy.shape[:3], -1, self.shape[-1])
        for i, place in enumerate(self.places(dx)):
            place += parts[:, :, :, i]
        return self.inside(dx)


class Depthwise(Images):
    """A convolution of every channel by itself: for each example, sums of shifted products that fit the cache."""

    def __init__(self, channels, size, stride=1, same=True):
        super().__init__(size, stride, same)
        self.shapes = ((*self.size, channels, 1),)

    def forward(self, x):
        self.padded = self.measure(x)
        rows = self.weights[0].reshape(-1, x.shape[-1])
        y = self.room("y", (len(x), *self.out, x.shape[-1]))
        share = self.room("share", y.shape[1:])
        for n in range(len(x)):
            for i, place in enumerate(self.places(self.padded[n : n + 1])):
                np.multiply(place[0], rows[i], out=share if i else y[n])
                if i:
                    y[n] += share
        self.flops += 2 * y.size * len(rows)
        return y

    def backward(self, dy):
        rows, gradients = (w[0].reshape(-1, dy.shape[-1]) for w in (self.weights, self.gradients))
        gradients.fill(0)
        dx = self.room("dx", self.padded.shape)
        dx.fill(0)
        share = self.room("share", dy.shape[1:])
        ones = np.ones(share.shape[0] * share.shape[1], np.float32)
        for n in range(len(dy)):
            both = zip(self.places(self.padded[n : n + 1]), self.places(dx[n : n + 1]), strict=True)
            for i, (place, d_place) in enumerate(both):
                np.multiply(place[0], dy[n], out=share)
                gradients[i] += ones @ share.reshape(len(ones), -1)
                d_place += np.multiply(dy[n], rows[i], out=share)
        self.flops += 4 * dy.size * len(rows)
        return self.inside(dx)


class MaxPool(Images):
    """The largest pixel of each window, and which one it was."""

    def forward(self, x):
        padded = self.measure(x, -np.inf)
        self.padded = padded.shape
        places = list(self.places(padded))
        y = places[0].copy()
        self.winner = np.zeros(y.shape, np.int8)
        for i, place in enumerate(places[1:]):
            np.copyto(self.winner, np.int8(i + 1), where=place > y)
            np.maximum(y, place, out=y)
        return y

    def backward(self, dy):
        dx = self.room("dx", self.padded)
        tiles = self.size == (self.stride,) * 2 and all(n % self.stride == 0 for n in self.padded[1:3])
        if not tiles:
            dx.fill(0)
        share = self.room("share", dy.shape)
        for i, place in enumerate(self.places(dx)):
            if tiles:
                np.multiply(dy, self.winner == i, out=place)
            else:
                place += np.multiply(dy, self.winner == i, out=share)
        return self.inside(dx)


class Clip(Layer):
    """ReLU, or ReLU6 with `most`; it writes over its input."""

    def __init__(self, most=None):
        super().__init__()
        self.most = most

    def forward(self, x):
        self.y = np.clip(x, 0, self.most, out=x) if self.most else np.maximum(x, 0, out=x)
        return self.y

    def backward(self, dy):
        on = self.y > 0
        if self.most:
            on &= self.y < self.most
        return np.multiply(dy, on, out=dy)


class Gelu(Layer):
    """x times the normal distribution function, with erf by a polynomial in tanh as in the exported program."""

    COEFFICIENTS = (
        1.1283797,
        0.102765478,
        -0.000184384931,
        -0.000625718269,
        8.97119608e-05,
        -5.98556198e-06,
        1.58950812e-07,
    )

    def forward(self, x):
        self.x = x
        inside = np.clip(x * np.float32(0.5**0.5), -3.95, 3.95)
        square = inside * inside
        p = square * np.float32(self.COEFFICIENTS[-1])
        for c in self.COEFFICIENTS[-2:0:-1]:
            p += np.float32(c)
            p *= square
        p += np.float32(self.COEFFICIENTS[0])
        p *= inside
        np.tanh(p, out=p)
        p += 1
        p *= np.float32(0.5)
        self.below = p
        return x * p

    def backward(self, dy):
        density = self.x * self.x
        density *= np.float32(-0.5)
        np.exp(density, out=density)
        density *= self.x
        density *= np.float32((2 * np.pi) ** -0.5)
        density += self.below
        density *= dy
        return density


class StoredNorm(Layer):
    """BatchNormalization with stored statistics; it writes over its input's gradient."""

    def __init__(self, channels, epsilon=1e-3):
        super().__init__()
        self.shapes, self.epsilon = ((channels,), (channels,)), epsilon
        self.mean, self.variance = np.zeros(channels, np.float32), np.ones(channels, np.float32)

    def forward(self, x):
        self.x, self.inverse = x, np.float32(1) / np.sqrt(self.variance + np.float32(self.epsilon))
        scale = self.weights[0] * self.inverse
        y = np.multiply(x, scale, out=self.room("y", x.shape))
        y += self.weights[1] - self.mean * scale
        return y

    def backward(self, dy):
        rows = dy.reshape(-1, dy.shape[-1])
        np.sum(rows, 0, out=self.gradients[1])
        both = np.einsum("nc,nc->c", rows, self.x.reshape(rows.shape))
        self.gradients[0][:] = self.inverse * (both - self.mean * self.gradients[1])
        return np.multiply(dy, self.weights[0] * self.inverse, out=dy)


class LayerNorm(Layer):
    """LayerNormalization over the last axis."""

    def __init__(self, channels, epsilon=1e-3):
        super().__init__()
        self.shapes, self.epsilon = ((channels,), (channels,)), epsilon

    def forward(self, x):
        centred = x - x.mean(-1, keepdims=True)
        variance = np.einsum("...c,...c->...", centred, centred)[..., None] / np.float32(x.shape[-1])
        self.inverse = 1 / np.sqrt(variance + np.float32(self.epsilon))
        self.normal = np.multiply(centred, self.inverse, out=centred)
        return self.normal * self.weights[0] + self.weights[1]

    def backward(self, dy):
        rows, normal = (a.reshape(-1, a.shape[-1]) for a in (dy, self.normal))
        np.sum(rows, 0, out=self.gradients[1])
        self.gradients[0][:] = np.einsum("nc,nc->c", rows, normal)
        dy = dy * self.weights[0]
        along = np.einsum("...c,...c->...", dy, self.normal)[..., None] / np.float32(dy.shape[-1])
        dy -= dy.mean(-1, keepdims=True)
        dy -= self.normal * along
        dy *= self.inverse
        return dy


class Flatten(Layer):
    """One row for each example."""

    def forward(self, x):
        self.shape = x.shape
        return x.reshape(len(x), -1)

    def backward(self, dy):
        return None if dy is None else dy.reshape(self.shape)


class Mean(Layer):
    """The mean over all axes but the first and the last."""

    def forward(self, x):
        self.shape = x.shape
        return x.mean(tuple(range(1, x.ndim - 1)))

    def backward(self, dy):
        dy = dy / np.float32(np.prod(self.shape[1:-1]))
        return np.broadcast_to(dy.reshape(len(dy), *[1] * (len(self.shape) - 2), -1), self.shape).copy()


class Embedding(Layer):
    """Rows of a table."""

    def __init__(self, count, width):
        super().__init__()
        self.shapes = ((count, width),)

    def forward(self, x):
        self.x = x
        return self.weights[0][x]

    def backward(self, dy):
        self.gradients[0].fill(0)
        np.add.at(self.gradients[0], self.x.reshape(-1), dy.reshape(-1, dy.shape[-1]))


class Positions(Layer):
    """Every place [length, width] times a weight of its own, which is kept as [width, length]."""

    def __init__(self, length, width):
        super().__init__()
        self.shapes = ((width, length),)

    def forward(self, x):
        self.x = x
        return x * self.weights[0].T

    def backward(self, dy):
        self.gradients[0][:] = np.einsum("nlc,nlc->cl", dy, self.x)
        return dy * self.weights[0].T


class Attention(Layer):
    """Softmax attention of a sequence to itself with several heads."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, each = heads, (width, heads, width // heads)
        self.shapes = (each, each[1:]) * 3 + ((*each[1:], width), (width,))

    def forward(self, x):
        n, length, width = self.shape = x.shape
        self.x, self.three = x.reshape(-1, width), []
        for kernel, bias in zip(self.weights[0:6:2], self.weights[1:6:2], strict=True):
            y = self.product(self.x, kernel.reshape(width, -1))
            y += bias.reshape(-1)
            self.three.append(self._apart(y))
        query, key, value = self.three
        scores = self.product(query, key.swapaxes(2, 3))
        scores *= self._scale()
        scores -= scores.max(-1, keepdims=True)
        self.share = np.exp(scores, out=scores)
        self.share /= self.share.sum(-1, keepdims=True)
        self.mixed = self._together(self.product(self.share, value))
        y = self.product(self.mixed, self.weights[6].reshape(-1, width))
        y += self.weights[7]
        return y.reshape(x.shape)

    def _scale(self):
        return np.float32((self.shape[2] // self.heads) ** -0.5)

    def _apart(self, y):
        return y.reshape(*self.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

    def _together(self, y):
        return y.transpose(0, 2, 1, 3).reshape(-1, self.shape[2])

    def backward(self, dy):
        width, (query, key, value) = self.shape[2], self.three
        dy = dy.reshape(-1, width)
        self.product(self.mixed.T, dy, out=self.gradients[6].reshape(-1, width))
        np.sum(dy, 0, out=self.gradients[7])
        d_mixed = self._apart(self.product(dy, self.weights[6].reshape(-1, width).T))
        d_value = self.product(self.share.swapaxes(2, 3), d_mixed)
        d_share = self.product(d_mixed, value.swapaxes(2, 3))
        d_share -= np.einsum("nhqk,nhqk->nhq", d_share, self.share)[..., None]
        d_share *= self.share
        d_share *= self._scale()
        d_three = self.product(d_share, key), self.product(d_share.swapaxes(2, 3), query), d_value
        dx = None
        for i, d in enumerate(map(self._together, d_three)):
            self.product(self.x.T, d, out=self.gradients[2 * i].reshape(width, -1))
            np.sum(d, 0, out=self.gradients[2 * i + 1].reshape(-1))
            part = self.product(d, self.weights[2 * i].reshape(width, -1).T)
            dx = part if dx is None else np.add(dx, part, out=dx)
        return dx.reshape(self.shape)


class Gru(Layer):
    """The last state of a GRU (Keras's, with reset after the product); inputs of all steps are multiplied at once."""

    def __init__(self, inputs, units):
        super().__init__()
        self.units, self.shapes = units, ((inputs, 3 * units), (units, 3 * units), (2, 3 * units))

    def forward(self, x):
        u, (kernel, recurrent, bias) = self.units, self.weights
        self.x = np.ascontiguousarray(x.swapaxes(0, 1))  # steps first
        self.steps = len(self.x)
        inner = self.product(self.x.reshape(-1, x.shape[2]), kernel) + bias[0]
        inner = inner.reshape(self.steps, len(x), -1)
        self.states = np.zeros((self.steps + 1, len(x), u), np.float32)
        self.gates = np.empty((self.steps, len(x), 2 * u), np.float32)
        self.held, self.new = (np.empty((self.steps, len(x), u), np.float32) for _ in range(2))
        for t in range(self.steps):
            state = self.product(self.states[t], recurrent)
            state += bias[1]
            gate = np.add(inner[t, :, : 2 * u], state[:, : 2 * u], out=self.gates[t])
            np.negative(gate, out=gate)
            np.exp(gate, out=gate)
            gate += 1
            np.reciprocal(gate, out=gate)
            self.held[t] = state[:, 2 * u :]
            new = np.multiply(gate[:, u:], self.held[t], out=self.new[t])
            new += inner[t, :, 2 * u :]
            np.tanh(new, out=new)
            self.states[t + 1] = new + gate[:, :u] * (self.states[t] - new)
        return self.states[-1]

    def backward(self, dy):
        u, recurrent = self.units, self.weights[1]
        d_inner, d_state = (np.empty((*self.held.shape[:2], 3 * u), np.float32) for _ in range(2))
        turned = np.ascontiguousarray(recurrent.T)
        for t in reversed(range(self.steps)):
            keep, reset, new = self.gates[t, :, :u], self.gates[t, :, u:], self.new[t]
            d_new = dy * (1 - keep) * (1 - new * new)
            d_inner[t, :, 2 * u :] = d_new
            d_state[t, :, 2 * u :] = d_new * reset
            d_inner[t, :, :u] = dy * (self.states[t] - new) * keep * (1 - keep)
            d_inner[t, :, u : 2 * u] = d_new * self.held[t] * reset * (1 - reset)
            d_state[t, :, : 2 * u] = d_inner[t, :, : 2 * u]
            dy = dy * keep
            if t:
                dy += self.product(d_state[t], turned)
        d_inner, d_state = (d.reshape(-1, 3 * u) for d in (d_inner, d_state))
        self.product(self.x.reshape(len(d_inner), -1).T, d_inner, out=self.gradients[0])
        self.product(self.states[:-1].reshape(-1, u).T, d_state, out=self.gradients[1])
        np.sum(d_inner, 0, out=self.gradients[2][0])
        np.sum(d_state, 0, out=self.gradients[2][1])
        return None if self.first else self.product(d_inner, self.weights[0].T).reshape(self.x.shape).swapaxes(0, 1)


def conv_relu(*arguments, **options):
    return [Conv(*arguments, same=options.pop("same", True), **options), Clip()]


def normed(conv, channels, most=None, clip=True):
    """A convolution, BatchNormalization, and ReLU or ReLU6."""
    return [conv, StoredNorm(channels), *([Clip(most)] if clip else [])]


def mobilenet(alpha):
    """MobileNetV2: inverted residual blocks (expansion, channels, repetitions, stride) between two convolutions."""

    def scaled(n):  # a multiple of 8 that is not below 90 % of it
        m = max(8, int(n * alpha + 4) // 8 * 8)
        return m if m >= 0.9 * n * alpha else m + 8

    def norm(channels, clip=True):
        return [StoredNorm(channels), *([Clip(6.0)] if clip else [])]

    channels = scaled(32)
    layers = [Conv(3, channels, 3, 2, same=True, bias=False), *norm(channels)]
    table = (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
    for expansion, filters, times, stride in table:
        for i in range(times):
            inner, out = channels * expansion, scaled(filters)
            block = [] if expansion == 1 else [Conv(channels, inner, 1, bias=False), *norm(inner)]
            block += [Depthwise(inner, 3, 1 if i else stride), *norm(inner)]
            block += [Conv(inner, out, 1, bias=False), *norm(out, clip=False)]
            layers.append(Chain(*block, residual=i > 0))
            channels = out
    last = 1280 if alpha <= 1 else scaled(1280)
    return [*layers, Conv(channels, last, 1, bias=False), *norm(last), Mean()]


def transformer():
    blocks = []
    for _ in range(4):
        blocks.append(Chain(LayerNorm(128), Attention(128, 4), residual=True))
        blocks.append(Chain(LayerNorm(128), Dense(128, 512), Gelu(), Dense(512, 128), residual=True))
    return [Embedding(1000, 128), Positions(32, 128), *blocks, LayerNorm(128), Mean()]


def ds_cnn():
    layers = normed(Conv(1, 64, (10, 4), 2, same=True, bias=False), 64)
    for _ in range(4):
        layers += normed(Depthwise(64, 3), 64) + normed(Conv(64, 64, 1, bias=False), 64)
    return [*layers, Mean()]


def omniglot():
    return [layer for i in range(4) for layer in (*conv_relu(64 if i else 1, 64, 3), MaxPool(2, 2))] + [Flatten()]


def fedavg():
    blocks = [*conv_relu(1, 32, 5, same=False), MaxPool(2, 2), *conv_relu(32, 64, 5, same=False), MaxPool(2, 2)]
    return [*blocks, Flatten(), Dense(1024, 512), Clip()]


def cifar():
    blocks = [*conv_relu(3, 64, 5), MaxPool(3, 2, same=True), *conv_relu(64, 64, 5), MaxPool(3, 2, same=True)]
    return [*blocks, Flatten(), Dense(4096, 384), Clip(), Dense(384, 192), Clip()]


def conv_bn():
    blocks = [
        layer
        for a, b in ((1, 16), (16, 32))
        for layer in (*normed(Conv(a, b, 3, same=True, bias=False), b), MaxPool(2, 2, same=True))
    ]
    return [*blocks, Flatten(), Dense(1568, 64), Clip()]


NETWORKS = {
    "mlp200": lambda: [Flatten(), Dense(784, 200), Clip()],
    "conv_bn": conv_bn,
    "fedavg_cnn": fedavg,
    "omniglot_4conv": omniglot,
    "cifar_2conv": cifar,
    "ds_cnn": ds_cnn,
    "gru": lambda: [Gru(40, 128)],
    "transformer": transformer,
    "mobilenet_v2 0.35, 96 px": lambda: mobilenet(0.35),
}


class Network:
    """A backbone of `NETWORKS` with a head.

    Args:
        name: a name in `NETWORKS`.
        statistics: mean and variance of each BatchNormalization in turn.
    """

    def __init__(self, name, statistics=()):
        self.chain = Chain(*NETWORKS[name]())
        self.layers, self.head = self.chain.parts(), Layer()
        self.layers[0].first = True
        self.size = sum(int(np.prod(s)) for layer in self.layers for s in layer.shapes)
        self.dtheta = np.zeros(self.size, np.float32)
        self._views("gradients", self.dtheta)
        norms = [layer for layer in self.layers if isinstance(layer, StoredNorm)]
        for norm, mean, variance in zip(norms, statistics[0::2], statistics[1::2], strict=True):
            norm.mean, norm.variance = mean, variance

    def _views(self, name, flat):
        start = 0
        for layer in self.layers:
            views = []
            for shape in layer.shapes:
                stop = start + int(np.prod(shape))
                views.append(flat[start:stop].reshape(shape))
                start = stop
            setattr(layer, name, views)

    def flops(self):
        """The floating point operations of all products since the network was made."""
        return self.head.flops + sum(layer.flops for layer in self.layers)

    def round(self, theta, x, labels, weights, kernel, bias, steps, beta, rate):
        """A client's visit, with the inputs and outputs of the program's `round`; `dtheta` is used again."""
        self._views("weights", theta)
        phi = self.chain.forward(x)
        targets = np.zeros((len(x), kernel.shape[1]), np.float32)
        targets[np.arange(len(x)), labels] = 1
        old, before = (kernel, bias), None
        for _ in range(steps):
            loss, errors = self._errors(phi, targets, weights, kernel, bias)
            before = loss if before is None else before
            kernel, bias = kernel - beta * self.head.product(phi.T, errors), bias - beta * errors.sum(0)
        loss, errors = self._errors(phi, targets, weights, kernel, bias)
        if before is not None and not loss <= before:  # the safeguard
            kernel, bias = old
            loss, errors = self._errors(phi, targets, weights, kernel, bias)
        self.chain.backward(self.head.product(errors, kernel.T))
        dkernel, dbias = self.head.product(phi.T, errors), errors.sum(0)
        return {"dtheta": self.dtheta, "kernel": kernel - rate * dkernel, "bias": bias - rate * dbias, "loss": loss}

    def _errors(self, phi, targets, weights, kernel, bias):
        logits = self.head.product(phi, kernel) + bias
        logits -= logits.max(1, keepdims=True)
        share = np.exp(logits)
        total = share.sum(1, keepdims=True)
        loss = float(weights @ (np.log(total[:, 0]) - (logits * targets).sum(1)))
        return loss, (share / total - targets) * weights[:, None]
