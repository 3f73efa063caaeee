"""Whose requests are answered, by their headers."""

import pytest

from launch.http import access, json_fields
from rl.settings import annotations

ONE, TWO = "first-key-of-sixteen", "second-key-of-sixteen"


def client(rules, method="POST", path="/v1/completions", **headers):
  """The client of a request that is right but for `headers`."""
  sent = {"host": "localhost:8000", "content-type": "application/json"}
  for name, value in headers.items():
    sent[name.replace("_", "-")] = value
  return rules.client(method, path, sent)


def refused(rules, status, words, **request):
  with pytest.raises(json_fields.BadRequest, match=words) as error:
    client(rules, **request)
  assert error.value.status == status


@pytest.fixture
def keyed(tmp_path):
  path = tmp_path / "keys"
  path.write_text(f"# of the lab\n{ONE}\n\n  {TWO}  \n{ONE}\n")
  return access.Access(keys=access.read_keys(path))


def test_a_key_names_its_client(keyed):
  assert client(keyed, authorization=f"Bearer {ONE}") == "key 1"
  assert client(keyed, authorization=f"bearer {TWO}") == "key 2"
  assert client(keyed, x_api_key=TWO) == "key 2"
  assert "key" not in repr(keyed)


@pytest.mark.parametrize(
  "headers",
  [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": f"Basic {ONE}"},
    {"authorization": f"Bearer {ONE}x"},
    {"authorization": f"Bearer {ONE[:-1]}"},
    {"authorization": "Bearer é\ud800"},
    {"x-api-key": "none"},
  ],
)
def test_other_keys_are_refused(keyed, headers):
  refused(keyed, 401, "Authorization: Bearer KEY", **headers)


def test_probes_need_neither_key_nor_name(keyed):
  for path in ("/health", "/ready"):
    assert client(keyed, "GET", path, host="10.0.0.7:8000") == ""


@pytest.mark.parametrize(
  "host",
  ["localhost", "LOCALHOST.:80", "127.0.0.1:80", "[::1]:80", "a.localhost"],
)
def test_requests_to_names_of_loopback_are_answered(host):
  assert client(access.Access(), host=host) == ""


@pytest.mark.parametrize(
  "host",
  ["", "evil.test", "localhost.evil.test", "10.0.0.1", "[::2]", "[", "é"],
)
def test_other_names_are_answered_only_if_they_are_allowed(host):
  refused(access.Access(), 421, "start it with --allow_host", host=host)
  assert client(access.Access(hosts=None), host=host) == ""


def test_an_allowed_name_is_that_of_a_proxy():
  rules = access.Access(hosts=frozenset({"models.lab"}))
  assert client(rules, host="models.lab") == ""
  assert client(rules, origin="https://models.lab:8443") == ""


@pytest.mark.parametrize(
  "origin",
  [
    "null",
    "",
    "https://evil.test",
    "http://localhost:8001",
    "http://localhost:8000.evil.test",
    "file://",
  ],
)
def test_pages_of_others_are_refused(origin):
  refused(access.Access(), 403, "may not ask", origin=origin)


def test_a_page_of_the_server_itself_may_ask():
  assert client(access.Access(), origin="http://localhost:8000") == ""


def test_a_body_must_be_declared_as_json():
  rules = access.Access()
  for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
    refused(rules, 415, "send application/json", content_type=kind)
    assert client(rules, "GET", content_type=kind) == ""
    assert client(access.Access(json_only=False), content_type=kind) == ""
  assert client(rules, content_type="Application/JSON; charset=utf-8") == ""


@pytest.mark.parametrize(
  ("text", "words"),
  [
    (b"", "has no key; python -c"),
    (b"# none\n \n", "has no key"),
    (b"short\n", "key 1 must have 16 characters or more"),
    (b"0123456789abcdef\nwith a space inside it\n", "key 2 must"),
    (b"\xff" * 20, "is not ASCII"),
  ],
)
def test_a_file_without_good_keys_is_refused(tmp_path, text, words):
  path = tmp_path / "keys"
  path.write_bytes(text)
  with pytest.raises(annotations.SettingError, match=words):
    access.read_keys(path)
  with pytest.raises(annotations.SettingError, match="No such file"):
    access.read_keys(tmp_path / "none")


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.1.2.3"])
def test_other_machines_are_served_with_keys_only(tmp_path, address):
  path = tmp_path / "keys"
  path.write_text(ONE)
  rules = access.of_flags(address, address, str(path))
  assert len(rules.keys) == 1
  assert rules.hosts is None
  with pytest.raises(annotations.SettingError, match="--api_key_file=FILE"):
    access.of_flags(address, address, None)


def test_this_machine_is_served_without_keys():
  for address in ("127.0.0.1", "::1", "127.0.1.1"):
    rules = access.of_flags("localhost", address, None, ["Proxy"])
    assert (rules.keys, rules.hosts) == ((), {"proxy"})
    refused(rules, 403, "may not ask", origin="http://localhost:3000")
