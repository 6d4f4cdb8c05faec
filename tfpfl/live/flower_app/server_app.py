"""The rounds of a tfpfl run on Flower's nodes: it asks them, and the run's own server step takes their answers.

It needs tfpfl with its extra `live` in the environment of the SuperLink. The run folder has all that lasts; if this app
is stopped or killed, start it again, and it goes on from the last update.
"""

import time
from contextlib import closing
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp

from tfpfl.live.asking import Asking, Question
from tfpfl.live.rules import Rules
from tfpfl.live.serve import write_end
from tfpfl.live.server import Steady
from tfpfl.runs.run import Run
from tfpfl.runs.training import DivergedError

PAUSE = 1.0  # seconds between two looks at what has come
TYPES = {"visit": MessageType.TRAIN, "score": MessageType.EVALUATE}  # of messages; all others are queries

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the rounds until the last one is saved."""
    config = context.run_config
    patience, clock = float(config["patience"]), Steady(time.time)
    rules = Rules(
        deadline=float(config["deadline"]),
        quorum=float(config["quorum"]),
        wait_for=int(config["wait-for"]),
        payload=str(config["payload"]),
        max_norm=float(config["max-norm"]) or None,
    )
    with (
        Run.open(Path(str(config["run"]))) as run,
        closing(Asking(run, rules, patience=patience, log=print_now)) as asking,
    ):
        asked: dict[str, Question] = {}  # by the number of the message
        try:
            while True:
                asked |= send(grid, asking.questions(grid.get_node_ids(), clock()), patience)
                for reply in grid.pull_messages(list(asked)) if asked else ():
                    question = asked.pop(reply.metadata.reply_to_message_id)
                    if reply.has_error():
                        asking.failed(question, reply.error.reason or "it did not answer", clock())
                    else:
                        asking.hear(question, reply.content.config_records.get("answer", {}), clock())
                if asking.is_over(clock()):
                    break
                time.sleep(PAUSE)
        except (KeyboardInterrupt, DivergedError) as end:
            write_end(run, asking.rounds, end)
            raise
        run.write_summary()
        print_now(f"{run.store.round_num} rounds are saved in {run.folder}")


def send(grid: Grid, questions: list[Question], patience: float) -> dict[str, Question]:
    """Sends questions to their nodes: {number of the message: question}."""
    if not questions:
        return {}
    messages = [
        Message(
            RecordDict({"question": ConfigRecord(dict(question.record))}),
            question.node,
            TYPES.get(question.kind, MessageType.QUERY),
            group_id=str(question.round_num),
            ttl=patience,
        )
        for question in questions
    ]
    numbers = grid.push_messages(messages)
    return {number: question for number, question in zip(numbers, questions, strict=True) if number}


def print_now(text: str) -> None:
    """Prints a line of the log without waiting for more."""
    print(text, flush=True)
