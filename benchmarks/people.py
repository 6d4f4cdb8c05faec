"""How alike people are, before anything federated: a linear model of one's own data, of all, and of the other people.

    TFPFL_PEOPLE=FOLDER python benchmarks/people.py [fsdd watch vowels]

For every person, the test accuracy of logistic regression on standardized features that was trained on the training
examples of this person ('own'), of all people, and of all others ('others': somebody who never took part). Of watch the
features are the mean, the deviation and the mean absolute step of each axis; of fsdd and vowels the numbers themselves.
"""

import sys

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tfpfl.data import Source, load_source


def features(x: np.ndarray) -> np.ndarray:
    """[N, M]: of windows [N, 100, 6] three numbers for each axis, of other examples all numbers."""
    if x.shape[1:] == (100, 6):
        return np.concatenate([x.mean(1), x.std(1), np.abs(np.diff(x, axis=1)).mean(1)], 1)
    return x.reshape(len(x), -1).astype(np.float64)


def scores(source: Source) -> dict[str, np.ndarray]:
    """{training data: test accuracy of every person}."""
    x, x_test = features(source.x_train), features(source.x_test)
    found: dict[str, list[float]] = {"own": [], "all": [], "others": []}
    c = 0.1 if x.shape[1] > 100 else 1.0

    def fitted(chosen: np.ndarray):
        model = make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=300))
        return model.fit(x[chosen], source.y_train[chosen])

    of_all = fitted(np.ones(len(x), bool))
    for person in np.unique(source.key_train):
        mine, test = source.key_train == person, source.key_test == person
        for name, model in (("own", fitted(mine)), ("all", of_all), ("others", fitted(~mine))):
            found[name].append(model.score(x_test[test], source.y_test[test]))
    return {name: 100 * np.array(each) for name, each in found.items()}


def main():
    """Prints a line for each data set: the mean over people in %, and the lowest and the highest person."""
    for name in sys.argv[1:] or ("fsdd", "watch", "vowels"):
        found = scores(load_source(name))
        told = [f"{on} {each.mean():.1f} ({each.min():.1f} to {each.max():.1f})" for on, each in found.items()]
        print(name, *told, sep="  ", flush=True)


if __name__ == "__main__":
    main()
