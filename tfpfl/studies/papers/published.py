"""The papers' tables as they are printed: accuracies in %, seconds and rounds. An empty cell is empty in the paper."""

from typing import NamedTuple


class Published(NamedTuple):
    """One cell of a paper's table: a number and its interval."""

    value: float
    spread: float | None  # the number after the paper's ±; None if there is none


def read(text: str) -> dict[tuple[str, str], Published]:
    """Reads a table: {(method, column): Published}. Cells are separated by '|'; the first line names the columns."""
    header, *lines = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    found = {}
    for method, *cells in lines:
        for column, cell in zip(header[1:], cells, strict=True):
            if cell:
                value, _, spread = cell.partition("±")
                found[method, column] = Published(float(value), float(spread) if spread else None)
    return found


# arXiv 2202.09848v2, Table 1: mean of the last ten of 200 rounds.
PFLEGO_TABLE1 = read("""
        |MNIST, 2  |MNIST, 5  |MNIST, 10 |CIFAR-10, 2|CIFAR-10, 5|CIFAR-10, 10
fedper  |97.88±.25 |92.83±.46 |87.23±.33 |85.15±1.08|61.01±.84|37.88±.59
fedavg  |97.54±.25 |92.83±.52 |93.12±.24 |85.18±.96 |64.53±.75|61.33±.52
fedprox |97.50±.26 |92.62±.54 |93.02±.25 |85.94±.87 |64.07±.60|60.00±.62
ditto   |98.25±.12 |94.05±.47 |92.98±.25 |85.89±.98 |64.18±.78|60.67±.49
fedrep  |98.03±.23 |93.85±.47 |89.28±.28 |84.03±.83 |66.64±.67|46.52±.96
fedbabu |97.19±.33 |92.46±.46 |93.98±.24 |87.88±.66 |66.64±.68|56.48±.51
pflego  |98.70±.21 |95.16±.32 |91.37±.19 |87.81±.94 |74.83±.66|63.31±.61
""") | read("""
        |EMNIST, 2 |EMNIST, 31|EMNIST, 62|Fashion-MNIST, 2|Fashion-MNIST, 5|Fashion-MNIST, 10
fedper  |97.78±.51 |74.19±.36 |48.12±.23 |96.14±.35|88.22±.64|77.44±.59
fedavg  |97.29±.54 |68.82±.29 |69.40±.10 |96.35±.47|87.51±.73|83.59±.35
fedprox |97.24±.54 |54.28±.58 |69.20±.09 |95.21±.48|87.44±.78|83.54±.38
ditto   |98.11±.48 |67.24±.28 |69.11±.09 |96.45±.47|89.30±.50|83.48±.34
fedrep  |98.20±.45 |77.62±.34 |65.23±.18 |95.99±.38|89.10±.68|79.18±.33
fedbabu |97.08±.58 |60.58±.34 |71.82±.16 |95.68±.44|88.00±.72|84.12±.43
pflego  |98.79±.36 |77.75±.33 |60.79±.15 |96.34±.43|89.84±.52|81.49±.51
""")

# The same, Table 2: Omniglot, mean of the rounds 991 to 1000.
PFLEGO_TABLE2 = read("""
         |Omniglot
fedrep   |69.65±2.47
fedbabu  |68.45±1.53
fedprox  |48.41±1.83
ditto    |50.88±1.72
fedper   |68.02±1.74
fedavg   |49.65±1.74
fedrecon |74.06±1.19
pflego   |75.85±1.21
""")

# The same, Table 3: wall time of a round on Omniglot; no unit is given.
PFLEGO_TABLE3 = read("""
         |Omniglot
fedrep   |10.571
fedbabu  |16.814
fedprox  |18.632
ditto    |26.105
fedper   |14.436
fedavg   |16.553
pflego   |7.024
""")

# arXiv 2212.01448, Table 1: best round of 300, three seeds. Columns: data set, clients.
PGFED_TABLE1 = read("""
           |CIFAR-10, 25|CIFAR-10, 50|CIFAR-10, 100|CIFAR-100, 25|CIFAR-100, 50|CIFAR-100, 100
local      |72.40±.45|70.28±.38|67.39±.20|32.74±.08|26.05±.34|23.06±.47
fedavg     |65.07±.25|64.41±.66|63.19±.46|28.48±.59|26.06±.65|25.58±.80
feddyn     |67.31±.36|65.02±.91|62.49±.06|34.17±.43|27.06±.18|23.88±.36
pfedme     |70.60±.23|68.92±.35|66.40±.04|27.97±.24|23.82±.06|22.35±.03
fedfomo    |72.33±.03|72.17±.48|70.86±.27|32.15±.61|25.90±1.17|24.48±.44
apfl       |77.03±.26|77.36±.18|76.29±.13|39.16±.93|35.15±.65|33.86±.60
fedrep     |76.85±.44|76.03±.17|72.30±.52|33.43±.80|26.86±.39|22.76±.45
lg_fedavg  |72.83±.28|70.44±.31|67.55±.09|33.65±.19|27.13±.37|24.82±.28
fedper     |77.84±.18|77.76±.22|75.01±.20|35.22±.67|28.63±.70|25.56±.26
per_fedavg |75.49±.74|76.27±.50|75.41±.35|32.89±.43|32.24±.75|32.59±.21
fedrod     |79.73±.68|79.61±.22|77.76±.32|39.55±.58|33.87±2.42|31.49±.19
fedbabu    |78.92±.36|79.35±.84|76.34±.22|32.71±.23|29.66±.64|27.72±.11
pgfed      |81.02±.41|81.42±.31|78.56±.35|43.12±.03|38.45±.44|35.71±.54
pgfedmo    |81.20±.08|81.48±.32|78.74±.22|43.44±.14|38.50±.45|35.76±.65
""")

# The same, Table 2: rounds to 70 % on CIFAR-10.
PGFED_TABLE2 = read("""
           |CIFAR-10, 25|CIFAR-10, 50|CIFAR-10, 100
apfl       |31|28|24
fedper     |8|6|8
per_fedavg |31|47|63
fedrod     |26|35|10
pgfed      |9|14|15
pgfedmo    |9|14|15
""")

# The same, Tables 3 and 4: individual gain over Local in points, mean and std over clients.
PGFED_TABLES3_4 = read("""
           |CIFAR-10, 25|CIFAR-10, 50|CIFAR-10, 100|CIFAR-100, 25|CIFAR-100, 50|CIFAR-100, 100
fedavg     |-8.99±10.36|-8.90±15.48|-5.02±14.30|-3.29±4.22|0.02±4.63|1.77±6.38
apfl       |2.79±8.07|5.73±8.43|8.37±6.91|6.48±2.93|8.70±3.37|9.31±4.55
fedper     |5.31±2.56|8.31±6.00|8.63±5.26|3.43±1.80|2.16±2.45|2.31±3.54
per_fedavg |0.72±6.22|5.02±7.39|8.09±7.00|0.07±3.71|5.47±3.86|7.49±5.73
fedrod     |7.80±3.68|8.84±6.29|10.68±6.14|7.32±2.68|6.59±3.17|7.47±3.69
pgfed      |8.49±4.67|10.78±5.88|11.15±5.06|9.34±1.71|9.01±2.97|12.05±3.93
pgfedmo    |8.61±3.59|10.90±6.11|11.16±5.44|9.40±1.87|8.99±2.76|12.07±3.97
""")

# arXiv 2007.03797, Tables 1 to 3: best mean testing accuracy. Columns: split, data set.
_FEDAMP = ("MNIST", "Fashion-MNIST", "EMNIST", "CIFAR-100")
FEDAMP = {
    split: read("method|" + "|".join(_FEDAMP) + "\n" + rows.strip())
    for split, rows in {
        "iid": """
local      |99.27|81.66|54.41|9.82
fedavg     |99.31|91.94|74.38|49.59
fedprox    |98.81|90.19|73.14|46.50
fedavg_ft  |98.98|90.17|70.53|35.07
fedprox_ft |98.72|89.02|69.49|40.77
scaffold   |98.89|89.04|72.51|43.06
apfl       |98.93|91.03|73.95|49.02
fedamp     |99.22|92.05|74.07|45.68
heurfedamp |99.28|91.80|74.07|45.88
""",
        "pathological": """
local      |98.73|97.67|99.15|92.67
fedavg     |98.39|77.88|19.44|2.70
fedprox    |97.15|83.80|48.81|2.81
fedavg_ft  |99.66|98.07|99.24|95.00
fedprox_ft |99.63|98.00|99.27|94.36
scaffold   |99.34|94.58|98.75|2.04
apfl       |98.24|97.44|98.90|52.11
fedamp     |99.53|97.95|99.27|94.87
heurfedamp |99.38|98.17|99.26|94.74
""",
        "practical": """
local      |86.30|86.73|61.78|39.99
fedavg     |81.82|79.50|72.27|35.21
fedprox    |81.46|78.71|70.55|37.31
fedavg_ft  |91.79|89.73|78.93|49.00
fedprox_ft |94.10|87.51|77.31|50.24
scaffold   |98.50|40.20|77.98|21.29
apfl       |85.05|84.08|59.07|16.45
fedamp     |97.59|90.97|81.22|53.04
heurfedamp |97.36|91.37|81.47|53.27
""",
    }.items()
}
