"""Asynchronous rounds: the bias of the step, the time to a target against deadlines, and kills.

    python benchmarks/asynchronous.py bias [--arrivals 400000] [--seeds 3]
    python benchmarks/asynchronous.py speed [--seeds 5] [--clients 20] [--buffer 5]
    python benchmarks/asynchronous.py digits [--seeds 3] [--clients 20] [--buffer 5]
    python benchmarks/asynchronous.py kills [--clients 8] [--rounds 120] [--buffer 4] [--server-kills 5] [--seed 0]

`bias`: quadratic clients whose rates differ 100 times, at a fixed theta: the mean step against the full gradient, and
where theta ends; with the weights of this server, and with equal ones. `speed`: quadratic clients, without heads, whose
speeds, and the speed of one client from visit to visit, are heavy-tailed: the virtual time until the gap of the
objective is a part of the first one, with every deadline and learning rate of a grid in rounds, and every learning rate
of the same grid in asynchronous rounds. `digits`: the same with PFLEGO on digits, until the objective reaches a target.
`kills`: a server and devices as processes, which are ended by SIGKILL; then the log is computed
again and compared.
"""

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import NormalDist

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import click
import numpy as np

from helpers.clocked import Quadratics
from tfpfl.live.arrivals import AsyncServer, clocked


class Equal(AsyncServer):
    """Every update counts the same, as in FedBuff."""

    def remember(self, arrival):
        super().remember(arrival)
        return 1 / self.buffer


@click.group()
def main():
    """See the module."""


@main.command()
@click.option("--arrivals", default=400_000)
@click.option("--seeds", default=3)
def bias(arrivals, seeds):
    """The mean step at a fixed theta, and the gradient where theta ends."""
    rates = np.geomspace(1, 100, 5)
    print("seed jitter | bias of the step: ours, equal weights | gradient at the end, rho 0.01: ours, equal weights")
    for seed in range(seeds):
        clients = Quadratics(len(rates), seed)
        full = clients.full_gradient(clients.start)
        for jitter in (0.0, 1.0):
            found = []
            for server, n in ((AsyncServer, arrivals), (Equal, arrivals // 20)):
                mean, _ = clients.run(rates, n, jitter=jitter, server=server)
                found.append(np.linalg.norm(mean - full) / np.linalg.norm(full))
            for server in (AsyncServer, Equal):
                _, theta = clients.run(rates, arrivals // 10, 0.01, jitter=jitter, server=server)
                found.append(np.linalg.norm(clients.full_gradient(theta)) / np.linalg.norm(full))
            print(f"{seed:4} {jitter:6} | " + " ".join(f"{x:.1e}" for x in found), flush=True)


SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, None)
RATES = 2.0 ** np.arange(-10, 2)  # times 1 / L
TAILS = {"lognormal": lambda p: np.exp(1.5 * NormalDist().inv_cdf(p)), "pareto": lambda p: (1 - p) ** (-1 / 1.2)}


class Held:
    """Since when something is true, if it stays so for half of that time again."""

    def __init__(self):
        self.since = np.inf

    def __call__(self, now, true):
        self.since = min(self.since, now) if true else np.inf
        return now >= 1.5 * self.since


def deadline_time(clients, slow, jitter, deadline, rho, near, most, rng):
    """Virtual seconds of rounds of all clients with a deadline, in which rare clients count more, as in PFLEGO."""
    theta, spent, n, held = clients.start, 0.0, len(slow), Held()
    edge = np.inf if deadline is None else deadline
    come = np.array([NormalDist(np.log(s), jitter).cdf(np.log(edge)) if np.isfinite(edge) else 1.0 for s in slow])
    while spent < 1.5 * most:
        seconds = slow * np.exp(jitter * rng.normal(size=n))
        spent += min(seconds.max(), edge)
        weights = np.where(seconds <= edge, clients.alpha / np.maximum(come, 1e-300), 0.0)
        gradients = np.einsum("ijk,ik->ij", clients.curvature, theta - clients.center)
        theta = theta - rho * (weights @ gradients)
        if not np.abs(theta).max() < 1e6:
            break
        if held(spent, near(theta)):
            return held.since
    return np.inf


def buffer_time(clients, slow, jitter, buffer, rho, near, most, rng):
    """Virtual seconds of asynchronous rounds."""
    held, reached = Held(), [np.inf]

    def until(now):
        if held(now, near(server.state)):
            reached[0] = held.since
        return np.isfinite(reached[0]) or now > 1.5 * most or not np.abs(server.state).max() < 1e6

    server = AsyncServer(
        dict(enumerate(clients.alpha)), buffer, clients.start, lambda theta, total: theta - rho * total,
        np.zeros_like(clients.start),
    )  # fmt: skip
    clocked(
        server, lambda arrival, theta, per_step: clients.gradient(arrival.client, theta),
        lambda client, visit: slow[client] * np.exp(jitter * rng.normal()), until,
    )  # fmt: skip
    return reached[0]


@main.command()
@click.option("--seeds", default=5)
@click.option("--clients", default=20)
@click.option("--buffer", default=5)
@click.option("--jitter", default=0.5)
@click.option("--gap", default=0.1)
@click.option("--condition", default=100.0)
@click.option("--apart", default=3.0, help="How far the clients' minima are apart.")
@click.option("--tail", "which", type=click.Choice(list(TAILS)))
def speed(seeds, clients, buffer, jitter, gap, condition, apart, which):
    """Quadratic clients: virtual seconds until the objective's gap is a part of the first one, and stays so."""
    for tail, seconds_of in TAILS.items():
        for seed in range(seeds) if which in (None, tail) else ():
            made, rng = Quadratics(clients, seed, 10, condition, apart), np.random.default_rng(seed)
            slow = rng.permutation([seconds_of((i + 0.5) / clients) for i in range(clients)])  # quantiles
            curvature, minimum = made.whole

            def away(theta, curvature=curvature, minimum=minimum):
                return (theta - minimum) @ curvature @ (theta - minimum)

            first = away(made.start)

            def near(theta, away=away, first=first):
                return away(theta) <= gap * first

            rates = RATES / np.linalg.eigvalsh(curvature)[-1]
            visits = slow[:, None] * np.exp(jitter * rng.normal(size=(clients, 100)))
            best, where, steps, at = np.inf, None, np.inf, None
            for share in SHARES[::-1]:
                deadline = None if share is None else float(np.quantile(visits, share))
                for k, rho in enumerate(rates[::-1]):
                    most = min(best, 3000 * float(slow.max()))  # a later one than the best is of no interest
                    found = deadline_time(made, slow, jitter, deadline, rho, near, most, np.random.default_rng(seed))
                    if found < best:
                        best, where = found, (share, float(RATES[::-1][k]))
            for k, rho in enumerate(rates[::-1]):
                most = min(steps, 2 * best)
                found = buffer_time(made, slow, jitter, buffer, rho, near, most, np.random.default_rng(seed))
                if found < steps:
                    steps, at = found, float(RATES[::-1][k])
            span = slow.max() / slow.min()
            print(
                f"{tail:9} seed {seed}: slowest / fastest {span:5.0f}; best deadline {best:8.4g} s {where}; "
                f"asynchronous {steps:8.4g} s (rate {at}): {best / steps:.2f} times",
                flush=True,
            )


RHOS = (3.0, 1.0, 0.3, 0.1)
DEADLINES = (0.9, 0.75, 0.97, 0.6, None, 0.5)  # quantiles of visits; None: a round waits for all
SPREAD, JITTER = 1.5, 0.5  # standard deviations of log seconds over clients, and over one client's visits
_OUT_OF_REACH = 20.0


class Digits:
    """A run, and its objective: the mean over all examples of the loss of the client's head on theta."""

    def __init__(self, clients: int, seed: int, rho: float, deadline: float | None, folder: Path):
        from tfpfl import Run, RunConfig

        hyper = {"rho": rho, "beta": 0.05, "tau": 10, "rule": "exact", "server_opt": "sgd"}
        config = RunConfig(
            hyperparameters=hyper, dataset="digits", partition_args={"K": 3}, clients=clients, network="mlp200",
            participation=1.0, rounds=1, seed=seed, evaluate_every=0, client_seconds=1e-3, client_seconds_spread=SPREAD,
            jitter=JITTER, round_deadline=deadline,
        )  # fmt: skip
        self.run = Run.create(config, folder)
        self.ids = self.run.population.client_ids.tolist()
        self.work = self.run.population.num_examples * sum(self.run.passes)
        read = [self.run.examples.arrays(i, "train", self.run.population.labels) for i in self.ids]
        self._x, self._sizes = np.concatenate([x for x, _ in read]), [len(y) for _, y in read]
        self._y = [y for _, y in read]

    def objective(self, theta, heads) -> float:
        """The objective at theta (a tuple of arrays) and {client: (kernel, bias)}."""
        phi = np.split(self.run.model.features(theta, self._x).numpy(), np.cumsum(self._sizes)[:-1])
        total = 0.0
        for i, features, y in zip(self.ids, phi, self._y, strict=True):
            z = (features @ heads[i][0] + heads[i][1]).astype(np.float64)
            z -= z.max(1, keepdims=True)
            total += (np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]).sum()
        return total / sum(self._sizes)

    def seconds(self, client: int, visit: int) -> float:
        """The virtual seconds of a visit."""
        place = [self.ids.index(client)]
        how = self.run.availability
        return float(how.visit_seconds(self.run.config.seed, visit, [client], self.work[place])[0])


def in_rounds(found: Digits, target: float, most_seconds: float, most_rounds: int) -> float:
    """Virtual seconds of rounds with a deadline until the objective is at most `target`; infinity if later."""
    from tfpfl.runs.training import DivergedError, Training

    run = found.run
    training = Training(
        run.algorithm, run.examples, seed=run.config.seed, evaluate_every=0, splits=(),
        availability=run.availability, passes=sum(run.passes),
    )  # fmt: skip
    spent = 0.0
    try:
        for t in range(1, most_rounds + 1):
            training.run(t)
            spent += training.store.history()[-1]["virtual_seconds"]
            if spent > most_seconds:
                break
            if t % 2 == 0:
                heads = dict(zip(found.ids, map(tuple, training.client_states(found.ids)), strict=True))
                value = found.objective(run.algorithm.message(training.server_state()), heads)
                if value <= target:
                    return spent
                if not value < _OUT_OF_REACH:
                    break
    except DivergedError:
        pass
    return np.inf


def in_steps(found: Digits, buffer: int, target: float, most_seconds: float, most_steps: int) -> float:
    """Virtual seconds of asynchronous rounds until the objective is at most `target`; infinity if later."""
    import tensorflow as tf

    from tflite_export.convert.program import unflatten
    from tflite_export.device.errors import InvalidInput
    from tfpfl.live.async_virtual import Phones, simulate

    run, reached = found.run, [np.inf]
    phones = Phones(run, tf.lite.Interpreter)

    def on_step(step, now, theta):
        if now > most_seconds or not np.isfinite(theta).all():
            return True
        if step % 5:
            return False
        value = found.objective(unflatten(theta, run.model), {i: phones.client(i).head for i in found.ids})
        reached[0] = now if value <= target else np.inf
        return value <= target or not value < _OUT_OF_REACH

    try:
        simulate(run, buffer, found.seconds, most_steps, phones=phones, on_step=on_step)
    except InvalidInput:  # a device says that its round diverged
        return np.inf
    return reached[0]


@main.command()
@click.option("--seeds", default=3)
@click.option("--clients", default=20)
@click.option("--buffer", default=5)
@click.option("--target", default=0.02)
@click.option("--rounds", default=250)
@click.option("--first-seed", default=0)
def digits(seeds, clients, buffer, target, rounds, first_seed):
    """Virtual time to a target: every deadline and rate in rounds, every rate in asynchronous rounds."""
    for seed in range(first_seed, first_seed + seeds):
        root = Path(tempfile.mkdtemp())
        made = Digits(clients, seed, 0.01, None, root / "times")
        visits = [made.seconds(i, t) for i in made.ids for t in range(1, 101)]
        print(
            f"seed {seed}: seconds of visits, quantiles 1, 50, 99 %: {np.quantile(visits, [0.01, 0.5, 0.99]).round(2)}"
        )
        made.run.close()
        best, where = np.inf, None
        for quantile in DEADLINES:
            deadline, times = None if quantile is None else float(np.quantile(visits, quantile)), []
            for rho in RHOS:
                made = Digits(clients, seed, rho, deadline, root / f"sync_{quantile}_{rho}")
                times.append(in_rounds(made, target, best, rounds))  # a later one than the best is of no interest
                made.run.close()
                if times[-1] < best:
                    best, where = times[-1], (quantile, rho)
            print(f"  deadline {quantile}: " + " ".join(f"{x:.4g}" for x in times), flush=True)
        times = []
        for rho in RHOS:
            made = Digits(clients, seed, rho, None, root / f"async_{rho}")
            times.append(in_steps(made, buffer, target, min([best, *times]), 20_000))
            made.run.close()
        print("  asynchronous:  " + " ".join(f"{x:.4g}" for x in times))
        print(f"  best: rounds {best:.4g} s at {where}, asynchronous {min(times):.4g} s: {best / min(times):.2f} times")


@main.command()
@click.option("--clients", default=8)
@click.option("--rounds", default=120)
@click.option("--buffer", default=4)
@click.option("--server-kills", default=5)
@click.option("--seed", default=0)
@click.option("--python", default=sys.executable, help="The interpreter of the devices.")
def kills(clients, rounds, buffer, server_kills, seed, python):
    """SIGKILL for the server and for every third device; then the log is computed again."""
    from tfpfl import Run, RunConfig
    from tfpfl.live.async_book import AsyncBook
    from tfpfl.live.async_replay import replay
    from tfpfl.live.demo import processes, start_device, start_server
    from tfpfl.live.serve import write_data
    from tfpfl.runs.folders import LIVE

    draw, folder = random.Random(seed), Path(tempfile.mkdtemp()) / "run"
    config = RunConfig(
        hyperparameters={"rho": 0.01, "beta": 0.05, "rule": "exact", "server_opt": "sgd"}, dataset="digits",
        partition_args={"K": 3}, clients=clients, network="mlp200", participation=1.0, rounds=rounds, seed=seed,
        evaluate_every=0,
    )  # fmt: skip
    with Run.create(config, folder) as run:
        ids = run.population.client_ids.tolist()
        for client in ids:
            write_data(run.federation, run.population, client, folder / "data" / str(client))
    options = ("--async", f"buffer={buffer}", "--wait-for", str(clients), "--joins", "1000")
    with processes() as started:
        server, address = start_server(folder, folder / "server.log", *options)
        port = int(address.rpartition(":")[2])
        devices = {i: start_device(address, i, folder, python) for i in ids}
        started += [server, *devices.values()]
        killed, dying = [0, 0], ids[::3]
        while server.poll() is None:
            time.sleep(draw.uniform(0.5, 2.0))
            if dying and (log := folder / "devices" / f"{dying[-1]}.log").exists() and "counted" in log.read_text():
                victim = dying.pop()
                os.kill(devices[victim].pid, signal.SIGKILL)
                devices[victim].wait()
                devices[victim] = start_device(address, victim, folder, python)
                started.append(devices[victim])
                killed[1] += 1
            if killed[0] < server_kills and server.poll() is None:
                os.kill(server.pid, signal.SIGKILL)
                server.wait()
                killed[0] += 1
                server, _ = start_server(folder, folder / f"server{killed[0]}.log", *options, port=port)
                started.append(server)
        for process in devices.values():
            process.wait(60)
    with Run.open(folder) as run:
        book = AsyncBook(folder / LIVE, run.config.run_id)
        log = [one.arrival for one in book.arrivals()]
        book.close()
        print(f"killed: the server {killed[0]} times, devices {killed[1]} times; in {folder}")
        told = sum(
            line.endswith(": counted")
            for path in (folder / "devices").glob("*.log")
            for line in path.read_text().splitlines()
        )
        different = len({(a.client, a.visit) for a in log})
        print(
            f"{run.store.round_num} steps; {len(log)} updates in the log, {different} different; devices know of {told}"
        )
        print(replay(run))


if __name__ == "__main__":
    main()
