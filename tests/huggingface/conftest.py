from tests.parallel.conftest import pool

__all__ = ["pool"]
