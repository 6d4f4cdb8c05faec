"""A table of one's own: twenty hospitals, few patients each. Does training together pay, and for which of them?

    python docs/examples/data_scientist.py [FOLDER]

In FOLDER (default: hospitals) the script writes the table, the federation that it makes of the table, the runs and a
plot. Put your own table in the place of `write_table`: a column that names the client, a column with the label, and
columns of numbers.
"""

import csv
import sys
from pathlib import Path

import numpy as np

import tfpfl
from tfpfl.studies import compare_runs, plots, rows

CLIENT, LABEL = "hospital", "diagnosis"


def write_table(path: Path) -> None:
    """Made-up patients: three diagnoses, twelve measurements. Every hospital's instruments have an offset."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, 12))
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow([CLIENT, LABEL, *(f"measurement {k}" for k in range(12))])
        for hospital in range(20):
            offset = 0.5 * rng.normal(size=12)
            for diagnosis in rng.integers(0, 3, 60):
                values = centres[diagnosis] + offset + 1.5 * rng.normal(size=12)
                table.writerow([f"hospital {hospital}", ("healthy", "mild", "severe")[diagnosis], *values.round(3)])


folder = Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals")
if folder.exists():
    sys.exit(f"{folder} exists already: remove it, or name another folder")
folder.mkdir()
write_table(folder / "patients.csv")
federation = tfpfl.Federation.from_table(
    folder / "patients.csv", client=CLIENT, label=LABEL, out=folder / "federation", test_fraction=0.5
)
print(federation)

SETTINGS = {
    "pflego": {"beta": 0.1, "rho": 0.003},
    "fedavg": {"eta": 0.03},
    "fedavg_ft": {"eta": 0.03},
    "local": {"eta": 0.03},
}
configs = [
    tfpfl.RunConfig(
        algorithm=name,
        hyperparameters=settings,
        federation=str(federation.path),
        participation=0.5,
        rounds=40,
        seed=seed,
    )
    for name, settings in SETTINGS.items()
    for seed in (0, 1)
]
records = [tfpfl.Record.read(run) for run in compare_runs(configs, folder / "runs")]
for row in rows(records):
    print(
        f"{row['algorithm']:10} {row['accuracy']:5.1f} % of the test patients, mean over hospitals; "
        f"{row['gain over Local']:+5.1f} points over Local; worse than Local: {row['worse than Local %']:3.0f} %"
    )

ours, alone = (next(r for r in records if r.config.algorithm == name).per_client() for name in ("fedavg_ft", "local"))
gains = {federation.client_names[i]: 100 * (ours[i] - alone[i]) for i in ours}
for name in sorted(gains, key=gains.get, reverse=True)[:3]:
    print(f"{name} gains {gains[name]:.1f} points")
local = [record for record in records if record.config.algorithm == "local"]
plots.write_picture(plots.gains(records, local), folder / "gains.png", dpi=120)
print(f"Written to {folder}")
