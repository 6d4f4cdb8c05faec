"""`Federation.from_table`: what a CSV file, a Parquet file or a DataFrame becomes, and what is refused by name."""

import csv
import re
import sys
import tracemalloc
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from tfpfl.checks import InvalidArgument, TfpflWarning, Unavailable
from tfpfl.data import Federation, columns

WHO = dict(client="user", label="state")


def rows(n=24):
    """Columns of a made table: 3 users, 2 features, labels by name."""
    rng = np.random.default_rng(0)
    return {
        "user": [["u10", "u9", "Zoë"][i % 3] for i in range(n)],
        "age": rng.integers(20, 90, n),
        "mass": rng.normal(70, 9, n),
        "state": [["well", "ill"][(i // 3) % 2] for i in range(n)],
    }


def write(path, columns, delimiter=",", encoding="utf-8"):
    with open(path, "w", newline="", encoding=encoding) as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def test_a_table_becomes_what_the_same_clients_become_as_arrays(tmp_path):
    table = rows()
    federation = Federation.from_table(table, **WHO, out=tmp_path / "f", seed=3)
    assert federation.client_names == ["Zoë", "u10", "u9"] and federation.class_names == ["ill", "well"]
    x = np.column_stack([table["age"], table["mass"]])
    of = {name: np.array(table["user"]) == name for name in federation.client_names}
    arrays = Federation.from_clients(
        {name: (x[own], np.array(table["state"])[own]) for name, own in of.items()}, out=tmp_path / "g", seed=3
    )
    for i in range(3):
        for split in ("train", "validation", "test"):
            for ours, theirs in zip(federation.arrays(i, split), arrays.arrays(i, split), strict=True):
                assert np.array_equal(ours, theirs)
    source = federation.manifest["source"]
    assert source["options"] == {**WHO, "split": None, "client": "user", "features": ["age", "mass"]}
    assert source["name"] == "table"


@pytest.mark.parametrize("delimiter, encoding", [(",", "utf-8"), (";", "utf-8"), ("\t", "utf-8-sig")])
def test_a_csv_file_is_the_same_table(tmp_path, delimiter, encoding):
    path = write(tmp_path / "people.csv", rows(), delimiter, encoding)
    federations = [
        Federation.from_table(table, **WHO, name="people", out=tmp_path / f"{i}")
        for i, table in enumerate([path, rows()])
    ]
    assert federations[0].hash == federations[1].hash
    assert Federation.from_table(path, **WHO, out=tmp_path / "named").manifest["source"]["name"] == "people"


def test_commas_in_the_name_of_a_column_do_not_choose_the_delimiter(tmp_path):
    """Also as many as the line has semicolons, in quotes or not, and in a name that goes on in the next line."""
    for number, name in enumerate(["mass, in kg, dressed, at noon", "mass, in\nkg, dressed, noon", 'a "b", c, d, e']):
        table = {**rows(), name: rows()["mass"]}
        del table["mass"]
        path = write(tmp_path / f"{number}.csv", table, ";")
        made = Federation.from_table(path, **WHO, name="table", out=tmp_path / f"f{number}")
        assert made.hash == Federation.from_table(table, **WHO, out=tmp_path / f"g{number}").hash


def test_clients_of_a_csv_file_keep_their_names_and_numbers_are_sorted_as_numbers(tmp_path):
    table = rows(40) | {"user": ["007", "10", "9"] * 13 + ["9"], "state": ["1", "0"] * 20}
    federation = Federation.from_table(write(tmp_path / "t.csv", table), **WHO, out=tmp_path / "f")
    assert federation.client_names == ["007", "9", "10"] and federation.class_names == ["0", "1"]
    table["user"][0:39:3] = ["XX"] * 13
    federation = Federation.from_table(write(tmp_path / "t.csv", table), **WHO, out=tmp_path / "g")
    assert federation.client_names == ["10", "9", "XX"]


@pytest.mark.parametrize("as_file", [True, False])
def test_whole_numbers_with_a_point_are_labels_in_a_file_and_in_a_dataframe(tmp_path, as_file):
    """And names that Python could read as numbers are names."""
    for number, (given, classes) in enumerate(
        [([1.0, 0.0] * 12, ["0", "1"]), (["inf", "-inf"] * 12, ["-inf", "inf"]), (["1.0", "x"] * 12, ["1.0", "x"])]
    ):
        table = rows() | {"state": np.array(given)}
        table = write(tmp_path / f"{number}.csv", table) if as_file else table
        assert Federation.from_table(table, **WHO, out=tmp_path / f"f{number}").class_names == classes


@pytest.mark.parametrize("labels", [["1_1", "01", "1"], ["01", "02", "10"], ["1_0", "2_0"], ["٣", "٤"]])
def test_labels_that_only_python_reads_as_numbers_are_names(tmp_path, labels):
    """So 01 and 1 are two classes; the file gives the same as the same texts in a dict."""
    table = rows() | {"state": [labels[i // 3 % len(labels)] for i in range(24)]}
    for name, given in (("file", write(tmp_path / "t.csv", table)), ("dict", table)):
        made = Federation.from_table(given, **WHO, out=tmp_path / name)
        assert made.class_names == sorted(labels)


@pytest.mark.parametrize("kind", ["S", object])
def test_bytes_are_text(tmp_path, kind):
    """As columns of HDF5, and of Parquet files that were written from bytes, have them."""
    table = rows() | {"part": (["train"] * 3 + ["test"] * 3) * 4}
    stored = {name: np.array([value.encode() for value in table[name]], kind) for name in ("user", "state", "part")}
    made = [
        Federation.from_table(given, **WHO, split="part", out=tmp_path / name)
        for name, given in (("text", table), ("bytes", table | stored))
    ]
    assert made[1].client_names == ["Zoë", "u10", "u9"] and made[0].hash == made[1].hash
    with pytest.raises(InvalidArgument, match="column 'user': row 2 is b'caf.xe9', which is no text in UTF-8. Give"):
        Federation.from_table(rows() | {"user": np.array([b"u", "café".encode("latin-1")] * 12)}, **WHO, out="f")


def test_signs_and_exponents_are_numbers_and_1_1_is_none(tmp_path):
    table = rows() | {"state": ["+1", "0", "2e0", ".0"] * 6, "mass": ["007", "-1.5e2", ".5", "+3."] * 6}
    made = Federation.from_table(write(tmp_path / "t.csv", table), **WHO, out=tmp_path / "f", validation=0)
    assert made.class_names == ["0", "1", "2"]
    x = np.concatenate([made.arrays(i, part)[0] for i in range(3) for part in ("train", "test")])
    assert sorted(set(x[:, 1].tolist())) == [-150, 0.5, 3, 7]
    for cell in ("1_1", "٣"):
        table["mass"] = ["1"] * 23 + [cell]
        with pytest.raises(InvalidArgument, match=f"column 'mass' is not numeric, row 24 has '{cell}'"):
            Federation.from_table(write(tmp_path / "t.csv", table), **WHO, out=tmp_path / "g")


def test_features_are_stored_as_they_are(tmp_path):
    table = rows() | {"tall": [True, False] * 12}
    federation = Federation.from_table(table, **WHO, features=["tall", "age"], out=tmp_path / "f")
    stored = np.concatenate(
        [federation.raw(i, split)[0] for i in range(3) for split in ("train", "validation", "test")]
    )
    assert set(map(tuple, stored.tolist())) == set(zip(table["tall"], table["age"].tolist(), strict=True))
    pixels = {name: np.arange(24, dtype=np.uint8) for name in "ab"} | {k: rows()[k] for k in ("user", "state")}
    small = Federation.from_table(pixels, **WHO, out=tmp_path / "g")
    assert small.manifest["dtype"] == "uint8" and small.manifest["preprocessing"] == {"scale": 1.0, "shift": 0.0}


def test_the_column_of_the_split_is_followed(tmp_path):
    table = rows() | {"part": ["train"] * 15 + ["test"] * 5 + ["validation"] * 4}
    table["part"][20] = "train"
    federation = Federation.from_table(table, **WHO, split="part", out=tmp_path / "f")
    for split in ("train", "validation", "test"):
        wanted = [
            sum(u == name and p == split for u, p in zip(table["user"], table["part"], strict=True))
            for name in federation.client_names
        ]
        assert federation.num_examples(split).tolist() == wanted
    assert federation.describe()["partitioner"] == "from_table()"  # no fraction was cut for test
    assert federation.manifest["partitioner"]["arguments"] == {"test_fraction": 0.25}  # the hash stays
    table["part"] = ["train"] * 20 + ["test"] * 4  # no validation rows: a tenth of the training rows is cut
    table["user"][20:] = ["u9"] * 4
    cut = Federation.from_table(table, **WHO, split="part", validation=0.2, out=tmp_path / "g")
    assert cut.num_examples("test").tolist() == [0, 0, 4] and cut.num_examples("validation").tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "changed, given, message",
    [
        ({"mass": ["70,5"] * 24}, {}, "row 1 has '70,5': write numbers with a decimal .* decimal=','"),
        ({"mass": ["1,234,567.5"] * 24}, {}, "has '1,234,567.5': write numbers with .* thousands=',' leaves it out"),
        ({"city": ["Bern"] * 24}, {}, "column 'city' is not numeric, row 1 has 'Bern': leave it out with features="),
        (
            {"mass": [70.0] * 23 + [None]},
            {},
            r"'mass' has 1 missing values, the first in row 24 \(the first row of data",
        ),
        ({"mass": [70.0, np.nan] * 12}, {}, "column 'mass' has 12 missing values, the first in row 2"),
        ({"mass": [np.inf] + [1.0] * 23}, {}, "column 'mass' has inf in row 1: features must be finite"),
        (
            {"mass": [70.0] * 22 + [-1e40, 1e39]},
            {},
            r"column 'mass' has -1e\+40 in row 23: features are at most 1e\+15, because float32 overflows. Take",
        ),
        ({"user": ["a", None] * 12}, {}, "column 'user' has 12 missing values, the first in row 2"),
        ({"state": ["a", ""] * 12}, {}, "column 'state' has 12 missing values, the first in row 2"),
        ({"state": ["a", " \t"] * 12}, {}, "column 'state' has 12 missing values, the first in row 2"),
        ({"user": np.array([b"a", b" "] * 12)}, {}, "column 'user' has 12 missing values, the first in row 2"),
        ({"state": [0.5, 1.0] * 12}, {}, r"'state' has the label 0.5 in row 1: a label is a whole number or a name"),
        ({"state": [0.5, 1.0] * 12}, {}, r"are to be predicted, say targets='real' \(--targets real at the command"),
        ({"state": np.array(["a", 1] * 12, object)}, {}, "train labels must be integers, or all names"),
        ({}, {"client": "usr"}, "client: unknown column 'usr'; did you mean 'user'"),
        ({}, {"features": ["age", "mas"]}, "features: unknown column 'mas'; did you mean 'mass'"),
        ({}, {"features": ["age", "user"]}, "features: column 'user' is the client, the label or the split"),
        ({}, {"features": []}, "features must be different columns, at least one; found none"),
        ({}, {"label": "user"}, "client, label and split must be different columns"),
        ({"part": ["train", "dev"] * 12}, {"split": "part"}, "'part' has 'dev' in row 2: a split is one of train, val"),
        ({"age": [1, 2]}, {}, r"the columns of a table have one length, found \[2, 24\]"),
        ({"user": [f"u{i}" for i in range(24)]}, {}, "client u0 has 1 training examples left of 1"),
    ],
)
def test_what_is_refused_is_named(tmp_path, changed, given, message):
    with pytest.raises(InvalidArgument, match=message):
        Federation.from_table(rows() | changed, **WHO | given, out=tmp_path / "f")
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("user,state,age\na,x,1\nb,y\n", r"t.csv: row 2 has 2 cells, the first line has 3"),
        ("user,state,age\na,x,1\nb,y,NA\n", "column 'age' is not numeric, row 2 has 'NA'"),
        ("user,state,age\na,x,1\nb,y,\n", "column 'age' has 1 missing values, the first in row 2"),
        ("user,state,age\na,x,1\nb,y, \n", "column 'age' has 1 missing values, the first in row 2"),
        ("user,state,age\na,1,1\nb, ,2\n", "column 'state' has 1 missing values, the first in row 2"),
        ("user,state,age\n1,x,1\n  ,y,2\n", "column 'user' has 1 missing values, the first in row 2"),
        ("user,state,age,age\na,x,1,1\n", "t.csv has two columns 'age': rename one of them"),
        ("user,state,age\na,1.0,1\nb,0.5,1\n", "'state' has the label 0.5 in row 2: a label is a whole number or a"),
        ("user,state,age\na,x,1\na\0,y,2\n", r"column 'user': the text 'a.x00' has the character NUL \(.0\) in it"),
        ("user,state,age\na,x,1\nb,x\0,2\n", r"column 'state': the text 'x.x00' has the character NUL \(.0\) in it"),
        ("user,state,age\n", "the table has no rows"),
        ("", "t.csv is empty: the first line must have the names of the columns"),
        ('user,state,age\n"a,x,1\n', "t.csv cannot be read as CSV in UTF-8"),
    ],
)
def test_a_bad_csv_file_is_refused(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        Federation.from_table(tmp_path / "t.csv", **WHO, out=tmp_path / "f")


@pytest.mark.parametrize("how", [{"features": {"age", "h"}}, {"label": frozenset(["age", "h"]), "targets": "real"}])
def test_a_set_of_columns_has_no_order(tmp_path, how):
    """Python gives it another order in every process, so that the same call would make different federations."""
    table = {name: range(12) for name in ("age", "h", "state")} | {"user": ["ann", "bob"] * 6}
    with pytest.raises(InvalidArgument, match=r"must be a list, such as \['age', 'h'\], found a (frozen)?set: it"):
        Federation.from_table(table, **(WHO | how), out=tmp_path / "f")


def test_a_file_that_is_no_table(tmp_path):
    (tmp_path / "parts.csv").mkdir()  # as Spark writes a table
    cases = [("t.xlsx", "FILE.csv or FILE.parquet, found"), ("no.csv", "there is no file")]
    for name, message in [*cases, ("parts.csv", "parts.csv cannot be read as CSV in UTF-8: .* Is a directory")]:
        with pytest.raises(InvalidArgument, match=message):
            Federation.from_table(tmp_path / name, **WHO, out=tmp_path / "f")
    with pytest.raises(
        InvalidArgument, match="a table is a DataFrame, a dict of columns, or the path of a file, found"
    ):
        Federation.from_table([1, 2], **WHO, out=tmp_path / "f")
    lazy = SimpleNamespace(columns=["user", "state", "age"], collect=rows)  # as a LazyFrame of polars
    with pytest.raises(InvalidArgument, match="a SimpleNamespace has no rows yet: give table.collect"):
        Federation.from_table(lazy, **WHO, out=tmp_path / "f")
    with pytest.raises(InvalidArgument, match="label is the name of a column, a text, or a list of names; found 2"):
        Federation.from_table(rows(), client="user", label=2, out=tmp_path / "f")


def test_what_is_odd_is_said(tmp_path):
    with pytest.warns(TfpflWarning, match="the same value in every row: column 'site'. It tells nothing"):
        Federation.from_table(rows() | {"site": [4] * 24}, **WHO, out=tmp_path / "f")
    with pytest.warns(
        TfpflWarning, match=r"'number' has whole numbers up to 16,777,217; as float32, whole numbers bey"
    ):
        Federation.from_table(rows() | {"number": range(2**24 - 22, 2**24 + 2)}, **WHO, out=tmp_path / "g")
    large = rows() | {"pay": [3e4, 4e4] * 12, "half": [100.0] * 12 + [99.0] * 12, "debt": [-150.0] * 12 + [50.0] * 12}
    told = r"columns of large numbers, with their root mean square: 'pay' \(3.54e\+04\), 'debt' \(112\). Nothing is"
    with pytest.warns(TfpflWarning, match=told):
        Federation.from_table(large, **WHO, out=tmp_path / "large")
    with pytest.warns(TfpflWarning, match="column 'state' has only one class, 'ill': there is nothing to learn"):
        Federation.from_table(rows() | {"state": ["ill"] * 24}, **WHO, out=tmp_path / "one")
    for column, name, what in (("user", "u9", "clients"), ("state", "ill", "classes")):
        table = rows()
        table[column] = [f" {value}" if value == name and i < 12 else value for i, value in enumerate(table[column])]
        told = f"the {what} ' {name}' and '{name}' differ only in spaces: they are taken for two"
        with pytest.warns(TfpflWarning, match=told):
            Federation.from_table(table, **WHO, out=tmp_path / column)
    capitals = rows() | {"user": [name.upper() if i < 12 else name for i, name in enumerate(rows()["user"])]}
    pairs = len(set(capitals["user"][:12]) & {name.upper() for name in capitals["user"][12:]})
    assert pairs > 1
    told = f"the clients 'ZOË' and 'Zoë' differ only in capitals, and {pairs - 1} more pairs: they are taken"
    with pytest.warns(TfpflWarning, match=told):
        Federation.from_table(capitals, **WHO, out=tmp_path / "capitals")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Federation.from_table(rows(), **WHO, out=tmp_path / "h")


def one_by_one(values):
    """A column of whatever the values are, as pyarrow and polars make one of lists."""
    column = np.empty(len(values), object)
    for i, value in enumerate(values):
        column[i] = value
    return column


class Missing:
    """Like pandas' NA: comparing it gives no truth."""

    def __ne__(self, other):
        return self

    __eq__ = __ne__
    __hash__ = None

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")


def test_a_dataframe_is_read_by_its_columns(tmp_path):
    """What both pandas and polars have: `columns`, and columns with `to_numpy`; pandas' Int64 are objects."""

    class Frame(dict):
        columns = property(lambda self: list(self))

    def frame(columns):
        return Frame({k: SimpleNamespace(to_numpy=lambda v=v: np.array(v, object)) for k, v in columns.items()})

    table = {name: list(values) for name, values in rows().items()}
    hashes = [Federation.from_table(t, **WHO, out=tmp_path / f"{i}").hash for i, t in enumerate([rows(), frame(table)])]
    assert hashes[0] == hashes[1]
    table["age"][7] = Missing()
    with pytest.raises(InvalidArgument, match="column 'age' has 1 missing values, the first in row 8"):
        Federation.from_table(frame(table), **WHO, out=tmp_path / "f")


def test_pandas_and_parquet_are_the_same_table(tmp_path):
    pandas, parquet = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.parquet")
    import pyarrow

    frame = pandas.DataFrame(rows())
    frame["age"] = frame["age"].astype("Int64")
    frame["state"] = frame["state"].astype("category")
    parquet.write_table(pyarrow.table(rows()), tmp_path / "t.parquet")
    hashes = {
        Federation.from_table(t, **WHO, name="t", out=tmp_path / f"{i}").hash
        for i, t in enumerate([rows(), frame, tmp_path / "t.parquet"])
    }
    assert len(hashes) == 1
    frame.loc[3, "age"] = pandas.NA
    with pytest.raises(InvalidArgument, match="column 'age' has 1 missing values, the first in row 4"):
        Federation.from_table(frame, **WHO, out=tmp_path / "f")


def test_a_missing_category_is_missing_in_a_table_of_pyarrow_and_in_a_parquet_file(tmp_path):
    """pyarrow's own `to_numpy` gives the last category in its place."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    def as_categories(columns):
        return {k: pyarrow.array(list(v)).dictionary_encode() for k, v in columns.items()}

    whole = pyarrow.table(as_categories(rows()))
    hashes = {
        Federation.from_table(t, **WHO, name="t", out=tmp_path / f"{i}").hash
        for i, t in enumerate([rows(), whole, *whole.to_batches()])
    }
    assert len(hashes) == 1
    for name, values in rows().items():
        table = pyarrow.table(as_categories(rows() | {name: [*list(values)[:6], None, *list(values)[7:]]}))
        parquet.write_table(table, tmp_path / f"{name}.parquet")
        for given in (table, tmp_path / f"{name}.parquet"):
            with pytest.raises(InvalidArgument, match=f"column '{name}' has 1 missing values, the first in row 7"):
                Federation.from_table(given, **WHO, out=tmp_path / "f")


def test_labels_that_are_bytes_are_names_in_utf8(tmp_path):
    """As a column of bytes is in Parquet, and in polars."""
    ill = [name.encode() for name in ("krank", "müde")] * 12
    federation = Federation.from_table(rows() | {"state": one_by_one(ill)}, **WHO, out=tmp_path / "f")
    assert federation.class_names == ["krank", "müde"]
    with pytest.raises(InvalidArgument, match=r"column 'state': row 2 is b'm\\xfcde', which is no text in UTF-8"):
        bad = one_by_one([ill[0], "müde".encode("latin-1")] * 12)
        Federation.from_table(rows() | {"state": bad}, **WHO, out=tmp_path / "g")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Unavailable, match=r"needs pyarrow, which is not installed: pip install '\.\[tables\]'"):
        Federation.from_table(tmp_path / "t.parquet", **WHO, out=tmp_path / "f")


@pytest.mark.parametrize("name", ["", " ", "Unnamed: 0", "__index_level_0__"])
def test_the_numbers_of_the_rows_are_no_feature_unless_it_is_said(tmp_path, name):
    """pandas writes them by default, and in a table that is sorted by the label they tell the label."""
    table = {name: list(range(24))} | rows()
    for given in (table, write(tmp_path / "t.csv", table)):
        with pytest.raises(
            InvalidArgument, match="it looks like the numbers of the rows, .* with index=False, .* or name"
        ):
            Federation.from_table(given, **WHO, out=tmp_path / "f")
        with pytest.raises(InvalidArgument, match="client, label and split must be different columns"):
            Federation.from_table(given, client=name, label=name, out=tmp_path / "f")
    made = Federation.from_table(table, **WHO, features=[name, "age"], out=tmp_path / "f")
    assert made.manifest["source"]["options"]["features"] == [name, "age"]


def test_separators_at_the_ends_of_lines_are_told(tmp_path):
    lines = [",".join(line) + "," for line in csv.reader(write(tmp_path / "t.csv", rows()).open())]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(InvalidArgument, match="column '' has no values: remove it, such as the separators"):
        Federation.from_table(tmp_path / "t.csv", **WHO, out=tmp_path / "f")


def test_row_numbers_after_reset_index_are_no_feature_unless_it_is_said(tmp_path):
    """Also with gaps and out of order. Another column may have this name: one with a number twice, or with a point."""
    numbers = {"all": range(24), "some": range(0, 72, 3), "mixed": np.random.default_rng(0).permutation(24)}
    for kind, column in numbers.items():
        table = {"index": list(column)} | rows()
        for given in (table, write(tmp_path / f"{kind}.csv", table)):
            with pytest.raises(InvalidArgument, match=r"'index': it looks like the numbers .* reset_index.drop=True"):
                Federation.from_table(given, **WHO, out=tmp_path / "f")
    made = Federation.from_table(table, **WHO, features=["index", "age"], out=tmp_path / "meant")
    assert made.manifest["source"]["options"]["features"] == ["index", "age"]
    for kind, column in {"twice": [*range(23), 22], "point": np.linspace(20, 30, 24)}.items():
        table = {"index": column} | rows()
        assert Federation.from_table(table, **WHO, out=tmp_path / kind).example_shape == (3,)


def test_a_column_that_counts_the_rows_is_said_unless_it_was_chosen(tmp_path):
    for begin in (0, 1):
        table = {"patient": [begin + i for i in range(24)]} | rows()
        with pytest.warns(TfpflWarning, match="columns that only count the rows: 'patient'. In a sorted table such a"):
            Federation.from_table(table, **WHO, out=tmp_path / f"f{begin}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Federation.from_table(table, **WHO, features=["patient", "age"], out=tmp_path / "meant")
        Federation.from_table({"day": [i % 12 for i in range(24)]} | rows(), **WHO, out=tmp_path / "days")


def test_a_summary_names_what_was_taken_as_features(tmp_path):
    """So that a second label, which is easily forgotten, is seen among them."""
    made = Federation.from_table(rows() | {"cured\n": [0, 1] * 12}, **WHO, out=tmp_path / "f")
    assert made.describe()["features"] == r"age, mass, cured\n"
    wide = {f"x{i}": np.arange(24) % (i + 2) for i in range(22)} | {name: rows()[name] for name in ("user", "state")}
    assert Federation.from_table(wide, **WHO, out=tmp_path / "g").describe()["features"].endswith("x19 and 2 more")


def test_a_column_of_floats_that_float32_rounds_is_said_by_name(tmp_path):
    """Once, and once only: times since 1970 to the second or below it, and identifiers beside a gap."""
    for kind, column, said in (
        ("seconds", 1.7e9 + 60.0 * np.arange(24), "'at' has whole numbers up to 1,700,001,380; as float32"),
        ("parts", 1.7e9 + 0.25 * np.arange(24), "'at' has numbers that lie near each other and far from 0, 17000"),
    ):
        table = rows() | {"at": column}
        for place, given in enumerate((table, write(tmp_path / f"{kind}.csv", table))):
            with pytest.warns(TfpflWarning) as told:
                Federation.from_table(given, **WHO, out=tmp_path / f"{kind} {place}")
            texts = [str(warning.message) for warning in told]
            assert len([text for text in texts if said in text]) == 1
            assert len(texts) == 2 and any("columns of large numbers" in text for text in texts)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"user": ["ann", "bob", float("nan")] * 8}, "column 'user' has 8 missing values, the first in row 3"),
        ({"state": ["yes", "no", float("nan")] * 8}, "column 'state' has 8 missing values, the first in row 3"),
        ({"state": ["yes", 1, 2] * 8}, "labels must be all integers or all names of classes, found both"),
        ({"age": np.ma.masked_equal(np.arange(24), 7)}, "column 'age': 1 values of a masked array are masked"),
        (
            {"age": one_by_one([[1, 2]] * 24)},
            r"'age' must have one value in each row, found \[1, 2\] in row 1: give each",
        ),
        (
            {"age": one_by_one([1, *map(np.array, [[1, 2]] * 23)])},
            r"'age' must have one value in each row, .* in row 2",
        ),
        ({"state": one_by_one([np.array(["a"])] * 24)}, r"'state' must have one value in each row, .* in row 1: give"),
        ({"user": one_by_one([np.zeros(9)] * 24)}, r"'user' must have one value in each row, .* in row 1: give each"),
        ({"age": np.ones((24, 2))}, r"column 'age' must have one value in each row, found an array of shape .24, 2."),
        ({"age": np.arange(24) * 1j}, "column 'age' has complex numbers, and features are real numbers: give the real"),
        ({"age": np.arange(24).astype("m8[ns]")}, "column 'age' has durations, .* divide them by a unit"),
        ({"age": np.arange(24).astype("M8[ns]")}, "column 'age' has dates, .* take the time since a day"),
        ({"age": np.arange(24).astype("M8[D]")}, "column 'age' has dates"),
        ({"user": np.array([2.0**53 + 2, 1.0] * 12)}, "column 'user' has 90071.* in row 1: as floats, such large numb"),
        ({"state": np.array(["café".encode("latin-1"), b"x"] * 12)}, "row 1 is b'caf.xe9', which is no text"),
    ],
)
def test_what_numpy_would_change_silently_is_refused(tmp_path, changed, message):
    with pytest.raises(InvalidArgument, match=message):
        Federation.from_table(rows() | changed, **WHO, out=tmp_path / "f")


def test_a_target_of_two_columns_loses_none(tmp_path):
    table = rows() | {"dose": np.arange(48.0).reshape(24, 2)}
    with pytest.raises(InvalidArgument, match="column 'dose' must have one value in each row"):
        Federation.from_table(table, client="user", label="dose", targets="real", features=["age"], out=tmp_path / "f")
    for kind in "cmM":
        with pytest.raises(InvalidArgument, match="column 'mass' has .* targets are real numbers"):
            odd = rows() | {"mass": np.arange(24).astype({"c": "c8"}.get(kind, f"{kind}8[ns]"))}
            Federation.from_table(
                odd, client="user", label="mass", targets="real", features=["age"], out=tmp_path / "f"
            )


def test_clients_that_are_whole_numbers_are_sorted_as_numbers(tmp_path):
    for number, (given, names) in enumerate(
        [
            ([1.0, 2.0, 10.0], ["1", "2", "10"]),  # what pandas makes of a column that had a gap
            ([-1, 2, 10], ["-1", "2", "10"]),
            ([-10, -9, 3], ["-10", "-9", "3"]),
            ([0.5, 2.0, 10.0], ["0.5", "10.0", "2.0"]),
            (["007", "9", "10"], ["007", "9", "10"]),
            ([1.0, "1", 2.0], ["1", "2"]),  # of two tables in one, of which one had a gap
        ]
    ):
        table = rows() | {"user": given * 8}
        assert Federation.from_table(table, **WHO, out=tmp_path / f"{number}").client_names == names


def test_one_long_cell_takes_no_memory_for_all_rows():
    texts = ["a"] * 5_000 + ["1"] * 5_000 + ["1" * 10_000]
    for given in (texts, texts[5_000:], [*texts[5_000:], ""]):
        tracemalloc.start()
        parsed = columns._parsed(given)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 2e6 and parsed.dtype == (object if given is texts else float)  # as texts of one width 200 MB


def test_cells_are_numbers_as_they_were():
    for cells, kind in (
        (["1", " 2 ", "-3", "+4"], int),
        (["1", "2.5", "", "nan", "inf", "1e400"], float),
        (["9" * 30, "1"], float),
        (["1", "x"], object),
        (["1_1", "2"], object),
    ):
        parsed = columns._parsed(cells)
        assert parsed.dtype == kind
        if kind is not object:
            np.testing.assert_array_equal(parsed, np.array([cell or "nan" for cell in cells]).astype(kind))


@pytest.mark.parametrize("column", ["user", "state"])
@pytest.mark.parametrize("word", ["NA", "nan", " #N/A", "?", "-", ". "])
def test_words_for_missing_values_are_said_beside_names_and_refused_beside_numbers(tmp_path, column, word):
    beside_names = rows()
    for row in (4, 9):
        beside_names[column][row] = word
    told = re.escape(f"column '{column}' has '{word}' in")
    with pytest.warns(TfpflWarning, match=rf"{told} 2 rows, the first in row 5 \(.*taken"):
        Federation.from_table(write(tmp_path / "names.csv", beside_names), **WHO, out=tmp_path / "f")
    beside_numbers = rows() | {column: [i % 4 for i in range(24)]}
    beside_numbers[column][7] = word
    with pytest.raises(InvalidArgument, match=rf"{told} 1 rows, the first in row 8 .*miss"):
        Federation.from_table(write(tmp_path / "numbers.csv", beside_numbers), **WHO, out=tmp_path / "g")


def test_none_is_a_class_like_any_other(tmp_path):
    table = rows()
    table["state"] = ["none" if state == "well" else state for state in table["state"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federation = Federation.from_table(write(tmp_path / "t.csv", table), **WHO, out=tmp_path / "f")
    assert federation.class_names == ["ill", "none"]


def test_clients_without_enough_rows_for_a_test_part_are_told(tmp_path):
    table = {name: list(values)[:9] for name, values in rows().items()}  # three rows of each of three clients
    with pytest.warns(TfpflWarning, match="no client has so many examples that 0.25 of them, rounded down, is one"):
        Federation.from_table(table, **WHO, out=tmp_path / "f")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Federation.from_table(table, **WHO, out=tmp_path / "g", test_fraction=0.0)


def test_a_column_of_the_split_without_test_rows_is_told_as_such(tmp_path):
    table = rows() | {"part": ["train"] * 20 + ["validation"] * 4}
    with pytest.warns(
        TfpflWarning, match="the test parts of all clients are empty: .* rows whose split is test"
    ) as said:
        Federation.from_table(table, **WHO, split="part", out=tmp_path / "f")
    assert not [w for w in said if "test_fraction" in str(w.message)]  # which cuts nothing here


def test_labels_of_bytes_for_missing_values_are_refused_too(tmp_path):
    table = rows() | {"state": np.array([b"1", b"0"] * 11 + [b"NA", b"1"])}
    with pytest.raises(InvalidArgument, match="column 'state' has 'NA' in 1 rows, the first in row 23"):
        Federation.from_table(table, **WHO, out=tmp_path / "f")
