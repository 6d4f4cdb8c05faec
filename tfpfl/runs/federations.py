"""Opens the federation of a run's configuration, and keeps the federations that tfpfl builds in a cache."""

import hashlib
import json
import os
from pathlib import Path

from tfpfl.checks import InvalidArgument
from tfpfl.data import PARTITIONERS, Federation, load_source
from tfpfl.data.catalog import identity
from tfpfl.data.manifest import FederationError
from tfpfl.models import SplitModel, trunk_federation
from tfpfl.runs.config import RunConfig, RunError


def open_federation(config: RunConfig, *, allow_download: bool = False) -> Federation:
    """Opens the federation of a configuration: the folder that it names, or one in the cache, built if necessary.

    The cache is the folder `TFPFL_CACHE`, default ~/.cache/tfpfl. A federation in it is taken again as long as the
    files of its data set, or the version that TensorFlow Datasets has prepared, are the same.

    Args:
        config: its entries about the data.
        allow_download: whether the data set may be downloaded. Default: no.

    Raises:
        InvalidArgument, FileNotFoundError, FederationError: the federation cannot be loaded or built.
        RunError: the configuration is that of a run, and its federation is lost or has another hash.
    """
    started = config.federation_hash is not None  # then this is the configuration of a run that exists
    if config.federation is not None and (not started or Path(config.federation).exists()):
        federation = Federation.load(config.federation)
    elif started and config.partition not in PARTITIONERS:
        raise RunError(
            f"the run's federation {config.federation} is missing. Its data, {config.dataset!r}, or their partition "
            "are your own, so that it cannot be built anew: put the folder back there"
        )
    else:
        try:
            federation = _cached_federation(config, allow_download)
        except (InvalidArgument, TypeError, FileNotFoundError) as error:  # TypeError: arguments of another version
            if not started:
                raise
            raise RunError(
                f"the run's federation {config.federation} is missing, and it could not be built: {error}. If the data "
                "are your own, put the folder back there"
            ) from error
    if config.federation_hash is not None and federation.hash != config.federation_hash:
        raise RunError(
            f"the run was started on federation {config.federation_hash[:12]}, but {federation.path} is "
            f"{federation.hash[:12]}: its numbers would be of different data. Restore the first federation, "
            "which config.json names by its federation_hash"
        )
    return federation


def read_by(model: SplitModel, federation: Federation) -> Federation:
    """What the part of a model above its trunk takes: the features of the trunk, which are computed where missing.

    They are kept beside the federation, or in the cache if that folder cannot be written. Without a trunk, it is the
    federation itself.
    """
    if model.trunk is None:
        return federation
    beside = os.access(federation.path.parent, os.W_OK)
    return trunk_federation(model, federation, None if beside else cache_folder() / "trunks")[0]


def cache_folder() -> Path:
    """The folder of what tfpfl keeps for this user on this machine: `TFPFL_CACHE`, default ~/.cache/tfpfl."""
    return Path(os.environ.get("TFPFL_CACHE") or Path.home() / ".cache" / "tfpfl")


def _cached_federation(config: RunConfig, allow_download: bool) -> Federation:
    """The federation in the cache that was built of the same data with the same options; if there is none, a new one.

    The folder's name is a hash of them. Options that were not given count with their defaults, which a later version
    may change.
    """
    seed = config.seed if config.data_seed is None else config.data_seed
    options = {"seed": seed} | config.source
    defaults = getattr(PARTITIONERS.get(config.partition), "__kwdefaults__", None) or {}
    made_of = {
        "dataset": config.dataset,
        "data": identity(config.dataset, config.source.get("data_dir")),
        "source": {**(load_source.__kwdefaults__ or {}), **options, "allow_download": None, "data_dir": None},
        "partition": [config.partition, defaults | config.partition_args, config.clients, config.validation, seed],
    }
    name = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder() / "federations" / f"{config.dataset.replace('/', '-')}-{name}"
    if not folder.exists():
        source = load_source(config.dataset, allow_download=allow_download, **options)
        try:
            return Federation.build(
                source,
                config.partition,
                clients=config.clients,
                seed=seed,
                validation=config.validation,
                out=folder,
                **config.partition_args,
            )
        except FederationError:
            if not folder.exists():  # otherwise another process has just made it
                raise
    try:
        return Federation.load(folder)
    except FederationError as error:
        raise FederationError(f"{error}. It is in the cache: delete that folder, and it is built again") from error
