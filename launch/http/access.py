"""Decides whose requests are answered: keys, hosts, origins, types of bodies.

A browser sends what any page asks it to: to an address of loopback, or, once
the page's own name leads there, to what it takes for its own server. So the
names in Host and Origin are checked, and bodies that a page may send without
being asked are refused.
"""

import dataclasses
import hashlib
import hmac
import ipaddress
import os
import pathlib
from collections.abc import Mapping, Sequence

from launch.http import json_fields
from rl.settings import annotations

MIN_KEY = 16
"""Characters of a key."""
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths for probes, which have no keys and ask by address."""
_JSON = "application/json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
  """Rules of one server.

  Attributes:
    keys: digests of the keys, one of which a request needs; without any, all
      requests are those of one client.
    hosts: names that a request may be addressed to, besides those of loopback;
      None: any.
    json_only: bodies must be declared as JSON.
  """

  keys: tuple[bytes, ...] = dataclasses.field(default=(), repr=False)
  hosts: frozenset[str] | None = frozenset()
  json_only: bool = True

  def client(self, method: str, path: str, headers: Mapping[str, str]) -> str:
    """Returns the name of the client that a request is from.

    Args:
      headers: by lower-case name.

    Raises:
      BadRequest: the request is refused.
    """
    if path in OPEN_PATHS:
      return ""
    host = headers.get("host", "")
    self._check_host(_name(host))
    if "origin" in headers:
      self._check_origin(headers["origin"], host)
    client = self._holder(_key(headers)) if self.keys else ""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and self.json_only and kind != _JSON:
      raise json_fields.BadRequest(
        f"content-type={json_fields.shown(kind)}: send {_JSON}", status=415
      )
    return client

  def _check_host(self, name: str) -> None:
    if self.hosts is None or name in self.hosts or is_loopback(name):
      return
    raise json_fields.BadRequest(
      f"this server is not {name or 'without a name'}; ask for localhost, or "
      "start it with --allow_host=NAME",
      status=421,
    )

  def _check_origin(self, origin: str, host: str) -> None:
    _, _, asking = origin.lower().partition("://")
    known = asking == host.lower() or _name(asking) in (self.hosts or ())
    if not asking or not known:
      raise json_fields.BadRequest(
        f"pages of {json_fields.cut(origin, 80)} may not ask this server",
        status=403,
      )

  def _holder(self, key: bytes) -> str:
    digest, number = _digest(key), 0
    # All are compared, so that the time tells nothing.
    for place, known in enumerate(self.keys, 1):
      number += place * hmac.compare_digest(digest, known)
    if not number:
      raise json_fields.BadRequest(
        "this server needs a key: send the header Authorization: Bearer KEY",
        code="invalid_api_key",
        status=401,
      )
    return f"key {number}"


def read_keys(path: str | os.PathLike[str]) -> tuple[bytes, ...]:
  """Returns the digests of the keys of a file, which has one a line.

  Empty lines, and those that begin with #, do not count.

  Raises:
    SettingError: it cannot be read, or has no keys, or weak ones.
  """
  try:
    text = pathlib.Path(path).read_text("ascii")
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or "it is not ASCII"
    raise annotations.SettingError(
      f"--api_key_file={path} cannot be read: {reason}"
    ) from error
  lines = [line.strip() for line in text.splitlines()]
  keys = [key for key in lines if key and not key.startswith("#")]
  out = "python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
  if not keys:
    raise annotations.SettingError(f"--api_key_file={path} has no key; {out}")
  for number, key in enumerate(keys, 1):
    if len(key) < MIN_KEY or not key.isprintable() or " " in key:
      raise annotations.SettingError(
        f"--api_key_file={path}: key {number} must have {MIN_KEY} characters "
        f"or more, and no spaces; {out}"
      )
  return tuple(dict.fromkeys(_digest(key.encode()) for key in keys))


def of_flags(
  host: str,
  address: str,
  api_key_file: str | None,
  allow_host: Sequence[str] = (),
) -> Access:
  """Returns the rules of a server that listens on an address.

  Args:
    host, api_key_file, allow_host: the flags of these names.

  Raises:
    SettingError: it is reached from other machines, and has no keys; or as
      `read_keys`.
  """
  if api_key_file is None and not is_loopback(address):
    raise annotations.SettingError(
      f"--host={host} is reached from other machines, and anyone there would "
      "be answered; give --api_key_file=FILE, or use --host=127.0.0.1"
    )
  keys = () if api_key_file is None else read_keys(api_key_file)
  # Names of loopback are answered anyhow, and pages of other ports are others.
  own = () if is_loopback(host) else (host,)
  names = frozenset(name.lower() for name in (*own, *allow_host))
  return Access(keys=keys, hosts=names if is_loopback(address) else None)


def is_loopback(name: str) -> bool:
  """Returns whether a name or an address is that of this machine only."""
  if name == "localhost" or name.endswith(".localhost"):
    return True
  try:
    return ipaddress.ip_address(name.strip("[]")).is_loopback
  except ValueError:
    return False


def _name(host: str) -> str:
  """Returns a host without its port."""
  name = host.lower()
  if name.startswith("["):
    return name.partition("]")[0] + "]"
  return name.partition(":")[0].removesuffix(".")


def _key(headers: Mapping[str, str]) -> bytes:
  kind, _, key = headers.get("authorization", "").partition(" ")
  # The second is that of Anthropic's clients.
  given = key if kind.lower() == "bearer" else headers.get("x-api-key", "")
  return given.strip().encode("utf-8", "replace")


def _digest(key: bytes) -> bytes:
  return hashlib.sha256(key).digest()
