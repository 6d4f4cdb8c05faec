"""The methods, each in a file of its own, and what they share: the contract and `parts`. `ALGORITHMS` lists them."""

from tfpfl.algorithms.adapters import adapters
from tfpfl.algorithms.apfl import apfl
from tfpfl.algorithms.catalog import ALGORITHMS, build_algorithm, check_names, get_method
from tfpfl.algorithms.contract import Adaptation, Algorithm, Between, ClientData, ClientOutput, Exchange, OnePass, Rows
from tfpfl.algorithms.ditto import ditto
from tfpfl.algorithms.fed3r import fed3r
from tfpfl.algorithms.fedala import fedala
from tfpfl.algorithms.fedamp import fedamp, heurfedamp
from tfpfl.algorithms.fedas import fedas
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.fedbabu import fedbabu
from tfpfl.algorithms.fedcp import fedcp
from tfpfl.algorithms.feddane import feddane
from tfpfl.algorithms.feddbe import feddbe
from tfpfl.algorithms.feddyn import feddyn
from tfpfl.algorithms.fedfomo import fedfomo
from tfpfl.algorithms.fedpac import fedpac
from tfpfl.algorithms.fedper import fedper
from tfpfl.algorithms.fedproto import fedproto
from tfpfl.algorithms.fedprox import fedprox
from tfpfl.algorithms.fedrecon import fedrecon
from tfpfl.algorithms.fedrep import fedrep
from tfpfl.algorithms.fedrod import fedrod
from tfpfl.algorithms.fedsgd import fedsgd
from tfpfl.algorithms.finetune import fedavg_ft, fedprox_ft, finetuned
from tfpfl.algorithms.gpfl import gpfl
from tfpfl.algorithms.knn_per import knn_per, memorized
from tfpfl.algorithms.layerwise import layerwise
from tfpfl.algorithms.lg_fedavg import lg_fedavg
from tfpfl.algorithms.method import Method
from tfpfl.algorithms.own import method_named
from tfpfl.algorithms.per_fedavg import per_fedavg
from tfpfl.algorithms.pfedhn import pfedhn
from tfpfl.algorithms.pfedme import pfedme
from tfpfl.algorithms.pflego import pflego, pflego_code, pflego_exact, pflego_paper
from tfpfl.algorithms.pgfed import pgfed, pgfedmo
from tfpfl.algorithms.scaffold import scaffold
from tfpfl.algorithms.separate import local

__all__ = [
    "ALGORITHMS",
    "Adaptation",
    "Algorithm",
    "Between",
    "ClientData",
    "ClientOutput",
    "Exchange",
    "Method",
    "OnePass",
    "Rows",
    "adapters",
    "apfl",
    "build_algorithm",
    "check_names",
    "ditto",
    "fed3r",
    "fedala",
    "fedamp",
    "fedas",
    "fedavg",
    "fedavg_ft",
    "fedbabu",
    "fedcp",
    "feddane",
    "feddbe",
    "feddyn",
    "fedfomo",
    "fedpac",
    "fedper",
    "fedproto",
    "fedprox",
    "fedprox_ft",
    "fedrecon",
    "fedrep",
    "fedrod",
    "fedsgd",
    "finetuned",
    "get_method",
    "gpfl",
    "heurfedamp",
    "knn_per",
    "layerwise",
    "lg_fedavg",
    "local",
    "memorized",
    "method_named",
    "per_fedavg",
    "pfedhn",
    "pfedme",
    "pflego",
    "pflego_code",
    "pflego_exact",
    "pflego_paper",
    "pgfed",
    "pgfedmo",
    "scaffold",
]
