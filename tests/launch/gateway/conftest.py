"""A server of words that lasts for a file."""

import pytest

from tests.helpers import openai_server


@pytest.fixture(scope="module")
def words():
  with openai_server.serve(openai_server.WORDS) as server:
    yield server
