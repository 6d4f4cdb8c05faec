"""Data: a federation on disk, how it is shared out, and where the examples come from."""

from tfpfl.data.catalog import list_datasets, load_source
from tfpfl.data.federation import Federation
from tfpfl.data.manifest import FederationError
from tfpfl.data.partitioners import PARTITIONERS, Group, Labels, Partition
from tfpfl.data.source import Source
from tfpfl.data.synthetic import blobs

__all__ = [
    "PARTITIONERS",
    "Federation",
    "FederationError",
    "Group",
    "Labels",
    "Partition",
    "Source",
    "blobs",
    "list_datasets",
    "load_source",
]
