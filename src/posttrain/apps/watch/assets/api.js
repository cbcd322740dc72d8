// Requests to the server that this page came from, and the stream of its changes.
import { h, button } from "./dom.js";

export const address = (path, params = {}) => {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") query.append(key, one);
    }
  }
  return `/api/${path}${query.size ? `?${query}` : ""}`;
};

export class Failed extends Error {}

export const get = async (path, params, signal) => {
  const answer = await fetch(address(path, params), { signal });
  if (answer.status === 401) {
    await login();
    return get(path, params, signal);
  }
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Failed(content.error || content.detail || `the server answered ${answer.status}`);
  return content;
};

let asking = null;

const send = async (token) => (await fetch("/api/login", {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ token }),
})).ok;

// Resolves when the server has accepted a token: one from the address (#token=…), or one that is typed.
const login = () => {
  asking ??= (async () => {
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (given) {
      history.replaceState(null, "", "#/");
      if (await send(given)) return;
    }
    await new Promise((done) => {
      const field = h("input", { type: "password", autocomplete: "off", "aria-label": "Token", placeholder: "Token" });
      const said = h("p", { class: "note", role: "alert" });
      const form = h("form", { class: "card login", onsubmit: async (event) => {
        event.preventDefault();
        if (await send(field.value)) { dialog.remove(); done(); } else said.textContent = "This is not the token.";
      } }, h("h2", null, "This server asks for a token"),
      h("p", null, "It is in the file that posttrain watch was started with."), field,
      button("Open", null, { type: "submit", class: "main" }), said);
      const dialog = h("div", { class: "cover" }, form);
      document.body.append(dialog);
      field.focus();
    });
  })().finally(() => { asking = null; });
  return asking;
};

// Calls `changed` with the ids of runs whose files changed. Returns a function that ends it.
export const watch = (run, changed) => {
  const shown = document.getElementById("live");
  const source = new EventSource(address("events", { run }));
  source.onopen = () => { shown.textContent = "live"; shown.className = "live on"; };
  source.onerror = () => { shown.textContent = "not connected"; shown.className = "live off"; };
  source.addEventListener("change", (event) => changed(JSON.parse(event.data)));
  return () => { source.close(); shown.textContent = ""; };
};
