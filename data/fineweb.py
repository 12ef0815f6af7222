"""`python -m data.fineweb` is `python -m data.prepare`, whose default is FineWeb."""

from data.prepare import main
from infra.cli import run_main

if __name__ == "__main__":
    run_main(main)
