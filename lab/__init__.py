import infra.packages  # noqa: F401
