"""Write the folder data/digit5: MNIST, USPS and SVHN from torchvision, Synthetic Digits and MNIST-M from the unpacked
archive Digit-Five.

    python .github/class/make_digits.py         all training images
    python .github/class/make_digits.py 5000    the first 5,000 of each domain
"""

import sys
from itertools import islice
from pathlib import Path

from PIL import Image
from scipy.io import loadmat
from torchvision.datasets import MNIST, SVHN, USPS

TRAINING = int(sys.argv[1]) if len(sys.argv) > 1 else None


def write(domain, part, pairs):
    """Write pairs (PIL image, digit) as data/digit5/<domain>/<part>/<digit>/<number>.png."""
    for n, (image, digit) in enumerate(islice(pairs, TRAINING if part == "train" else None)):
        place = Path("data/digit5", domain, part, str(digit))
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{n:05}.png")


def arrays(images, digits):
    """Arrays (n, height, width, 3) of uint8 and (n,) -> pairs (PIL image, digit)."""
    for image, digit in zip(images, digits):
        yield Image.fromarray(image), int(digit) % 10  # some files write 10 for 0


if Path("data/digit5").exists():
    sys.exit("data/digit5 exists; delete or rename it first, so that no old images are left in it")
for name in "syn_number.mat", "mnistm_with_label.mat":
    if not Path("Digit-Five", name).is_file():
        sys.exit(f"Digit-Five/{name} not found; unpack the archive Digit-Five here first")
synth = loadmat("Digit-Five/syn_number.mat")
mnistm = loadmat("Digit-Five/mnistm_with_label.mat")  # one-hot labels

raw = "data/torchvision"
write("mnist", "train", MNIST(raw, train=True, download=True))
write("mnist", "test", MNIST(raw, train=False, download=True))
write("usps", "train", USPS(raw, train=True, download=True))
write("usps", "test", USPS(raw, train=False, download=True))
write("svhn", "train", SVHN(raw, split="train", download=True))
write("svhn", "test", SVHN(raw, split="test", download=True))
write("synth", "train", arrays(synth["train_data"], synth["train_label"].ravel()))
write("synth", "test", arrays(synth["test_data"], synth["test_label"].ravel()))
write("mnistm", "train", arrays(mnistm["train"], mnistm["label_train"].argmax(1)))
write("mnistm", "test", arrays(mnistm["test"], mnistm["label_test"].argmax(1)))
