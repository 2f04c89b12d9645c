"""What the tests of a real etcd are given."""

import pytest

from tests.backends.etcd.kit import needs, running


@pytest.fixture(scope="session")
def etcd(tmp_path_factory):
    """One etcd for all who only use it; each has run ids and prefixes of its own."""
    with running(needs("system"), tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster.members[0]


@pytest.fixture
def own_etcd(tmp_path):
    """One etcd of the test's own, to be stopped or started again."""
    with running(needs("system"), tmp_path) as cluster:
        yield cluster.members[0]
