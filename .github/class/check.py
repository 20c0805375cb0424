"""Read a data set, write its cache, and print what is in it: classes, images of each domain, and what looks wrong.

    python .github/class/check.py pacs                    data/pacs
    python .github/class/check.py office 32 /shared/data  /shared/data/office at 32 pixels
"""

import sys
from argparse import Namespace

import torch

sys.path.insert(0, ".")  # the folder of common.py, where the command is typed
from common import load_dataset

if len(sys.argv) < 2:
    sys.exit("usage: python .github/class/check.py DATASET [PIXELS [FOLDER]]")
name = sys.argv[1]
pixels = int(sys.argv[2]) if len(sys.argv) > 2 else None
folder = sys.argv[3] if len(sys.argv) > 3 else "data"
data = load_dataset(Namespace(dataset=name, data=folder, image_size=pixels, subset=1, seed=0))

C = len(data.class_names)
print(f"{len(data.y):,} images of {C} classes at {data.x.shape[-1]} pixels: {', '.join(data.class_names[:10])}"
      + (" ..." if C > 10 else ""))
for number, domain in enumerate(data.domains):
    here = data.domain == number
    training = (here & ~data.test).sum().item()
    testing = (here & data.test).sum().item()
    counts = torch.bincount(data.y[here], minlength=C)
    print(f"{domain}: {training:,} for training, {testing:,} for testing; a class has {counts.min():,} to "
          f"{counts.max():,}")
    absent = [data.class_names[c] for c in (counts == 0).nonzero().flatten()]
    if absent:
        print(f"  wrong? no image of {', '.join(absent)}: are these folders named differently here?")
if not data.test.any():
    print("wrong? no test images: FedLSA, FedPLCC and FedFM need some")
