"""Requests that run, for tests of the built-in engine's parts."""

import asyncio

import pytest

from tests.helpers import request_states


@pytest.fixture
def running():
  """See `request_states.maker`."""
  loop = asyncio.new_event_loop()
  yield request_states.maker(loop)
  loop.close()
