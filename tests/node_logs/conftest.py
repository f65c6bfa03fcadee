"""Fixtures of the tests of node logs."""

from tests.fleet.conftest import traces as traces
