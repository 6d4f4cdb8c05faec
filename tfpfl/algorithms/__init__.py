"""`ALGORITHMS`, the one list that the command line, the tests and the README read. A file for every algorithm."""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature

from tfpfl.algorithms.apfl import apfl
from tfpfl.algorithms.ditto import ditto
from tfpfl.algorithms.fedamp import fedamp, heurfedamp
from tfpfl.algorithms.fedavg import fedavg
from tfpfl.algorithms.fedbabu import fedbabu
from tfpfl.algorithms.feddyn import feddyn
from tfpfl.algorithms.fedfomo import fedfomo
from tfpfl.algorithms.fedper import fedper
from tfpfl.algorithms.fedprox import fedprox
from tfpfl.algorithms.fedrecon import fedrecon
from tfpfl.algorithms.fedrep import fedrep
from tfpfl.algorithms.fedrod import fedrod
from tfpfl.algorithms.fedsgd import fedsgd
from tfpfl.algorithms.finetune import fedavg_ft, fedprox_ft, finetuned
from tfpfl.algorithms.layerwise import layerwise
from tfpfl.algorithms.lg_fedavg import lg_fedavg
from tfpfl.algorithms.per_fedavg import per_fedavg
from tfpfl.algorithms.pfedme import pfedme
from tfpfl.algorithms.pflego import PRESETS as PFLEGO_PRESETS
from tfpfl.algorithms.pflego import pflego, pflego_code, pflego_exact, pflego_paper
from tfpfl.algorithms.pgfed import pgfed, pgfedmo
from tfpfl.algorithms.scaffold import scaffold
from tfpfl.algorithms.separate import local
from tfpfl.checks import InvalidArgument, unknown


@dataclass(frozen=True)
class Row:
    """What there is to know about an algorithm before running it.

    `bytes_down`, `bytes_up`: scalars a client receives and sends in a round, in terms of b (backbone), h (head) and
    d = b + h; times 4 in float32.
    """

    title: str
    builder: Callable  # (model, population, *, hyperparameters) -> Algorithm
    head: str  # 'personal': of width K_i, on the device; 'shared': one for all
    message: str  # 'broadcast' or 'per client'
    state: str  # what a client keeps
    down: str
    up: str
    reference: str
    evaluates: str = "personal"  # what `personal_model` is: 'personal', 'global', 'fine-tuned'
    evaluates_if: dict = field(default_factory=dict)  # (hyperparameter, its value) -> what it is then
    presets: dict = field(default_factory=dict)

    @property
    def hyperparameters(self) -> dict:
        """name -> inspect.Parameter, with its default and annotation."""
        parameters = signature(self.builder).parameters
        return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}

    def evaluated(self, hyperparameters: dict) -> str:
        """What `personal_model` is with these hyperparameters: 'personal', 'global' or 'fine-tuned'."""
        found = [label for (name, value), label in self.evaluates_if.items() if hyperparameters.get(name) == value]
        return found[0] if found else self.evaluates


ALGORITHMS = {
    "pflego": Row(
        title="PFLEGO",
        builder=pflego,
        head="personal",
        message="broadcast",
        state="head",
        down="b",
        up="b",
        reference="Nikoloutsopoulos, Koutsopoulos, Titsias: Personalized Federated Learning with Exact Stochastic "
        "Gradient Descent, arXiv 2202.09848",
        presets=PFLEGO_PRESETS,
    ),
    "fedavg": Row(
        title="FedAvg",
        builder=fedavg,
        head="shared",
        message="broadcast",
        state="nothing",
        evaluates="global",
        down="d",
        up="d",
        reference="McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks "
        "from Decentralized Data, AISTATS 2017",
    ),
    "local": Row(
        title="Local",
        builder=local,
        head="personal",
        message="broadcast",
        state="whole model",
        down="0",
        up="0",
        reference="the baseline without communication; 'Separate' in FedAMP",
    ),
    "fedsgd": Row(
        title="FedSGD",
        builder=fedsgd,
        head="shared",
        message="broadcast",
        state="nothing",
        evaluates="global",
        down="d",
        up="d",
        reference="McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks "
        "from Decentralized Data, AISTATS 2017",
    ),
    "fedprox": Row(
        title="FedProx",
        builder=fedprox,
        head="shared",
        message="broadcast",
        state="nothing",
        evaluates="global",
        down="d",
        up="d",
        reference="Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, "
        "MLSys 2020",
    ),
    "scaffold": Row(
        title="SCAFFOLD",
        builder=scaffold,
        head="shared",
        message="broadcast",
        state="control variate (d)",
        evaluates="global",
        evaluates_if={("eval_model", "local"): "personal"},
        down="2d",
        up="2d",
        reference="Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for "
        "Federated Learning, ICML 2020",
    ),
    "feddyn": Row(
        title="FedDyn",
        builder=feddyn,
        head="shared",
        message="broadcast",
        state="gradient (d)",
        evaluates="global",
        down="d",
        up="d",
        reference="Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic "
        "Regularization, ICLR 2021",
    ),
    "fedavg_ft": Row(
        title="FedAvg-FT",
        builder=fedavg_ft,
        head="shared",
        message="broadcast",
        state="nothing",
        evaluates="fine-tuned",
        down="d",
        up="d",
        reference="FedAvg, fine-tuned by each client; a baseline in Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: "
        "Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021",
    ),
    "fedprox_ft": Row(
        title="FedProx-FT",
        builder=fedprox_ft,
        head="shared",
        message="broadcast",
        state="nothing",
        evaluates="fine-tuned",
        down="d",
        up="d",
        reference="FedProx, fine-tuned by each client; a baseline in Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: "
        "Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021",
    ),
    "fedper": Row(
        title="FedPer",
        builder=fedper,
        head="personal",
        message="broadcast",
        state="head",
        down="b",
        up="b",
        reference="Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers, "
        "arXiv 1912.00818",
    ),
    "fedrep": Row(
        title="FedRep",
        builder=fedrep,
        head="personal",
        message="broadcast",
        state="head",
        down="b",
        up="b",
        reference="Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized "
        "Federated Learning, ICML 2021",
    ),
    "fedbabu": Row(
        title="FedBABU",
        builder=fedbabu,
        head="shared",
        message="broadcast",
        state="nothing",
        evaluates="fine-tuned",
        down="b",
        up="b",
        reference="Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022",
    ),
    "fedrecon": Row(
        title="FedRecon",
        builder=fedrecon,
        head="personal",
        message="broadcast",
        state="head",
        down="b",
        up="b",
        reference="Singhal, Sidahmed, Garrett, Wu, Rush, Prakash: Federated Reconstruction: Partially Local Federated "
        "Learning, NeurIPS 2021",
        presets={"stateless": {"reset_head": True, "query_fraction": 0.5}},
    ),
    "lg_fedavg": Row(
        title="LG-FedAvg",
        builder=lg_fedavg,
        head="shared",
        message="broadcast",
        state="backbone",
        down="h",
        up="h",
        reference="Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: "
        "Federated Learning with Local and Global Representations, arXiv 2001.01523",
    ),
    "fedrod": Row(
        title="FedRoD",
        builder=fedrod,
        head="shared",
        message="broadcast",
        state="head",
        down="d",
        up="d",
        reference="Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification, "
        "ICLR 2022",
    ),
    "ditto": Row(
        title="Ditto",
        builder=ditto,
        head="shared",
        message="broadcast",
        state="whole model",
        down="d",
        up="d",
        reference="Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, "
        "ICML 2021",
    ),
    "pfedme": Row(
        title="pFedMe",
        builder=pfedme,
        head="shared",
        message="broadcast",
        state="whole model",
        down="d",
        up="d",
        reference="Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020",
    ),
    "apfl": Row(
        title="APFL",
        builder=apfl,
        head="shared",
        message="broadcast",
        state="whole model",
        down="d",
        up="d",
        reference="Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning, arXiv 2003.13461",
    ),
    "per_fedavg": Row(
        title="Per-FedAvg",
        builder=per_fedavg,
        head="shared",
        message="broadcast",
        state="nothing",
        evaluates="fine-tuned",
        down="d",
        up="d",
        reference="Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A "
        "Model-Agnostic Meta-Learning Approach, NeurIPS 2020",
        presets={"fo": {"variant": "fo"}, "hf": {"variant": "hf"}},
    ),
    "layerwise": Row(
        title="Layer-wise regularization",
        builder=layerwise,
        head="shared",
        message="broadcast",
        state="whole model",
        down="d",
        up="d",
        reference="the thesis on layer-wise regularization and personalized mixing, reconstructed",
        presets={"pm_a": {"scheme": "pm_a"}, "pm_b": {"scheme": "pm_b"}},
    ),
    "fedfomo": Row(
        title="FedFomo",
        builder=fedfomo,
        head="shared",
        message="per client",
        state="two whole models",
        down="candidates*d",
        up="d + candidates",
        reference="Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model "
        "Optimization, ICLR 2021",
    ),
    "fedamp": Row(
        title="FedAMP",
        builder=fedamp,
        head="shared",
        message="per client",
        state="whole model",
        down="d",
        up="d",
        reference="Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on Non-IID "
        "Data, AAAI 2021",
    ),
    "heurfedamp": Row(
        title="HeurFedAMP",
        builder=heurfedamp,
        head="shared",
        message="per client",
        state="whole model",
        down="d",
        up="d",
        reference="Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on Non-IID "
        "Data, AAAI 2021",
    ),
    "pgfed": Row(
        title="PGFed",
        builder=pgfed,
        head="shared",
        message="per client",
        state="whole model",
        down="3d + 2I",
        up="2d + I",
        reference="Luo, Mendieta, Chen, Wu: PGFed: Personalize Each Client's Global Objective for Federated Learning, "
        "ICCV 2023",
    ),
    "pgfedmo": Row(
        title="PGFedMo",
        builder=pgfedmo,
        head="shared",
        message="per client",
        state="whole model and a gradient",
        down="3d + 2I",
        up="2d + I",
        reference="Luo, Mendieta, Chen, Wu: PGFed: Personalize Each Client's Global Objective for Federated Learning, "
        "ICCV 2023",
    ),
}


def build_algorithm(name: str, model, population, *, preset: str | None = None, **hyperparameters):
    """An algorithm by its name in `ALGORITHMS`.

    Raises:
        ValueError: an unknown name, preset or hyperparameter (with the valid ones), or one out of range.

    Examples:
        >>> from tfpfl import Population, SplitModel
        >>> from tfpfl.models import build_network
        >>> model, population = SplitModel(build_network("mlp200", (8, 8, 1))), Population([30] * 10, [2] * 10)
        >>> build_algorithm("pflego", model, population, preset="exact", tau=20).aggregate
        'sum'
        >>> build_algorithm("pflego", model, population, tua=20)
        Traceback (most recent call last):
        ValueError: unknown hyperparameter of pflego 'tua'; did you mean 'tau'? there are ...
    """
    check_names(name, preset, hyperparameters)
    row = algorithm_row(name)
    return row.builder(model, population, **{**row.presets.get(preset, {}), **hyperparameters})


def check_names(name: str, preset: str | None, hyperparameters) -> None:
    """Whether there is such an algorithm, with such a preset and such hyperparameters.

    Raises:
        ValueError: an unknown name, with the nearest one and all.
    """
    row = algorithm_row(name)
    if preset is not None and preset not in row.presets:
        raise InvalidArgument(unknown(f"preset of {name}", preset, row.presets))
    for h in hyperparameters:
        if h not in row.hyperparameters:
            raise InvalidArgument(unknown(f"hyperparameter of {name}", h, row.hyperparameters))


def algorithm_row(name: str) -> Row:
    """The row of an algorithm.

    Raises:
        ValueError: an unknown name, with the nearest one.
    """
    if name not in ALGORITHMS:
        raise InvalidArgument(unknown("algorithm", name, ALGORITHMS))
    return ALGORITHMS[name]


__all__ = [
    "ALGORITHMS",
    "Row",
    "algorithm_row",
    "apfl",
    "build_algorithm",
    "check_names",
    "ditto",
    "fedamp",
    "fedavg",
    "fedavg_ft",
    "fedbabu",
    "feddyn",
    "fedfomo",
    "fedper",
    "fedprox",
    "fedprox_ft",
    "fedrecon",
    "fedrep",
    "fedrod",
    "fedsgd",
    "finetuned",
    "heurfedamp",
    "layerwise",
    "lg_fedavg",
    "local",
    "per_fedavg",
    "pfedme",
    "pflego",
    "pflego_code",
    "pflego_exact",
    "pflego_paper",
    "pgfed",
    "pgfedmo",
    "scaffold",
]
