"""Run every command of the README, one after the other, in a scratch folder, and show how each ends.

    python tests/readme.py [--only WORD] [--data FOLDER]

Commands on data that is not there are named and left out.
"""

import argparse, re, shlex, shutil, subprocess, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

def commands(text):
    """The commands with a script in the README's bash blocks and inline code, each once."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S)).splitlines()
    inline = re.findall(r"`(python [^`…]+)`", text)
    found = dict.fromkeys(re.sub(r"\s+#.*", "", line).strip() for line in blocks + inline)
    return [command for command in found if re.match(r"python .*\.py", command)]

def seventh_method(folder):
    """Make fedcon.py in a folder: fedproto.py, changed by .github/fedcon.diff -> how many lines change."""
    shutil.copy(ROOT / "fedproto.py", folder / "fedcon.py")
    subprocess.run(["git", "apply", ROOT / ".github" / "fedcon.diff"], cwd=folder, check=True)
    return len(re.findall(r"^[-+](?![-+])", (ROOT / ".github" / "fedcon.diff").read_text(), re.M))

def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--only", default="", help="commands that contain this")
    parser.add_argument("--data", type=Path, default=ROOT / "data")
    args = parser.parse_args()
    text, failed = (ROOT / "README.md").read_text(), 0
    with tempfile.TemporaryDirectory() as folder:
        for path in [*ROOT.glob("*.py"), ROOT / "tests"]:
            Path(folder, path.name).symlink_to(path)
        shutil.copytree(ROOT / ".github", Path(folder, ".github"))
        seventh_method(Path(folder))
        Path(folder, "data").symlink_to(args.data.resolve())
        for command in commands(text):
            if args.only not in command or re.search("benchmark|readme.py|pytest", command):
                continue
            wanted = re.search(r"--dataset (\w+)", command)
            if wanted and wanted.group(1) != "glyphs" and not (args.data / wanted.group(1)).is_dir():
                print(f"--- left out, no {args.data / wanted.group(1)}: {command}", flush=True)
                continue
            start, python = time.time(), shlex.quote(sys.executable)
            words = command.replace("python", python, 1)
            done = subprocess.run(words, shell=True, cwd=folder, capture_output=True, text=True)
            failed += done.returncode != 0
            print(f"--- {command}\n    {time.time() - start:.0f} s, status {done.returncode}", flush=True)
            lines = done.stdout.splitlines() + done.stderr.splitlines() * (done.returncode != 0)
            print(*(f"    {line}" for line in lines[-4:]), sep="\n", flush=True)
    print(f"{failed} commands failed")
    return failed

if __name__ == "__main__":
    sys.exit(main())
