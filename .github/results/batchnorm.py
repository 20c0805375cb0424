"""Tests a FedFM run's global model twice: with the BatchNorm statistics that the server averaged, and with statistics of
the averaged model itself, computed on the clients' training images. Prints accuracy and the mean length of the features.

    python .github/results/batchnorm.py runs/fedfm-cifar10-s0
"""

import sys
from argparse import Namespace
from pathlib import Path

import torch

sys.path.insert(0, ".")  # the folder of common.py, where the command is typed
from common import build_net, evaluate_global, extract, load_dataset, make_federation, normalisation

saved = torch.load(Path(sys.argv[1], "checkpoint.pt"), map_location="cpu", weights_only=True)
args = Namespace(**saved["settings"])
args.device = "cpu"
t = args.rounds = len(saved["rows"])

data = load_dataset(args)
mean, std = normalisation(args.dataset)
net = build_net(data, args, mean=mean, std=std)
clients, _, tests = make_federation(data, net, args, validation=args.validation)
net.load_state_dict(saved["modules"][0])


def report(statistics):
    accuracy = evaluate_global(net, tests, t, args)["test"]
    z = torch.cat([extract(net, images.x) for images in tests.values()])
    print(f"round {t}  lam {args.lam:g}  {statistics} statistics  test {accuracy:.2f}  length {z.norm(dim=1).mean():.2f}",
          flush=True)


report("averaged")
for module in net.modules():
    if isinstance(module, torch.nn.BatchNorm2d):
        module.reset_running_stats()
        module.momentum = None  # a plain mean over all batches
x = torch.cat([client.train.x for client in clients])
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
net.train()
with torch.no_grad():
    for index in order.split(250):
        net(x[index])
report("own")
