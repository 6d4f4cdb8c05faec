"""Where a word is in its second decides what the trunk speech_embedding is worth.

    TFPFL_PEOPLE=FOLDER python benchmarks/word_placement.py

For every speaker of FSDD, logistic regression on the trunk's 288 numbers of the first five training recordings of each
digit, and of all 45. A recording is taken as it is (it begins with the word, and silence follows), or with its word
in the middle of the second and silence around it (`features="word"`).
"""

import numpy as np
from scipy.signal import resample_poly
from sklearn.linear_model import LogisticRegression

from tfpfl.data import load_source
from tfpfl.models.speech_embedding import load_speech_embedding

FEW = 5  # recordings of each digit


def as_recorded(x: np.ndarray) -> np.ndarray:
    """float32 [N, 16000] of recordings [N, 8000] at 8 kHz, with 0.5 as the largest amplitude."""
    x = resample_poly(x.astype(np.float64), 2, 1, axis=1)
    return (0.5 * x / np.abs(x).max(1, keepdims=True)).astype(np.float32)


def main():
    """Prints a line for each placement: the mean over speakers of the test accuracy in %, with 5 and with all."""
    trunk = load_speech_embedding()
    for title, features in (("as recorded", "wave"), ("in the middle", "word")):
        source = load_source("fsdd", features=features)
        prepare = as_recorded if features == "wave" else lambda x: (x * 2.0**-15).astype(np.float32)
        phi, phi_test = (
            np.asarray(trunk.predict(prepare(x), batch_size=64, verbose=0)) for x in (source.x_train, source.x_test)
        )
        found = []
        for person in np.unique(source.key_train):
            mine, test = np.flatnonzero(source.key_train == person), source.key_test == person
            y = source.y_train[mine]
            few = np.concatenate([mine[y == digit][:FEW] for digit in range(10)])
            models = (LogisticRegression(max_iter=1000).fit(phi[rows], source.y_train[rows]) for rows in (few, mine))
            found.append([100 * model.score(phi_test[test], source.y_test[test]) for model in models])
        few, everything = np.mean(found, 0)
        print(f"{title}: {few:.1f} with {FEW} of each digit, {everything:.1f} with all 45", flush=True)


if __name__ == "__main__":
    main()
