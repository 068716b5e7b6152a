"""The version of this package, for manifests; pyproject.toml has the same."""

__version__ = "0.1.0"
