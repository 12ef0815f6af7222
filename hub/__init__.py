from infra import packages  # noqa: F401
