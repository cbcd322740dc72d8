// The address with other parameters; the page stays and is told of it.
export const setQuery = (changes, { replace = false } = {}) => {
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?");
  const params = new URLSearchParams(query);
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") params.delete(key); else params.set(key, value);
  }
  const text = `#${path}${params.size ? `?${params}` : ""}`;
  if (text === location.hash) return;
  if (!replace) { location.hash = text; return; }
  history.replaceState(null, "", text);
  window.dispatchEvent(new Event("hashchange"));
};
