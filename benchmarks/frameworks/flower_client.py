"""The client of `flower.py`: what Ray's actors import. Job and network are loaded once in every actor."""

from functools import cache

import numpy as np
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
    job, model, i = job_of(config["job"]), network(), config["client"]
    torch_cnn.load(model, arrays.to_numpy_ndarrays())
    order = np.random.default_rng(job.shuffle_seed(config["round"], i)).permutation(job.examples)
    x, y = torch_cnn.images(job.x[i][order]), torch_cnn.labels(job.y[i][order])
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
