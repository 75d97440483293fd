import pytest

from tests.joints.parts import job


@pytest.fixture
def given(tmp_path):
    """Trainers of the configuration given.yaml: `given(table, "key=value", ...)`."""
    return lambda table, *overrides, **options: job(tmp_path, table, *overrides, **options)
