"""The client of `flower.py`: what Ray's actors import. Job and network are loaded once in every actor."""

from functools import cache

import torch
import torch_cnn
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from job import load_job

app = ClientApp()
job_of, network = cache(load_job), cache(torch_cnn.build)


@app.train()
def train(message, context):
    """One epoch of the client that the message names."""
    config, arrays = message.content["config"], message.content["arrays"]
    job, model = job_of(config["job"]), network()
    torch_cnn.load(model, arrays.to_numpy_ndarrays())
    x, y = job.visit(config["round"], config["place"])
    x, y = torch_cnn.images(x, job.scale, job.shift), torch_cnn.labels(y)
    optimizer = torch.optim.SGD(model.parameters(), job.rate)
    for start in range(0, job.examples, job.batch_size):
        batch = slice(start, start + job.batch_size)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    reply = {
        "arrays": ArrayRecord(torch_cnn.dump(model)),
        "metrics": MetricRecord({"num-examples": job.examples}),
    }
    return Message(content=RecordDict(reply), reply_to=message)
