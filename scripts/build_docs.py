"""Build the documentation's site into site/, in a separate environment that the first call makes.

    python scripts/build_docs.py [OPTION OF MKDOCS ...]

MkDocs, its theme and its reader of docstrings need nothing of what training needs, so they are not in ``.venv``, and
``make setup`` ignores them. ``.setup/docs`` is made again if another Python, or another pin, is asked for.

Runs on the system's Python with nothing but the standard library.
"""

import shutil
import subprocess
import sys
import time

from pip_progress import run_pip
from setup import ROOT, STATE, digest, environment, pins, say

HOME = STATE / "docs"
PYTHON = HOME / "bin" / "python"
STAMP = HOME / "made-from"


def main(options: list[str]) -> int:
    """Build the site and return the exit code."""
    STATE.mkdir(exist_ok=True)
    if (code := make_environment()) != 0:
        return code
    command = [str(PYTHON), "-m", "mkdocs", "build", "--strict", "--quiet", *options]
    environ = environment() | {"NO_MKDOCS_2_WARNING": "1"}  # news of the theme's authors, in each build
    start_s = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
    if code == 0:
        say(f"built in {time.monotonic() - start_s:.0f} s; open {ROOT / 'site' / 'index.html'}")
        say("search needs a server: python3 -m http.server --directory site")
    return code


def make_environment() -> int:
    """Bring the environment up to date and return the exit code."""
    made_from = digest(f"{sys.version} {sys.base_prefix} {ROOT}", pins("docs"))
    if STAMP.exists() and STAMP.read_text() == made_from:
        return 0
    say("install MkDocs")
    shutil.rmtree(HOME, ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", str(HOME)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        say((made.stdout + made.stderr).strip())
        return made.returncode
    files = ROOT / "requirements" / "docs.txt", ROOT / "requirements" / "constraints.txt"
    arguments = ["install", "--requirement", str(files[0]), "--constraint", str(files[1])]
    code = run_pip(PYTHON, arguments, STATE / "docs.log", environment())
    if code == 0:
        STAMP.write_text(made_from)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
