from infra import packages as _packages  # noqa: F401
