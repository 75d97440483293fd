from tests.joints.conftest import given  # noqa: F401  (trainers of a configuration and a table)
