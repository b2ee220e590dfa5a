"""Update docs/configuration.md: `python -m specrl.config`."""

from pathlib import Path

from specrl.config.help import updated_page
from specrl.config.schema import Config

if __name__ == "__main__":
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    page.write_text(updated_page(page.read_text(encoding="utf-8"), Config), encoding="utf-8")
    print(f"updated {page}")
