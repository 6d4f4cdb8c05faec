"""A Flower node as a device in the rounds of a tfpfl run. It needs tfpfl-device, LiteRT and NumPy, and no TensorFlow.

The node's configuration names two folders: `data` with its examples, and `state`, where its key, its bundle, its head
and an update that is on its way are files. Flower's own state (`context.state`) is not used: a node may be killed and
started again at any time. The token is in the environment variable TFPFL_TOKEN.
"""

import os
from contextlib import closing
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from tflite_export.device.__main__ import read_examples
from tflite_export.device.bench import any_interpreter
from tflite_export.device.live.asked import AskedDevice

app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def answer(message: Message, context: Context) -> Message:
    """Answers a question of the server: who is there, a visit, scores, or that the run is over."""
    config = context.node_config
    examples = read_examples(Path(str(config["data"])))
    token = os.environ["TFPFL_TOKEN"]
    with closing(AskedDevice(str(config["state"]), examples, token, interpreter=any_interpreter())) as device:
        found = device.answer(dict(message.content.config_records["question"]))
    return Message(RecordDict({"answer": ConfigRecord(found)}), reply_to=message)
