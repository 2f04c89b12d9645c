"""Fixtures with a real etcd."""

import pytest

from tests.backends.etcd.kit import needs, running


@pytest.fixture(scope="session")
def etcd(tmp_path_factory):
    """One etcd shared by all tests; each test uses run ids and prefixes of its own."""
    with running(needs("system"), tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster.members[0]


@pytest.fixture
def own_etcd(tmp_path):
    """An etcd that the test may stop and restart."""
    with running(needs("system"), tmp_path) as cluster:
        yield cluster.members[0]
