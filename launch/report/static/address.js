// The part of the address behind "#": a page, and what it shows.

export function address() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  return { path, fields: new URLSearchParams(query) };
}

export function linkTo(path, fields = {}) {
  return `#${path}?${new URLSearchParams(fields)}`;
}
