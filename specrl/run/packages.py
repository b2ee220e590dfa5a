"""Where the four packages come from. Imported before all others, so it imports none of them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("specrl", "rollout", "reward", "trainers")


def package_directories() -> dict[str, Path | None]:
    """Where each of the four packages would be imported from."""
    return {name: _directory(name) for name in PACKAGES}


def _directory(name: str) -> Path | None:
    spec = find_spec(name)
    if spec is None:
        return None
    if spec.origin and Path(spec.origin).name != "__init__.py":  # a module, such as reward.py
        return Path(spec.origin)
    return Path(next(iter(spec.submodule_search_locations)))


def mixed_roots(directories: dict[str, Path | None]) -> str:
    """A sentence when the packages do not come from one place, else an empty text."""
    home = directories["specrl"].parent
    strangers = {name: path for name, path in directories.items() if path is None or path.parent != home}
    if not strangers:
        return ""
    found = ", ".join(f"`{name}` from {path.parent if path else 'nowhere'}" for name, path in strangers.items())
    return anonymous(
        f"the packages come from different places: specrl from {home}, but {found}. Start in another directory or "
        "rename yours; PyPI has unrelated packages `rollout` and `reward`: uninstall those. Keep one copy of specrl."
    )


def anonymous(text: str) -> str:
    """Paths without the names of users."""
    return re.sub(r"(/home|/Users|\\Users)[/\\][^/\\, ]+", "~", text.replace(str(Path.home()), "~"))
