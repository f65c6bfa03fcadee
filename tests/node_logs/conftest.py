"""What the tests of symptoms share: the real logs of Fleet's tests, and a kernel line's reading."""

from tests.fleet.conftest import traces as traces
