"""Renew docs/configuration.md: `python -m specrl.config`."""

from pathlib import Path

from specrl.config.help import updated_page
from specrl.config.schema import Config

if __name__ == "__main__":
    target = Path(__file__).parents[2] / "docs" / "configuration.md"
    target.write_text(updated_page(target.read_text(encoding="utf-8"), Config), encoding="utf-8")
    print(f"renewed {target}")
