"""The version of this package: pyproject.toml and the manifests take it from here."""

__version__ = "0.1.0"
