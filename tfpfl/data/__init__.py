"""Data: the examples of every client, the clients of every round, and the random numbers of both."""

from tfpfl.data.catalog import list_datasets, load_source
from tfpfl.data.client_names import find_client
from tfpfl.data.cohorts import cohort
from tfpfl.data.federation import Federation
from tfpfl.data.manifest import FederationError
from tfpfl.data.partitioners import PARTITIONERS, Group, Labels, Partition
from tfpfl.data.population import ClientInfo, Population, Sampling
from tfpfl.data.randomness import client_key
from tfpfl.data.source import Source
from tfpfl.data.synthetic import blobs, synthetic_targets
from tfpfl.data.targets import Targets

__all__ = [
    "PARTITIONERS",
    "ClientInfo",
    "Federation",
    "FederationError",
    "Group",
    "Labels",
    "Partition",
    "Population",
    "Sampling",
    "Source",
    "Targets",
    "blobs",
    "client_key",
    "cohort",
    "find_client",
    "list_datasets",
    "load_source",
    "synthetic_targets",
]
