"""Run every command of the README and of the class page in a scratch folder, and show how each ends.

    python tests/readme.py [--only WORD] [--data FOLDER] [--rounds N]

Commands on data sets that take hours are named and left out.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / ".github" / "class" / "README.md"]
LONG = {"cifar10", "cifar100", "digit5", "office", "pacs", "domainnet"}


def commands(text):
    """The commands with a script in a page's bash blocks, inline code and tables, each once."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = "\n".join(blocks).splitlines()
    lines += re.findall(r"`(python [^`…]+)`", text)
    found = []
    for line in lines:
        without_comment = re.sub(r"\s+#.*", "", line)
        for command in without_comment.split("&&"):
            command = " ".join(command.split())
            if re.match(r"python \S+\.py", command) and command not in found:
                found.append(command)
    return found


def seventh_method(folder):
    """Make fedcon.py in a folder: fedproto.py, changed by .github/class/fedcon.diff -> how many lines change."""
    patch = ROOT / ".github" / "class" / "fedcon.diff"
    shutil.copy(ROOT / "fedproto.py", folder / "fedcon.py")
    subprocess.run(["git", "apply", patch], cwd=folder, check=True)
    return len(re.findall(r"^[-+](?![-+])", patch.read_text(), re.M))


def takes_hours(command):
    dataset = re.search(r"--dataset (\w+)|runs/\w+?-(\w+)", command)
    return dataset is not None and bool(LONG & set(dataset.groups()))


def run(command, folder):
    """Run a command in the folder, print its last lines -> whether it failed."""
    start = time.time()
    words = command.replace("python", shlex.quote(sys.executable), 1)
    done = subprocess.run(words, shell=True, cwd=folder, capture_output=True, text=True)
    print(f"--- {command}\n    {time.time() - start:.0f} s, status {done.returncode}")
    lines = done.stdout.splitlines()
    if done.returncode != 0:
        lines += done.stderr.splitlines()
    for line in lines[-4:]:
        print(f"    {line}", flush=True)
    return done.returncode != 0


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--only", default="", help="commands that contain this")
    parser.add_argument("--data", type=Path, default=ROOT / "data")
    parser.add_argument("--rounds", type=int, help="so many rounds instead of a command's own, for a quick pass")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for path in [*ROOT.glob("*.py"), ROOT / "tests", ROOT / ".github"]:
            (folder / path.name).symlink_to(path)
        (folder / "data").symlink_to(args.data.resolve())
        seventh_method(folder)
        for page in PAGES:
            for command in commands(page.read_text()):
                if args.only not in command or re.search("benchmark|readme.py|pytest|blank.py", command):
                    continue
                if takes_hours(command):
                    print(f"--- left out, it takes hours: {command}", flush=True)
                    continue
                if args.rounds and not re.search(r"--rounds|--resume|--help|common\.py", command):
                    command += f" --rounds {args.rounds}"
                failed += run(command, folder)
    print(f"{failed} commands failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
