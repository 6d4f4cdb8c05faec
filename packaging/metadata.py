"""What the metadata of both wheels have in common: the version, the addresses, and how a README is shown elsewhere."""

import os
import re
from pathlib import Path

VERSION = "0.1.0"
# The address of the repository on the web, such as https://host/owner/tfpfl: `make wheels URL=...` sets it.
URL = os.environ.get("TFPFL_URL", "").rstrip("/")
BRANCH = "main"


def project_urls(url: str = URL) -> dict:
    """{name: address} for the index; empty without an address."""
    if not url:
        return {}
    files = f"{url}/blob/{BRANCH}"
    return {
        "Source": url,
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }


def long_description(readme: Path, url: str = URL) -> str:
    """A README for readers who do not have the repository: its relative links become addresses.

    Without an address, a relative link becomes its text, and pictures of the repository are left out.
    """
    text = readme.read_text(encoding="utf-8")
    images, links = (f"{url}/raw/{BRANCH}/", f"{url}/blob/{BRANCH}/") if url else ("", "")
    local = r"(?!\w+:|#)([^)\s\"]+)"  # a target without a scheme
    text = re.sub(rf"!\[([^]]*)\]\({local}\)", rf"![\1]({images}\2)" if url else "", text)
    text = re.sub(rf'<img src="{local}"([^>]*)>', rf'<img src="{images}\1"\2>' if url else "", text)
    text = re.sub(rf"\[((?:!\[[^]]*\]\([^)]*\))|[^][]*)\]\({local}\)", rf"[\1]({links}\2)" if url else r"\1", text)
    return re.sub(r"\n{3,}", "\n\n", text)


CLASSIFIERS = [
    "Development Status :: 4 - Beta",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3 :: Only",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]
COMMON = {
    "version": VERSION,
    "license": "Apache-2.0",
    "license_files": ["LICENSE"],
    "long_description_content_type": "text/markdown",
    "project_urls": project_urls(),
    "keywords": ["federated learning", "personalization", "on-device learning", "TensorFlow", "LiteRT"],
}
