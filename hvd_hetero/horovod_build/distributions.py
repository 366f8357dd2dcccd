"""What is installed for the running interpreter."""

from importlib import metadata

__all__ = ["installed_version"]


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
