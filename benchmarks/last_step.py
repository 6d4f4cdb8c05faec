"""What the end of a client's fit is worth on the backbone of a PFLEGO run (`head_rate`).

    python benchmarks/last_step.py RUN

RUN is the folder of a run of PFLEGO with plain gradient steps on softmax heads. From its last theta and the heads that
clients keep, each client that has a head fits it in several ways, and the models are scored on its test examples.
Prints the accuracy in %, and the loss on training examples, both pooled over the examples of all clients, for: the head
that is kept; tau steps at beta, as in FedRecon; tau - 1 at beta and one at rho I / r, as in PFLEGO with `rule=eq3`;
tau - 1 at beta and that one at no more than 1 / L; 1,000 steps at 1 / L; 100 and 1,000 steps at 1 / L from a head of
zeros, which show whether heads that are kept from visit to visit overfit. Then the part of the training examples whose
client's loss PFLEGO's last step raised.
"""

import os
from collections import defaultdict

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import click
import numpy as np
import tensorflow as tf

from tfpfl import Run
from tfpfl.algorithms.parts import linear_head as heads
from tfpfl.algorithms.parts.converted_optimizers import as_optimizer
from tfpfl.algorithms.pflego import inner_steps, was_raised

AT_ONCE = 200  # examples in a forward pass


def ends(head, phi, targets, kind, tau, beta, last):
    """{name: (head, its training loss)} of the ways in which a fit on the features can end, and the loss before one."""

    new = tf.nest.map_structure(tf.zeros_like, head)

    def fitted(steps, rate, head=head):
        return inner_steps(head, phi, targets, steps, as_optimizer("sgd", rate, what="beta"), True, kind)

    before, loss, errors, _ = fitted(tau - 1, beta)
    smooth = float(heads.smoothness(phi, kind))

    def step(rate):
        kernel = before.kernel - rate * tf.linalg.matmul(phi, errors, transpose_a=True, transpose_b=True)
        return type(head)(kernel, before.bias - rate * tf.reduce_sum(errors, 1))

    found = {
        "kept": head,
        "tau steps at beta": fitted(tau, beta)[0],
        "last step at rho I / r": step(last),
        "last step at most 1 / L": step(min(last, 1 / smooth)),
        "1,000 steps at 1 / L": fitted(1000, 1 / smooth)[0],
        "new head, 100 steps at 1 / L": fitted(100, 1 / smooth, new)[0],
        "new head, 1,000 steps at 1 / L": fitted(1000, 1 / smooth, new)[0],
    }
    return {name: (h, float(heads.loss_and_errors(h, phi, targets, kind)[0])) for name, h in found.items()}, float(loss)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
def main(folder):
    """Fits the heads of all clients of a run and prints the table."""
    with Run.open(folder) as run:
        hyper, model, population = run.config.hyperparameters, run.model, run.population
        theta, kind = run.training().server_state().theta, model.kind
        last = hyper["rho"] * population.num_clients / population.clients_per_round
        features = tf.function(lambda x: model.features(theta, x))

        def of_split(client, split):
            x, y = run.examples.arrays(client, split)
            return np.concatenate([features(x[i : i + AT_ONCE]) for i in range(0, len(x), AT_ONCE)]), y

        ids = run.store.client_ids()
        like = run.algorithm.init_client(population.info(int(ids[0])))
        correct, losses, seen, raised, trained = defaultdict(int), defaultdict(float), 0, 0, 0
        for client, kept in zip(map(int, ids), run.store.client_states(ids, None, like), strict=True):
            (phi, y), (phi_test, y_test) = of_split(client, "train"), of_split(client, "test")
            head = tf.nest.map_structure(tf.constant, kept)
            targets = kind.targets(tf.constant(y), head.bias.shape[0], phi.dtype)
            found, before = ends(head, tf.constant(phi), targets, kind, hyper["tau"], hyper["beta"], last)
            seen, trained = seen + len(y_test), trained + len(y)
            raised += len(y) * bool(was_raised(before, found["last step at rho I / r"][1]))
            for name, (fitted, loss) in found.items():
                guess = np.argmax(phi_test @ fitted.kernel.numpy() + fitted.bias.numpy(), 1)
                correct[name] += int((guess == y_test).sum())
                losses[name] += loss * len(y)
        print(f"round {run.store.round_num}, {len(ids)} clients\n")
        print("| the head | accuracy | training loss |\n|---|---:|---:|")
        for name in correct:
            print(f"| {name} | {100 * correct[name] / seen:.2f} | {losses[name] / trained:.4f} |")
        print(f"\nThe last step at rho I / r raised the loss of {raised / trained:.0%} of the examples.")


if __name__ == "__main__":
    main()
