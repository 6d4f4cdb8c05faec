"""The federation that a run's configuration asks for, and the cache of those that tfpfl made."""

import hashlib
import json
import os
from pathlib import Path

from tfpfl.checks import InvalidArgument
from tfpfl.data import Federation, load_source
from tfpfl.data.manifest import FederationError
from tfpfl.runs.config import RunConfig, RunError


def open_federation(config: RunConfig, *, allow_download: bool = False) -> Federation:
    """The federation of a configuration: the folder it names, or else one in the cache, made if it is not there.

    The cache is `TFPFL_CACHE`, by default ~/.cache/tfpfl; a federation in it is a function of its arguments.

    Raises:
        ValueError, FederationError: it cannot be made, or it is not the one that the run was started with.
    """
    started = config.federation_hash is not None  # a run's configuration says how to make its federation again
    if config.federation is not None and (not started or Path(config.federation).exists()):
        federation = Federation.load(config.federation)
    else:
        try:
            federation = _cached_federation(config, allow_download)
        except (InvalidArgument, TypeError, FileNotFoundError) as error:  # TypeError: arguments of another version
            if not started:
                raise
            raise RunError(
                f"the run's federation {config.federation} is gone, and it could not be made again: {error}"
            ) from error
    if started and federation.hash != config.federation_hash:
        raise RunError(
            f"the run was started on federation {config.federation_hash[:12]}, but {federation.path} is "
            f"{federation.hash[:12]}: the numbers would not belong together"
        )
    return federation


def _cached_federation(config: RunConfig, allow_download: bool) -> Federation:
    seed = config.seed if config.data_seed is None else config.data_seed
    asked = [config.dataset, config.source, config.partition, config.partition_args, config.clients]
    name = hashlib.sha256(json.dumps([*asked, config.validation, seed], sort_keys=True).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("TFPFL_CACHE") or Path.home() / ".cache" / "tfpfl") / "federations"
    folder = cache / f"{config.dataset.replace('/', '-')}-{name}"
    if not folder.exists():
        source = load_source(config.dataset, allow_download=allow_download, **({"seed": seed} | config.source))
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
        raise FederationError(f"{error}. It is in the cache: remove that folder, and it is made again") from error
