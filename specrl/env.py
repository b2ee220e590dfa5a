"""Environment for bug reports: versions, machine, and where the packages are imported from.

    python -m specrl.env [run=DIR]

With a run, it also prints a hash of the run's config.yaml, which identifies its version. The output contains no
secrets: of the environment variables only those in SHOWN, and paths without user names.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

from specrl.run.machine import SUPPORTED, anonymous, gpus, installed, usable

OPTIONAL = {"vllm", "ray"}
SHOWN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "WORLD_SIZE")


def report(run: str = "") -> str:
    """The complete report. It does not import the packages it reports on, so it works in a broken installation.

    Args: run: a run's directory, whose config.yaml is included; empty for none.
    """
    lines = ["specrl environment", ""]
    lines += [f"{name:14}{text}" for name, text in _versions()]
    lines += ["", *[f"{name:14}{text}" for name, text in _machine()]]
    lines += ["", f"{'imported from':14}{anonymous(str(Path(__file__).parent))}"]
    if run:
        lines += ["", f"{'run':14}{anonymous(run)}", f"{'config.yaml':14}{_digest(Path(run) / 'config.yaml')}"]
    return "\n".join(lines)


def _versions() -> list[tuple[str, str]]:
    own = installed("specrl") or "not installed (used from its directory)"
    rows = [("specrl", f"{own}, commit {commit}" if (commit := _commit()) else own)]
    for name, wanted in SUPPORTED.items():
        found = platform.python_version() if name == "python" else installed(name)
        rows.append((name, verdict(found, wanted, name in OPTIONAL)))
    return rows


def _commit() -> str:
    """The commit of the checkout that the packages are imported from, with "-dirty" if modified; empty without one."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (subprocess.SubprocessError, OSError):
        return ""


def _digest(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=6).hexdigest() if path.is_file() else "missing"


def verdict(found: str | None, wanted: str, optional: bool = False) -> str:
    """A version, with a remark if it is missing or outside the tested range `wanted`."""
    if found is None:
        return "not installed (optional)" if optional else f"NOT INSTALLED, needs {wanted}"
    return found if inside(found, wanted) else f"{found}  OUTSIDE the tested range {wanted}"


def inside(found: str, wanted: str) -> bool:
    """Whether a version such as 2.13.0+cpu is in a range such as `>=2.6,<3`."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(found, prereleases=True)


def _machine() -> list[tuple[str, str]]:
    rows = [("platform", platform.platform()), ("cpus", f"{usable()} usable of {os.cpu_count()}")]
    rows.append(("memory", _memory()))
    rows.append(("environment", " ".join(f"{name}={os.environ[name]}" for name in SHOWN if name in os.environ) or "-"))
    return rows + [("gpu", text) for text in gpus() or ["none"]]


def _memory() -> str:
    try:
        gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (ValueError, OSError):
        return "unknown"
    return f"{gib:.1f} GiB"


def main(argv: list[str]) -> int:
    run = argv[0].removeprefix("run=") if argv and argv[0].startswith("run=") else ""
    if len(argv) != bool(run) or (run and not Path(run).is_dir()):
        wrong = f"there is no directory {run}" if run else f"got {' '.join(argv)}"
        print(f"error: specrl.env takes run=DIR or nothing; {wrong}.", file=sys.stderr)
        return 2
    print(report(run))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
