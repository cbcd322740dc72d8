// Two answers that are chosen to be compared word by word. They stay while one looks for the second.
import { h, button } from "./dom.js";

const KEY = "posttrain-pinned";
export const pinned = () => JSON.parse(sessionStorage.getItem(KEY) || "[]");
const keep = (pins) => { sessionStorage.setItem(KEY, JSON.stringify(pins)); showPinned(); };

// `at` is "run:kind:step:group:sample".
export const pin = (at, label) => {
  const pins = pinned().filter((one) => one.at !== at);
  const both = [...pins, { at, label }].slice(-2);
  keep(both);
  if (both.length === 2) {
    keep([]);
    location.hash = diffAddress(both[0].at, both[1].at);
  }
};

export const diffAddress = (a, b) => `#/diff?${new URLSearchParams({ a, b })}`;

export const showPinned = () => {
  const bar = document.getElementById("pinned");
  const pins = pinned();
  bar.hidden = !pins.length;
  bar.replaceChildren(...pins.map((one) => h("span", null, `Compare ${one.label} with …`)),
    pins.length ? button("Cancel", () => keep([])) : "");
};
