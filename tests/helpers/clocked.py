"""Clients whose losses are quadratic, so that the full gradient and the minimum are known in closed form."""

import numpy as np

from tfpfl.live.arrivals import AsyncServer, clocked


class Quadratics:
    """Clients with l_i = (theta - c_i)' H_i (theta - c_i) / 2 and weights alpha_i, drawn from a seed."""

    def __init__(self, clients, seed, size=4, condition=None, apart=1.0):
        rng = np.random.default_rng(seed)
        roots = rng.normal(size=(clients, size, size))
        self.alpha = rng.dirichlet(np.full(clients, 5.0))
        self.curvature = roots @ roots.transpose(0, 2, 1) / size + 0.2 * np.eye(size)
        if condition is not None:  # common directions, whose curvatures differ so much, and between clients four times
            basis, _ = np.linalg.qr(roots[0])
            values = np.geomspace(1, 1 / condition, size) * np.exp(rng.uniform(-0.7, 0.7, (clients, size)))
            self.curvature = (basis * values[:, None, :]) @ basis.T
        self.center = 2 * apart * rng.normal(size=(clients, size))
        self.start = 2 * rng.normal(size=size)

    def gradient(self, i, theta):
        return self.curvature[i] @ (theta - self.center[i])

    def full_gradient(self, theta):
        return sum(a * self.gradient(i, theta) for i, a in enumerate(self.alpha))

    @property
    def whole(self):
        """(curvature, minimum) of the objective sum_i alpha_i l_i."""
        curvature = np.einsum("i,ijk->jk", self.alpha, self.curvature)
        return curvature, np.linalg.solve(curvature, np.einsum("i,ijk,ik->j", self.alpha, self.curvature, self.center))

    def run(self, rates, arrivals, rho=0.0, jitter=0.0, buffer=5, seed=0, server=AsyncServer):
        """(mean over steps of the sum that a step takes, mean of theta over the last half), by the virtual clock.

        With rho = 0 theta stays where it is. It ends with the first step after so many arrivals in which the slowest
        client has come: a mean over whole visits of all.
        """
        rng, steps, thetas = np.random.default_rng(seed), [], []
        slowest, came = int(np.argmin(rates)), []

        def step(theta, total):
            steps.append(total)
            thetas.append(theta - rho * total)
            return thetas[-1]

        def visit(arrival, theta, per_step):
            if arrival.client == slowest:
                came.append(made.version)
            return self.gradient(arrival.client, theta)

        def seconds(client, number):
            return np.exp(jitter * rng.normal()) / rates[client]

        made = server(dict(enumerate(self.alpha)), buffer, self.start, step, np.zeros_like(self.start))
        clocked(made, visit, seconds, lambda now: made.count >= arrivals and came[-1] == made.version - 1)
        return np.mean(steps, axis=0), np.mean(thetas[len(thetas) // 2 :], axis=0)
