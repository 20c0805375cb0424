"""Run every command of the README and of the class page, one after the other, in a scratch folder, and show how each
ends.

    python tests/readme.py [--only WORD] [--data FOLDER] [--page FILE] [--rounds N]

Commands on data that is not there are named and left out.
"""

import argparse, re, shlex, shutil, subprocess, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / ".github" / "class" / "README.md"]
LONG = {"cifar10", "cifar100", "digit5", "office", "pacs", "domainnet"}  # runs of hours, not run here


def commands(text):
    """The commands with a script in a page's bash blocks, inline code and tables, each once."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S)).splitlines()
    inline = re.findall(r"`(python [^`…]+)`", text)
    found = {}
    for line in blocks + inline:
        for part in re.sub(r"\s+#.*", "", line).split("&&"):
            part = " ".join(part.split())
            if re.match(r"python \S+\.py", part):
                found[part] = None
    return list(found)


def seventh_method(folder):
    """Make fedcon.py in a folder: fedproto.py, changed by .github/class/fedcon.diff -> how many lines change."""
    shutil.copy(ROOT / "fedproto.py", folder / "fedcon.py")
    subprocess.run(["git", "apply", ROOT / ".github" / "class" / "fedcon.diff"], cwd=folder, check=True)
    return len(re.findall(r"^[-+](?![-+])", (ROOT / ".github" / "class" / "fedcon.diff").read_text(), re.M))


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--only", default="", help="commands that contain this")
    parser.add_argument("--data", type=Path, default=ROOT / "data")
    parser.add_argument("--page", type=Path, action="append", help="these pages instead")
    parser.add_argument("--rounds", type=int, help="so many rounds instead of a command's own, for a quick pass")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for path in [*ROOT.glob("*.py"), ROOT / "tests", ROOT / ".github"]:
            Path(folder, path.name).symlink_to(path)
        seventh_method(Path(folder))
        Path(folder, "data").symlink_to(args.data.resolve())
        for page in args.page or PAGES:
            for command in commands(page.read_text()):
                if args.only not in command or re.search("benchmark|readme.py|pytest", command):
                    continue
                dataset = re.search(r"--dataset (\w+)|runs/\w+?-(\w+)", command)
                if dataset and LONG & set(dataset.groups()):
                    print(f"--- left out, it takes hours: {command}", flush=True)
                    continue
                if args.rounds and not re.search(r"--rounds|--resume|--help|common\.py", command):
                    command += f" --rounds {args.rounds}"
                start = time.time()
                words = command.replace("python", shlex.quote(sys.executable), 1)
                done = subprocess.run(words, shell=True, cwd=folder, capture_output=True, text=True)
                failed += done.returncode != 0
                print(f"--- {command}\n    {time.time() - start:.0f} s, status {done.returncode}", flush=True)
                lines = done.stdout.splitlines()
                if done.returncode != 0:
                    lines += done.stderr.splitlines()
                for line in lines[-4:]:
                    print(f"    {line}", flush=True)
    print(f"{failed} commands failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
