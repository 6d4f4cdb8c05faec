"""Prediction by the nearest examples, without any training: for the first minutes with a new device.

The features of the client's own examples are kept. For a new example the k nearest of them vote, each with the weight
exp(-distance / scale), and the result is mixed with the probabilities of the head.

Source: Marfoq et al., Personalized Federated Learning through Local Memorization (kNN-Per), ICML 2022, equations 8, 9.
"""

from numbers import Integral, Real

import numpy as np

from tflite_export.device.client import DeviceClient
from tflite_export.device.errors import BundleError


class Neighbours:
    """The features and the classes of a client's examples.

    Classes are known by their names, so that a head may gain and lose some later. Examples of a class that the head
    does not have any more do not vote; after `DeviceClient.merge_classes`, make the Neighbours anew, with the new
    labels.

    Args:
        client: computes the features.
        x: examples, float32 [N, ...], as `DeviceClient.examples` gives them; N may be 0.
        y: labels, int [N] in [0, K): positions in `client.labels`.

    Raises:
        BundleError: as `DeviceClient.score`; or the head is not for classes.
    """

    def __init__(self, client: DeviceClient, x: np.ndarray, y: np.ndarray):
        if not client.kind.is_classes:
            raise BundleError(
                f"this head is for {client.kind.text}, and the nearest examples vote for classes: take "
                "`DeviceClient.predict`"
            )
        self.client, self.theta, self.labels = client, client.theta_sha256, client.labels
        self.y = np.zeros(0, np.int64)
        self.phi = np.zeros((0, client.bundle.num_features), np.float32)
        if len(x):
            x, y = client.checked(x, y)
            self.phi, self.y = client.features(x), y.astype(np.int64)

    def predict(self, x: np.ndarray, *, k: int = 10, weight: float = 0.5, scale: float = 1.0) -> np.ndarray:
        """Probabilities of the client's classes: weight * those of the neighbours + (1 - weight) * those of the head.

        Args:
            x: examples, float32 [n, ...], as `DeviceClient.examples` gives them.
            k: how many of the nearest examples vote, at least 1; all, if there are fewer. Of examples that are equally
                far, the older one is nearer.
            weight: of the neighbours, in [0, 1]; 1 leaves the head out. Without any example that votes it is 0.
            scale: of distances, > 0, in the unit of the features.

        Returns:
            float32 [n, K].

        Raises:
            BundleError: as `DeviceClient.predict`; an argument is out of range; theta has changed since the features
                were computed.
        """
        numbers = isinstance(k, Integral) and isinstance(weight, Real) and isinstance(scale, Real)
        if not (numbers and k >= 1 and 0 <= weight <= 1 and 0 < scale < np.inf):
            found = f"{k!r}, {weight!r}, {scale!r}"
            raise BundleError(f"a whole k >= 1, 0 <= weight <= 1 and scale > 0 are needed, found {found}")
        if self.client.theta_sha256 != self.theta:
            raise BundleError("theta has changed since the features were computed: make the Neighbours anew")
        place = {name: i for i, name in enumerate(self.client.labels)}
        y = np.array([place.get(name, -1) for name in self.labels])[self.y]  # -1: a class that is gone
        of_head = self.client.predict(x)
        if not (y >= 0).any():
            return of_head
        votes = self._votes(self.client.features(x), self.phi[y >= 0], y[y >= 0], k, scale)
        return (weight * votes + (1 - weight) * of_head).astype(np.float32)

    def _votes(self, phi, kept, y, k, scale):
        phi, kept = phi.astype(np.float64), kept.astype(np.float64)
        square = (phi**2).sum(1)[:, None] - 2 * phi @ kept.T + (kept**2).sum(1)
        distance = np.sqrt(np.maximum(square, 0))
        nearest = np.argsort(distance, axis=1, kind="stable")[:, :k]
        near = np.take_along_axis(distance, nearest, 1)
        with np.errstate(over="ignore"):  # of a tiny scale: the weight is 0
            # As a ratio to the nearest one's: far from all, exp(-distance) would be 0.
            votes = np.exp((near[:, :1] - near) / scale)
        found = np.zeros((len(phi), len(self.client.labels)))
        for column in range(votes.shape[1]):
            found[np.arange(len(phi)), y[nearest[:, column]]] += votes[:, column]
        return found / found.sum(1, keepdims=True)
