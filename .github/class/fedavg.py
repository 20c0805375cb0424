"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.
McMahan, Moore, Ramage, Hampson, Agüera y Arcas. AISTATS 2017.
No prototypes: a start for a method with one global model.

One round (|w| floats in the model):
  1. The server sends the global model.                                                |w| floats to each
  2. Each participant trains it on its own images.
  3. It sends the model.                                                               |w| floats
  4. The server averages the models, weighted by their numbers of images.
The global model is then tested on the server's test images.

On glyphs (digits that the program draws): 4 clients, one per domain, 20 images of each class; 10 rounds.

    python .github/class/fedavg.py                 built-in glyphs in four domains, about a minute
    cp .github/class/fedavg.py mine.py             a method of your own: rename "fedavg" in the last line
"""

import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F

sys.path.insert(0, ".")  # the folder of common.py, where the command is typed
from common import (Run, average, build_net, draw_pictures, evaluate_global, for_each_client, load_dataset,
                    make_federation, minibatches, model_size, participants, run_script, summarize)

# --- settings ---------------------------------------------------------------------------------------

BASE = dict(                # ours
    clients=10,             # K
    partition="dirichlet",
    beta=0.5,               # β
    rounds=100,             # T
    local_epochs=5,         # E
    batch_size=32,          # B
    lr=0.1,                 # η
)
SETTINGS = {  # by --dataset
    "default": BASE,
    # the built-in digits, 20 images of each class at each client; a short run needs no checkpoint
    "glyphs": dict(BASE, clients=None, partition="domain", images_per_class=20, image_size=24, rounds=10,
                   checkpoint_every=0),
}


# --- the rounds -------------------------------------------------------------------------------------

class Upload(NamedTuple):
    model: dict         # the trained model's state_dict
    loss: torch.Tensor  # mean over the client's batches; not sent, only logged


def main(args):
    data = load_dataset(args)
    net = build_net(data, args)                                       # the global model
    # client_nets: one copy of net for each participant
    clients, client_nets, tests = make_federation(data, net, args)
    net_size = model_size(net)

    run = Run(args, modules=[net])                                    # modules: the models to checkpoint
    run.resume()                                                      # with --resume: loads the checkpoint's models

    for t in run.rounds():
        chosen = participants(clients, t, args)
        for client, client_net in zip(chosen, client_nets, strict=True):
            client.net = client_net
            client.net.load_state_dict(net.state_dict())
        # = [client_update(client, t, args) for client in chosen], in parallel on a CPU
        uploads = for_each_client(client_update, chosen, t, args)
        models = [upload.model for upload in uploads]
        num_images = [len(client.train.y) for client in chosen]
        net.load_state_dict(average(models, num_images))

        scores = evaluate_global(net, tests, t, args)
        up = len(chosen) * net_size
        down = len(chosen) * net_size
        run.report(t, scores, [upload.loss for upload in uploads], up, down)
        run.checkpoint(t)

    results = summarize(run)
    draw_pictures(run, data, clients, net=net, tests=tests)
    return results


# --- the client -------------------------------------------------------------------------------------

def client_update(client, t, args):
    """Train the client's copy of the global model for E epochs -> Upload."""
    client.net.train()
    optimizer = torch.optim.SGD(client.net.parameters(), lr=args.lr, momentum=args.momentum,
                                weight_decay=args.weight_decay)
    losses = []
    for x, y in minibatches(client, t, args):
        loss = local_loss(client.net, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return Upload(client.net.state_dict(), torch.stack(losses).mean())


def local_loss(net, x, y):
    """Cross-entropy on a batch. x (B, 3, height, width) uint8, y (B,) -> scalar."""
    z = net.features(x)
    return F.cross_entropy(net.classifier(z), y)


# --- flags ------------------------------------------------------------------------------------------

def add_flags(group):
    """Flags of your own: group.add_argument("--mu", type=float, help="..."), with its default in BASE."""


if __name__ == "__main__":
    run_script("fedavg", __doc__, main, SETTINGS, add_flags)
