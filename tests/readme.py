"""Run every command of the README, one after the other, in a scratch folder, and show how each ends.

    python tests/readme.py [--only WORD] [--data FOLDER]

Commands on data that is not there are named and left out.
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


def commands(text):
    """The commands with a script in the README's bash blocks and inline code, each once."""
    blocks = [line for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    inline = re.findall(r"`((?:python|torchrun) [^`]+)`", text)
    found = [re.sub(r"\s+#.*", "", line).strip() for line in blocks + inline]
    return list(dict.fromkeys(c for c in found if re.match(r"(python|torchrun) ", c) and ".py" in c and "…" not in c))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="commands that contain this")
    parser.add_argument("--data", type=Path, default=ROOT / "data")
    args = parser.parse_args()
    text, failed = (ROOT / "README.md").read_text(), 0
    with tempfile.TemporaryDirectory() as folder:
        source = (ROOT / "fedproto.py").read_text()
        for hunk in re.split(r"^@@.*\n", re.search(r"```diff\n(.*?)```", text, re.S).group(1), flags=re.M)[1:]:
            source = source.replace(*("\n".join(line[1:] for line in hunk.splitlines() if line[:1] in sign) for sign in (" -", " +")))
        for path in [*ROOT.glob("*.py"), ROOT / "tests"]:
            Path(folder, path.name).symlink_to(path)
        shutil.copytree(ROOT / ".github", Path(folder, ".github"))
        Path(folder, "fedcon.py").write_text(source)
        Path(folder, "data").symlink_to(args.data.resolve())
        for command in commands(text):
            wanted = re.search(r"--dataset (\w+)", command)
            if args.only not in command or re.search("soak|benchmark|readme.py|pytest", command):
                continue
            if wanted and wanted.group(1) != "glyphs" and not (args.data / wanted.group(1)).is_dir():
                print(f"--- left out, no {args.data / wanted.group(1)}: {command}", flush=True)
                continue
            start = time.time()
            words = command.replace("python ", f"{shlex.quote(sys.executable)} ", 1).replace("torchrun ", f"{shlex.quote(sys.executable)} -m torch.distributed.run ", 1)
            done = subprocess.run(words, shell=True, cwd=folder, capture_output=True, text=True)
            failed += done.returncode != 0
            print(f"--- {command}\n    {time.time() - start:.0f} s, status {done.returncode}", flush=True)
            for line in (done.stdout.splitlines() + done.stderr.splitlines() * (done.returncode != 0))[-4:]:
                print(f"    {line}", flush=True)
    print(f"{failed} commands failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
