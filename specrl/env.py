"""Versions, machine and import path for bug reports: `python -m specrl.env`.

The output contains no secrets: of the environment variables only those in SHOWN, and paths without user names.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

from specrl.run.machine import SUPPORTED, anonymous, gpus, installed, usable

OPTIONAL = {"trl", "accelerate", "datasets", "math-verify", "vllm", "ray"}
SHOWN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "WORLD_SIZE")


def report() -> str:
    """The complete report. It does not import the packages it reports on, so it works in a broken installation."""
    rows = [*_versions(), ("", ""), *_machine(), ("", ""), ("imported from", anonymous(str(Path(__file__).parent)))]
    return "\n".join(["specrl environment", "", *(f"{name:14}{text}".rstrip() for name, text in rows)])


def _versions() -> list[tuple[str, str]]:
    specrl = installed("specrl") or "not installed (used from its directory)"
    rows = [("specrl", f"{specrl}, commit {commit}" if (commit := _commit()) else specrl)]
    for name, wanted in SUPPORTED.items():
        version = platform.python_version() if name == "python" else installed(name)
        rows.append((name, verdict(version, wanted, name in OPTIONAL)))
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


def verdict(version: str | None, wanted: str, optional: bool = False) -> str:
    """A version such as 2.13.0+cpu, with a remark if it is missing or outside the tested range such as `>=2.6,<3`."""
    from packaging.specifiers import SpecifierSet

    if version is None:
        return "not installed (optional)" if optional else f"NOT INSTALLED, needs {wanted}"
    tested = SpecifierSet(wanted).contains(version, prereleases=True)
    return version if tested else f"{version}  OUTSIDE the tested range {wanted}"


def _machine() -> list[tuple[str, str]]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return [
        ("platform", platform.platform()),
        ("cpus", f"{usable()} usable of {os.cpu_count()}"),
        ("memory", f"{memory:.1f} GiB"),
        ("environment", " ".join(f"{name}={os.environ[name]}" for name in SHOWN if name in os.environ) or "-"),
        *(("gpu", text) for text in gpus() or ["none"]),
    ]


if __name__ == "__main__":
    print(report())
