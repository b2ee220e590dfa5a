"""Hook of mkdocs: links from a page to files outside docs/ become links to the repository."""

import re


def on_page_markdown(markdown, page, config, files):
    """The page's text with `](../FILE)` as an address; within docs/ mkdocs follows and checks links itself."""
    return re.sub(r"\]\(\.\./", f"]({config.repo_url}/blob/main/", markdown)
