"""A federation: the data of all clients in one folder on disk, read by client id.

    manifest.json      the source, the partition, counts and classes per client, and the hashes of all files
    x.raw              uint8, int32 or float32: the examples, by client, and within a client train | validation | test;
                       x.0.raw, x.1.raw, ... if an example is several arrays
    labels.raw         int32: global class ids
    labels_local.raw   int32: ids 0..K_i-1, the rank of the global id among the client's classes
    index.raw          int64 [I, 5]: first example; numbers of train, validation and test examples; K_i
    targets.raw        float32 [N, D]: what is to be predicted, in place of both labels, if that is no class

Two people who exchange the folder compare on the same split; `Federation.hash` identifies it. All engines, evaluation
and export read it. Graphs read it through `reader`, because sending a client's arrays into a TFF round costs more than
training on them.
"""

import hashlib
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from tfpfl.checks import InvalidArgument, check_type, one_line
from tfpfl.data.building import build_federation
from tfpfl.data.catalog import load_source
from tfpfl.data.client_arrays import write_clients
from tfpfl.data.description import describe
from tfpfl.data.layout import Layout, packed
from tfpfl.data.manifest import FederationError, check_index, check_labels, files_of, read_manifest
from tfpfl.data.partitioners import Partition
from tfpfl.data.population import Population, Sampling, Tensor, whole_numbers
from tfpfl.data.reading import cohort_reader, decoded_in_graph, label_space, split_number
from tfpfl.data.source import Source
from tfpfl.data.table import label_columns, table_clients
from tfpfl.data.targets import Targets, check_stored, ones
from tfpfl.data.writing import absent


class Federation:
    """The data of all clients, memory-mapped. `build`, `from_clients` and `from_table` make one, `load` opens one.

    Attributes:
        path: the folder.
        manifest: the parsed manifest.json.
        hash: the sha256 of the manifest, which contains the sha256 of every file. Two federations with equal hash have
            the same data and the same split.
        num_clients: the number of clients, I.
        num_labels: the number of classes of the data set, C; the width D of targets.
        targets: the sort, the width D and the names of the targets; None if the examples have classes.
        example_shape: the shape of one example, without the batch dimension; of several arrays, a dict or a tuple.
        layout: the arrays of an example as they are stored, with their dtypes and scales.
        class_names: the names of the C classes, as `tfpfl.checks.one_line` shows them; the manifest has them as given.
            Of targets, the names of the D outputs.
        client_names: the names of the I clients: their natural keys, or the ids that were given, or else '0', '1', ...
    """

    def __init__(self, path: Path, manifest: dict):
        self.path, self.manifest, self.hash = path, manifest, manifest["hash"]
        self.layout = Layout.of_manifest(manifest)
        self.example_shape = self.layout.shape
        self.targets = Targets.of_manifest(manifest)
        names = self.targets.names if self.targets else manifest["class_names"]
        self.class_names = [one_line(name) for name in names]
        self.num_labels = len(self.class_names)
        self.num_clients = len(manifest["clients"]["train"])
        self.client_names = [one_line(name) for name in manifest["clients"].get("names") or range(self.num_clients)]
        total = manifest["num_examples"]
        self._index = self._map("index.raw", np.int64, (self.num_clients, 5))
        self._x = [self._map(a.file, np.dtype(a.dtype), (total, *a.shape)) for a in self.layout.arrays]
        if self.targets is None:
            files = {"global": "labels.raw", "local": "labels_local.raw"}
            self._y = {space: self._map(name, np.int32, (total,)) for space, name in files.items()}
        else:
            self._y = dict.fromkeys(("global", "local"), self._map("targets.raw", np.float32, (total, self.num_labels)))

    def _map(self, name: str, dtype: DTypeLike, shape: tuple[int, ...]) -> np.ndarray:
        return np.memmap(self.path / name, dtype, mode="r", shape=shape)

    def __repr__(self) -> str:
        source = self.manifest["source"]["name"]
        return f"Federation({source!r}, {self.num_clients} clients, hash {self.hash[:12]}, {str(self.path)!r})"

    @classmethod
    def build(
        cls,
        source: Source | str = "digits",
        partitioner: str | Callable[..., Partition] = "round_robin",
        *,
        clients: int | None = None,
        seed: int = 0,
        validation: float = 0.1,
        out: str | os.PathLike,
        **partition_args: Any,
    ) -> "Federation":
        """Divides the examples of `source` among clients and writes them to the new folder `out`.

        The same arguments give the same hash. The folder appears complete or not at all.

        Args:
            source: a `Source`, or the name of a data set, which is loaded with `load_source(name, seed=seed)`.
            partitioner: a name in `PARTITIONERS`, or a function of (Labels, clients, seed, **partition_args) that
                returns a `Partition`.
            clients: the number of clients, I; None for partitioners that know it (natural, grouped_dominant).
            seed: the seed of the partition and of the validation cut, >= 0.
            validation: the fraction of every client's training examples, in [0, 1), that is set aside for choosing
                hyperparameters; rounded down. Every class gives its share. The cut is a function of (seed, client).
            out: the folder to make; it must not exist yet.
            **partition_args: the keyword arguments of the partitioner.

        Raises:
            InvalidArgument: the source or the partitioner is unknown; the partitioner cannot do what is asked, or
                would put examples that belong together, such as windows that overlap, into train and test; or a client
                would keep fewer than 2 training examples.
            FederationError: `out` exists already.
        """
        absent(out)  # before a large data set is read
        if isinstance(source, str):
            source = load_source(source, seed=seed)
        path = build_federation(source, partitioner, partition_args, clients=clients, seed=seed, validation=validation,
                                out=out)  # fmt: skip
        return cls.load(path, verify=False)

    @classmethod
    def from_clients(
        cls,
        clients: Mapping | Sequence | Any,
        test: Any = None,
        *,
        out: str | os.PathLike,
        targets: str | None = None,
        name: str = "arrays",
        version: str = "",
        class_names: Sequence[str] | None = None,
        compact_labels: bool = False,
        scale: float | None = None,
        shift: float = 0.0,
        validation: float = 0.1,
        test_fraction: float = 0.25,
        seed: int = 0,
    ) -> "Federation":
        """Makes a federation of data that are divided among clients already.

        Args:
            clients: {id: data} or [data, ...], where data is (x, y) or {'train': (x, y), 'validation': .., 'test': ..}.
                x is an array [N, ...], or a dict or a tuple of arrays, such as tokens and a mask.
                Or a `tff.simulation.datasets.ClientData` of (x, y) pairs or of dicts with a label. Missing parts are
                cut from train: first test, then validation.
            test: only with a ClientData: a second ClientData, with the test examples of the same clients.
            out: the folder to make; it must not exist yet.
            targets: what y is. None: classes. 'real': finite numbers; 'count': finite numbers >= 0; 'binary': 0 or 1
                for each output. Targets are [N, D], or [N] if D = 1; `class_names` then names the D outputs.
            name, version: the name and the version of the source, for the manifest.
            class_names, compact_labels, scale, shift: as in `Source.from_arrays`. Labels are integers or names of
                classes. uint8 is taken for pixels (scale 1/255); other integers stay as they are.
            validation: the fraction of training examples set aside for validation, in [0, 1), as in `build`.
            test_fraction: the fraction of a client's training examples, in [0, 1), that becomes its test part if it has
                none.
            seed: the seed of both cuts, >= 0.

        Raises:
            InvalidArgument: a client has no data or would keep fewer than 2 training examples; examples differ in
                shape, have no features or are not finite; labels are neither integers in [0, C) nor names; targets are
                not of their sort, or differ in width; two ids are the same text; a fraction is outside [0, 1).
            FederationError: `out` exists already.

        Examples:
            >>> x, y = np.zeros((20, 3)), np.arange(20) % 2
            >>> federation = Federation.from_clients({"ann": (x, y), "bob": (x[:12], y[:12] + 1)}, out="two")
            >>> federation.num_examples("train").tolist(), federation.num_examples("test").tolist()
            ([14, 9], [5, 3])
            >>> federation.classes(1).tolist(), federation.client_names
            ([1, 2], ['ann', 'bob'])
        """
        how: dict[str, Any] = {"name": name, "version": version, "class_names": class_names}
        how |= {"compact_labels": compact_labels, "validation": validation, "test_fraction": test_fraction}
        how["targets"] = targets
        path = write_clients(clients, test, out=out, scale=scale, shift=shift, seed=seed, made_by="from_clients", **how)
        return cls.load(path, verify=False)

    @classmethod
    def from_table(
        cls,
        table: Any,
        *,
        client: str,
        label: str | Sequence[str],
        out: str | os.PathLike,
        targets: str | None = None,
        features: Sequence[str] | None = None,
        split: str | None = None,
        name: str | None = None,
        version: str = "",
        class_names: Sequence[str] | None = None,
        compact_labels: bool = False,
        validation: float = 0.1,
        test_fraction: float = 0.25,
        seed: int = 0,
    ) -> "Federation":
        """Makes a federation of a table with a row for each example and a column that names the client.

        The features are stored as they are: nothing is standardized. Clients are named by the values of the column
        `client`, and sorted: by number if all are whole numbers, otherwise by name. A feature that has one value in all
        rows gives a warning.

        Args:
            table: the path of a CSV file (in UTF-8; the first line names the columns) or of a Parquet file (needs
                pyarrow, the extra 'tables'), a DataFrame of pandas or polars, a table of pyarrow, or a dict of columns.
            client, label: the columns of the client and of the label. Labels are integers or names of classes. With
                `targets`, `label` is the column of the target, or a list of columns, one for each output.
            out: the folder to make; it must not exist yet.
            targets: as in `from_clients`. The outputs are named by their columns.
            features: the columns of the features, all numeric. Default: all columns but client, label and split; then
                none may look like the numbers of the rows, such as one without a name, or 'index' with each number
                once.
            split: the column that says of each row train, validation or test. Default: no column; test and validation
                examples are cut from all rows of a client, as in `from_clients`. With the column nothing is cut for
                test, and for validation only if no row is marked so.
            name: the name of the source. Default: the name of the file without its ending, or 'table'.
            version, class_names, compact_labels, validation, test_fraction, seed: as in `from_clients`.

        Raises:
            InvalidArgument: the file cannot be read; a column does not exist or is there twice; a feature is not
                numeric; a value is missing or infinite (the error names row and column); a split has another name; or
                what `from_clients` raises.
            Unavailable: a Parquet file, and pyarrow is not installed.
            FederationError: `out` exists already.

        Examples:
            >>> rows = {"who": ["ann", "bob"] * 10, "age": range(30, 50), "ill": ["no"] * 9 + ["yes"] * 11}
            >>> federation = Federation.from_table(rows, client="who", label="ill", out="patients")
            >>> federation.client_names, federation.class_names, federation.num_examples("train").tolist()
            (['ann', 'bob'], ['no', 'yes'], [8, 8])
        """
        absent(out)  # before a large table is read
        if name is None:
            name = Path(table).stem if isinstance(table, str | os.PathLike) else "table"
        clients, found = table_clients(table, client, label, features, split, targets)
        if targets is not None and class_names is None:
            class_names = label_columns(label)
        how: dict[str, Any] = {"name": name, "version": version, "class_names": class_names, "targets": targets}
        how |= {"compact_labels": compact_labels, "validation": validation, "test_fraction": test_fraction}
        columns = {"client": client, "label": label, "split": split, "features": found}
        path = write_clients(clients, out=out, scale=1.0, seed=seed, made_by="from_table", options=columns, **how)
        return cls.load(path, verify=False)

    @classmethod
    def load(cls, path: str | os.PathLike, verify: bool = True) -> "Federation":
        """Opens a folder that `build`, `from_clients` or `from_table` made.

        Args:
            path: the folder.
            verify: hash every file, which finds a single changed bit, and check all labels. If false, only the
                manifest, the index and the sizes of the files are checked.

        Raises:
            FederationError: the folder is no federation, is incomplete, was changed, or has a newer format.
        """
        check_type("the folder of a federation", path, (str, os.PathLike), "a path")
        path = Path(os.path.abspath(path))
        manifest = read_manifest(path)
        for name in files_of(manifest):
            expected = manifest["files"][name]["bytes"]
            size = (path / name).stat().st_size if (path / name).is_file() else None
            if size != expected:
                what = "is missing" if size is None else f"has {size} bytes"
                raise FederationError(f"{path} is incomplete: {name} {what}, expected {expected} bytes")
        federation = cls(path, manifest)
        if verify:
            federation.verify()
        else:
            federation._check_index(labels_too=False)
        return federation

    def verify(self) -> None:
        """Hashes every file and compares it with the manifest, then the index and the labels.

        Raises:
            FederationError: a file was changed.
        """
        for name in files_of(self.manifest):
            with open(self.path / name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != self.manifest["files"][name]["sha256"]:
                raise FederationError(f"{self.path}/{name} was changed: its sha256 is not the one in the manifest")
        self._check_index(labels_too=True)

    def _check_index(self, labels_too: bool) -> None:
        try:
            check_index(self.manifest, self._index)
            if labels_too:
                if self.targets is not None:
                    check_stored(self.manifest, self._y["global"])
                else:
                    check_labels(self.manifest, self._index, self._y["global"], self._y["local"])
        except FederationError as error:
            raise FederationError(f"{self.path}/{error}") from None

    def num_examples(self, split: str = "train") -> np.ndarray:
        """The number of every client's examples in a split ('train', 'validation' or 'test'): int64 [I]."""
        return np.array(self._index[:, 1 + split_number(split)])

    @property
    def num_classes(self) -> np.ndarray:
        """The number of classes K_i of every client: int64 [I]. With targets, their width D."""
        return np.array(self._index[:, 4])

    def classes(self, client_id: int) -> np.ndarray:
        """The global class ids of a client, ascending: int64 [K_i]. The local label k means the class classes(i)[k].

        With targets, the D outputs: 0..D-1 for every client.
        """
        self._check_id(client_id)
        if self.targets is not None:
            return np.arange(self.targets.width)
        return np.asarray(self.manifest["clients"]["classes"][client_id], np.int64)

    def raw(self, client_id: int, split: str = "train", labels: str = "local") -> tuple[np.ndarray, np.ndarray]:
        """A client's examples as stored, [N, ...], and labels int32 [N] or targets float32 [N, D]: read-only views.

        Args:
            client_id: in [0, I).
            split: 'train', 'validation' or 'test'.
            labels: 'local' (ids in [0, K_i)) or 'global' (ids in [0, C)); of targets, both are the same.

        Raises:
            InvalidArgument: there is no client of this id, or it is no whole number.
            InvalidArgument: an unknown split or label space.
        """
        self._check_id(client_id)
        counts = self._index[client_id]
        start = int(counts[0] + counts[1 : 1 + split_number(split)].sum())
        rows = slice(start, start + int(counts[1 + split_number(split)]))
        return packed([x[rows] for x in self._x], self.example_shape), self._y[label_space(labels)][rows]

    def arrays(self, client_id: int, split: str = "train", labels: str = "local") -> tuple[np.ndarray, np.ndarray]:
        """The same as `raw`, but the examples are decoded to floats: x float32 [N, ...], and y is a copy."""
        x, y = self.raw(client_id, split, labels)
        return self.layout.each(self.layout.decoded, x), np.array(y)

    def decode(self, raw: Tensor, dtype: Any = None) -> Tensor:
        """Converts a tensor of stored examples to floats of `dtype` (default float32): raw * scale + shift.

        Of several arrays, those that are int32, such as tokens, stay integers.
        """
        return decoded_in_graph(self.layout, raw, dtype)

    def reader(self, split: str = "train", labels: str = "local", dtype: Any = None) -> Callable:
        """A TensorFlow function that reads one split of a client inside the graph that calls it.

        Args:
            split: 'train', 'validation' or 'test'.
            labels: 'local' or 'global', as in `raw`.
            dtype: the dtype of x, and of targets; default float32.

        Returns:
            read(client_id: int [] tensor) -> (x `dtype` [N, ...], y int32 [N]); targets are `dtype` [N, D]. An empty
            split gives empty tensors. An id outside [0, I) raises TensorFlow's InvalidArgumentError.
        """
        import tensorflow as tf

        read_cohort = self.cohort_reader(split, labels, dtype)
        return lambda client_id: read_cohort(tf.reshape(client_id, [1]))[:2]

    def cohort_reader(self, split: str = "train", labels: str = "local", dtype: Any = None) -> Callable:
        """The same as `reader`, but for several clients at once: one client's examples after the other.

        Each call reads only the rows it needs, in time O(N_i), eagerly, in a `tf.function` and in a
        `tff.tensorflow.computation`. A TFF worker on another machine needs the folder under the same path.

        Returns:
            read(client_ids: int [G]) -> (x `dtype` [sum N_i, ...], y int32 [sum N_i], sizes int32 [G]), where sizes
            are the N_i.
        """
        return cohort_reader(self, split_number(split), label_space(labels), dtype)

    def population(
        self,
        sampling: Sampling | None = None,
        labels: str = "local",
        shared_slots: bool = False,
        client_ids: Sequence[int] | None = None,
    ) -> Population:
        """The `Population` of this federation's clients, for the builder of an algorithm.

        Heads have K_i outputs with 'local' labels and C outputs with 'global' labels.

        Args:
            sampling, labels: as in `Population`.
            shared_slots: with 'local' labels, let clients with different classes share one head with max K_i outputs.
                Output k then means a different class for each client.
            client_ids: the clients that take part in training, ascending; default: all. The others are new clients.

        Raises:
            InvalidArgument: there is no client of such an id.
            InvalidArgument: an unknown label space, or a population that is not valid, see `Population`.
        """
        ids = np.arange(self.num_clients) if client_ids is None else whole_numbers("client_ids", client_ids)
        if ids.size:
            self._check_id(int(ids.min()))
            self._check_id(int(ids.max()))
        local = label_space(labels) == "local"
        classes = self.num_classes if local else np.full(self.num_clients, self.num_labels)
        return Population(
            num_examples=self.num_examples("train")[ids],
            num_classes=classes[ids],
            num_labels=int(classes.max()) if shared_slots or not local else None,
            labels=labels,
            sampling=sampling or Sampling(),
            client_ids=ids,
            same_classes=shared_slots or not local or self._same_classes(ids),
        )

    def _same_classes(self, ids: np.ndarray) -> bool:
        """Whether label k is the same class with all of these clients, by their training examples."""
        if self.targets is not None:
            return True
        starts, sizes = self._index[ids, 0], self.num_examples("train")[ids]
        rows = np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
        y, class_of = self._y["local"][rows], self._y["global"][rows]
        one = np.full(self.num_labels, -1)
        one[y] = class_of
        return bool((one[y] == class_of).all())

    def describe(self) -> dict[str, Any]:
        """A summary of the data: {name: printable value}, in the order in which tables show it."""
        return describe(self)

    def class_counts(self, split: str = "train", client_ids: Sequence[int] | None = None) -> np.ndarray:
        """The number of examples of every class that each client has: int64 [n, C]; of binary targets, of ones.

        Args:
            split: 'train', 'validation' or 'test'.
            client_ids: the clients of the n rows; default: all, [I, C].

        Raises:
            InvalidArgument: the targets are numbers, which have no classes; or an unknown split.
        """
        ids = range(self.num_clients) if client_ids is None else client_ids
        counts = np.zeros((len(ids), self.num_labels), np.int64)
        for row, i in enumerate(ids):
            y = self.raw(i, split, "global")[1]
            counts[row] = np.bincount(y, minlength=self.num_labels) if self.targets is None else ones(y, self.targets)
        return counts

    def _check_id(self, client_id: int) -> None:
        if isinstance(client_id, str):
            raise InvalidArgument(
                f"a client is given by its number, found {client_id!r}: tfpfl.data.find_client(federation, "
                f"{client_id!r}) gives the number of a name"
            )
        try:
            operator.index(client_id)
        except TypeError:
            raise InvalidArgument(f"a client's number must be a whole number, an int; found {client_id!r}") from None
        if not 0 <= client_id < self.num_clients:
            raise InvalidArgument(f"client {client_id} does not exist: ids are 0..{self.num_clients - 1}")
