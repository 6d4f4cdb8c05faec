"""What a forward pass of training depends on besides weights and examples: a random key, and moving statistics.

Dropout needs a key, BatchNormalization needs statistics that every pass moves. Both are state in Keras; here they are
tensors. They reach the layers through a context variable while a graph is traced, so that the functions of methods and
models keep their arguments. Without a pass of training, `features` are those of evaluation: no masks, and the stored
statistics.

    client's visit          drawing(key)            set by the engines, and by `one_pass_update`
      its statistics        keeping(statistics)     set by `algorithms.transforms.normalization`
        what is no step     without_masks()         set by methods that send or compare what features give
        a local step        Loop(key).step(n)       set by `batch_loop`; every step has a key of its own
          examples a..b     part(a)                 set by `SplitModel` and `whole_gradient`, which go by chunks
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import tensorflow as tf

from tfpfl.checks import InvalidArgument
from tfpfl.data.population import Tensor
from tfpfl.data.randomness import Fold


class Pass:
    """The surroundings of forward passes, while they are traced.

    Args:
        key: () -> int32 [2], from which masks are drawn; None: no masks. It is called only where a layer draws.
        statistics: the moving statistics, a tuple of tensors; None: those that are stored in the model.
        batch: whether the statistics of the batch normalize, and move `statistics`; else `statistics` normalize.
        forget: whether the moved statistics are those of the batch alone; of a layer that is used several times, their
            mean over its uses.
    """

    def __init__(
        self,
        key: Callable[[], Tensor] | None,
        statistics: tuple | None = None,
        batch: bool = False,
        forget: bool = False,
    ) -> None:
        self.key, self.statistics, self.batch, self.forget = key, statistics, batch, forget
        self.loops = 0  # how many loops of local steps were begun
        self._moves: dict[tuple[int, ...], int] = {}  # how often statistics at these places were moved
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    @property
    def moved(self) -> tuple:
        """The statistics after the passes that were traced so far; () if there are none."""
        return self.statistics or ()

    def move(self, places: tuple[int, ...], values: tuple) -> None:
        """Replaces the statistics at these places.

        Raises:
            InvalidArgument: the pass is in a loop or branch that does not carry the statistics to its next step.
        """
        if self._graph is not None and self._graph is not tf.compat.v1.get_default_graph():
            raise InvalidArgument(
                "features are computed in a loop of its own, which does not carry the moving statistics of "
                "BatchNormalization from step to step. Use batch_norm='frozen', or another option or method"
            )
        assert self.statistics is not None
        moved = list(self.statistics)
        for place, value in zip(places, values, strict=True):
            moved[place] = value
        self.statistics = tuple(moved)
        self._moves[places] = self.moves(places) + 1

    def moves(self, places: tuple[int, ...]) -> int:
        """How often the statistics at these places were moved: once for each use of their layer."""
        return self._moves.get(places, 0)


_PASS: ContextVar[Pass | None] = ContextVar("the pass of training that is traced", default=None)


def current() -> Pass | None:
    """The pass of training that is traced; None in evaluation."""
    return _PASS.get()


@contextmanager
def _within(now: Pass) -> Iterator[Pass]:
    before = _PASS.set(now)
    try:
        yield now
    finally:
        _PASS.reset(before)


@contextmanager
def drawing(key: Any) -> Iterator[Pass]:
    """Traces the training of a client's visit. In a visit that has begun already, this changes nothing.

    Args:
        key: int32 [2], `ClientData.key`.
    """
    now = current()
    if now is not None:
        yield now
        return
    with _within(Pass(lambda: fold(key, Fold.MASKS))) as now:
        yield now


@contextmanager
def keeping(statistics: tuple, key: Any) -> Iterator[Pass]:
    """Traces training in which batch statistics normalize; afterwards `Pass.moved` are the moved ones.

    Args:
        statistics: the moving statistics before the visit.
        key: int32 [2], `ClientData.key`.
    """
    with _within(Pass(lambda: fold(key, Fold.MASKS), statistics, batch=True)) as now:
        yield now


@contextmanager
def measuring(statistics: tuple) -> Iterator[Pass]:
    """Traces a pass without masks; afterwards `Pass.moved` are those of its examples alone.

    Args:
        statistics: moving statistics, which only tell the shapes.
    """
    with _within(Pass(None, statistics, batch=True, forget=True)) as now:
        yield now


@contextmanager
def evaluating(statistics: tuple | None = None) -> Iterator[Pass]:
    """Traces passes without masks, that these statistics normalize; None: those that are stored in the model."""
    with _within(Pass(None, statistics)) as now:
        yield now


def without_masks() -> AbstractContextManager[Pass]:
    """Traces passes within a visit as an evaluation has them: no masks, and the statistics that the visit has now."""
    now = current()
    return evaluating(None if now is None else now.statistics)


class Loop:
    """The passes of a loop of local steps: each step has a key of its own, and moves the statistics.

    Args:
        key: int32 [2], `ClientData.key`.
    """

    def __init__(self, key: Any) -> None:
        self._around, self._key, self._number = current(), key, 0
        if self._around is not None:
            self._number, self._around.loops = self._around.loops, self._around.loops + 1

    @property
    def statistics(self) -> tuple:
        """The statistics that the loop must carry from step to step; () for none."""
        around = self._around
        return around.statistics or () if around is not None and around.batch else ()

    @contextmanager
    def step(self, number: Callable[[], Any], statistics: tuple) -> Iterator[Pass]:
        """Traces one step; afterwards `Pass.moved` are the moved ones.

        Args:
            number: () -> int32 [], the step's number in this loop; called only where a layer draws.
            statistics: what the loop carries.
        """
        around = self._around
        outer = around.key if around is not None and around.key is not None else lambda: fold(self._key, Fold.MASKS)
        batch = around is not None and around.batch
        held = statistics if batch else around.statistics if around is not None else None
        with _within(Pass(lambda: fold(fold(outer(), self._number), number()), held, batch)) as now:
            yield now

    def end(self, statistics: tuple) -> None:
        """Hands the statistics that the last step left to what is around the loop."""
        if self._around is not None and self._around.batch:
            self._around.statistics = statistics


@contextmanager
def part(now: Pass | None, start: Any) -> Iterator[None]:
    """Traces a part of a pass, for the examples from `start` on: their masks are others than those of the first ones.

    Args:
        now: the whole pass, which may be over already; None for evaluation.
        start: int32 [], the place of the first example.

    Raises:
        InvalidArgument: batch statistics are to normalize; those of a part are not those of the batch.
    """
    if now is None:
        yield
        return
    if now.batch:
        raise InvalidArgument(
            "with batch_norm='local' or 'shared', the statistics of all examples of a step normalize, so their "
            "features cannot be computed in parts. Leave recompute and chunk out if they were given, or use "
            "batch_norm='frozen'"
        )
    key = now.key
    its_key = None if key is None else lambda: tf.where(tf.equal(start, 0), key(), fold(key(), start))
    with _within(Pass(its_key, now.statistics)):
        yield


def fold(key: Tensor, number: Any) -> Tensor:
    """A key that is a function of a key and a number: int32 [2]."""
    return tf.random.experimental.stateless_fold_in(key, tf.cast(number, tf.int32))
