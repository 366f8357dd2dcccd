"""Make ``.venv`` what this checkout needs, doing only what is not done yet.

    venv -> tools -> project -> check -> torch -> horovod -> development -> tensorflow

With the argument ``torch`` it ends at ``horovod``, which is all that the demo needs. ``tensorflow`` adds TensorFlow's
part to Horovod; torch's is not compiled again.

Each stage has a stamp in ``.venv/stamps``: a hash of what it was made from and of the stage before it, written when the
stage is complete. A stage whose stamp fits is skipped, so that an unchanged set-up costs a fraction of a second, and a
changed pin installs again from there on. A stage that was killed leaves a mark, upon which ``.venv`` is made again: pip
can mend most half-made installations, but cannot be trusted to notice each of them. A lock keeps two set-ups apart.

Runs on the system's Python with nothing but the standard library.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pip_progress import run_pip

ROOT = Path(__file__).resolve().parent.parent
BUILDER = ROOT / "packaging" / "horovod"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "stamps"
INSTALLED = STAMPS / "installed"
UNDER_WAY = VENV / "under-way"
STATE = ROOT / ".setup"
OLDEST = (3, 11)  # what the pinned NumPy needs

LIST_INSTALLED = (
    "from importlib import metadata\n"
    "print('\\n'.join(sorted({f'{d.name}=={d.version}' for d in metadata.distributions()})))"
)


class Stage(NamedTuple):
    """A step of the set-up: what it is made from, and how."""

    name: str
    title: str
    content: str
    action: Callable[[], int]


def main(arguments: list[str]) -> int:
    """Bring the environment up to date, alone, and return the exit code."""
    if arguments not in ([], ["torch"]):
        return failed(f"the argument must be torch or absent, not {' '.join(arguments)}", 2)
    if sys.version_info < OLDEST:
        needed, here = ".".join(map(str, OLDEST)), sys.version.split()[0]
        return failed(
            f"Python {needed} or newer is needed, and this is {here}; run make PYTHON=/path/to/python3.11 ..."
        )
    STATE.mkdir(exist_ok=True)
    with (STATE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this checkout is under way; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        return bring_up_to_date(for_torch() if arguments else stages())


def for_torch() -> list[Stage]:
    """Return the steps after which torch and Horovod can be used."""
    every = stages()
    return every[: [stage.name for stage in every].index("horovod") + 1]


def stages() -> list[Stage]:
    """Return all steps in their order."""
    files = (path for pattern in ("*.py", "patches/*") for path in sorted((BUILDER / "horovod_build").glob(pattern)))
    recipe = "".join(map(text, files))
    described = text(ROOT / "pyproject.toml") + text(BUILDER / "pyproject.toml")
    return [
        Stage("venv", "create .venv", f"{sys.version} {sys.base_prefix} {ROOT}", make_venv),
        Stage("tools", "install the build tools and what the core imports", pins("tools"), lambda: install("tools")),
        Stage("project", "install hvd-hetero and the builder of Horovod, editable", described, install_project),
        Stage("check", "look for a C++ compiler, CMake and make", "", lambda: build_horovod("--check-tools")),
        Stage("torch", "install torch", pins("torch"), lambda: install("torch")),
        Stage(
            "horovod",
            "build Horovod for torch, or find it in the cache",
            recipe,
            # TensorFlow may be there from before, at a version that is about to be replaced.
            lambda: build_horovod("--install", HOROVOD_WITHOUT_TENSORFLOW="1"),
        ),
        Stage(
            "development",
            "install TensorFlow, Keras and the development tools",
            pins("development"),
            lambda: install("development"),
        ),
        Stage("tensorflow", "the same for TensorFlow", recipe, lambda: build_horovod("--install")),
    ]


def bring_up_to_date(todo: list[Stage]) -> int:
    """Run the stages that are not done; the lock is held."""
    start_s, ran, hashed = time.monotonic(), 0, ""
    heal(expected_venv=digest("", todo[0].content))
    for number, stage in enumerate(todo, start=1):
        hashed = digest(hashed, stage.content)
        stamp = STAMPS / stage.name
        if stamp.exists() and stamp.read_text() == hashed:
            continue
        ran += 1
        say(f"[{number}/{len(todo)}] {stage.title}")
        INSTALLED.unlink(missing_ok=True)
        for outdated in stages()[number - 1 :]:  # also those not to do now: Horovod for torch replaces that for both
            (STAMPS / outdated.name).unlink(missing_ok=True)
        if VENV.exists():
            UNDER_WAY.write_text(stage.name)
        if (code := stage.action()) != 0:
            # It ended by itself and has cleaned up after itself: only a killed stage may leave the mark.
            UNDER_WAY.unlink(missing_ok=True)
            return failed(f"set-up stopped at “{stage.title}”; mend the cause, then run the same command again", code)
        STAMPS.mkdir(exist_ok=True)
        stamp.write_text(hashed)
        UNDER_WAY.unlink(missing_ok=True)
    if ran:
        INSTALLED.write_text(listed().stdout)
        say(f"set up in {time.monotonic() - start_s:.0f} s")
    return 0


def heal(expected_venv: str) -> None:
    """Remove an environment that cannot be trusted; take back the stamps of one that has lost packages."""
    if not VENV.exists():
        return
    reason = ""
    if UNDER_WAY.exists():
        reason = f"its set-up was interrupted at the stage “{UNDER_WAY.read_text()}”"
    elif not (STAMPS / "venv").exists():
        reason = "its creation was interrupted, or something else created it"
    elif (STAMPS / "venv").read_text() != expected_venv:
        reason = "it belongs to another Python or another place"
    elif (here := listed()).returncode != 0:
        reason = f"its interpreter does not work ({here.stderr.strip()[-200:]})"
    elif INSTALLED.exists() and (lost := set(INSTALLED.read_text().split()) - set(here.stdout.split())):
        say(f"mending .venv, which has lost {', '.join(sorted(lost)[:5])}")
        for stamp in STAMPS.iterdir():
            if stamp.name != "venv":
                stamp.unlink()
    if reason:
        say(f"making .venv again: {reason}")
        shutil.rmtree(VENV)


def listed() -> subprocess.CompletedProcess[str]:
    """Ask the environment's interpreter what is installed, which also shows that it works."""
    argv = [str(PYTHON), "-I", "-c", LIST_INSTALLED]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError as reason:
        return subprocess.CompletedProcess(argv, 127, "", str(reason))


def make_venv() -> int:
    """Create the environment."""
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        say((made.stdout + made.stderr).strip())
        say(f"on Debian and Ubuntu, the package is python{sys.version_info[0]}.{sys.version_info[1]}-venv")
    return made.returncode


def install(name: str) -> int:
    """Install one of the files in requirements/, at the versions of constraints.txt."""
    wanted, pinned = ROOT / "requirements" / f"{name}.txt", ROOT / "requirements" / "constraints.txt"
    # --no-compile: bytecode for all of torch and TensorFlow takes half of the time, and a fraction of it is imported.
    return pip("install", "--no-compile", "--requirement", str(wanted), "--constraint", str(pinned), log=name)


def install_project() -> int:
    """Install this checkout so that edits take effect at once; everything that it needs is there already."""
    options = ("--no-deps", "--no-index", "--no-build-isolation")
    return pip("install", *options, "--editable", str(ROOT), "--editable", str(BUILDER), log="project")


def build_horovod(option: str, **variables: str) -> int:
    """Run the command that users run."""
    command = [str(VENV / "bin" / "hvd-hetero"), "build-horovod", option]
    return subprocess.run(command, env=environment() | variables, stdin=subprocess.DEVNULL, check=False).returncode


def pip(*arguments: str, log: str) -> int:
    """Run the environment's pip."""
    return run_pip(PYTHON, list(arguments), STATE / f"{log}.log", environment())


def environment() -> dict[str, str]:
    """Return the variables without those that would reach into other environments."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def pins(name: str) -> str:
    """Return the text that decides what an installation installs."""
    return text(ROOT / "requirements" / f"{name}.txt") + text(ROOT / "requirements" / "constraints.txt")


def text(path: Path) -> str:
    """Return a file's content."""
    return path.read_text(encoding="utf-8")


def digest(before: str, content: str) -> str:
    """Chain a stage's content to the stages before it."""
    return hashlib.sha256(f"{before} {content}".encode()).hexdigest()


def say(message: str) -> None:
    """Inform the user."""
    sys.stderr.write(f"set-up: {message}\n")
    sys.stderr.flush()


def failed(message: str, code: int = 1) -> int:
    """Print why it ended, and return the exit code."""
    say(message)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(failed("interrupted; run the same command again", 130))
