// Which page the address names. An address is #/page/…?key=value; every page is a function of it.
import { h, link } from "./dom.js";
import { showPinned } from "./pins.js";
import * as runs from "./pages/runs.js";
import * as run from "./pages/run.js";
import * as rollouts from "./pages/rollouts.js";
import * as diff from "./pages/diff.js";
import * as compare from "./pages/compare.js";
import * as config from "./pages/config.js";
import * as doctor from "./pages/doctor.js";
import * as cluster from "./pages/cluster.js";
import * as pipelines from "./pages/pipelines.js";
import * as registry from "./pages/registry.js";

const PAGES = [
  [/^\/$/, runs], [/^\/run\/(\w+)$/, run], [/^\/run\/(\w+)\/rollouts$/, rollouts], [/^\/run\/(\w+)\/doctor$/, doctor],
  [/^\/run\/(\w+)\/config$/, config], [/^\/run\/(\w+)\/cluster$/, cluster], [/^\/compare$/, compare], [/^\/diff$/, diff],
  [/^\/pipelines(?:\/(\w+))?$/, pipelines], [/^\/registry(?:\/(\w+))?$/, registry],
];
const NAV = [["#/", "Runs"], ["#/compare", "Compare"], ["#/pipelines", "Pipelines"], ["#/registry", "Registry"]];

let current = null; // { path, page, stop, update }

const show = async () => {
  const [path, query = ""] = (location.hash.replace(/^#/, "") || "/").split("?");
  const params = new URLSearchParams(query);
  for (const item of document.getElementById("nav").children) {
    const here = item.getAttribute("href").slice(1);
    item.toggleAttribute("aria-current", here === "/" ? path === "/" || path.startsWith("/run/") : path.startsWith(here));
  }
  showPinned();
  if (current && current.path === path && current.update) {
    current.update(params);
    return;
  }
  current?.stop?.();
  const view = document.getElementById("view");
  const found = PAGES.map(([pattern, page]) => [path.match(pattern), page]).find(([match]) => match);
  const mine = { path };
  current = mine;
  if (!found) {
    view.replaceChildren(h("p", { class: "empty" }, "There is no such page. ", link("#/", "All runs")));
    return;
  }
  try {
    const page = await found[1].open(found[0].slice(1), params);
    if (current !== mine) { page.stop?.(); return; }
    Object.assign(mine, page);
    document.title = `${page.title} · posttrain watch`;
    view.replaceChildren(page.element);
    window.scrollTo(0, 0);
  } catch (error) {
    if (current === mine) view.replaceChildren(h("p", { class: "empty", role: "alert" }, `This page cannot be shown: ${error.message}.`));
  }
};

const SCHEMES = ["light dark", "light", "dark"];
const applyScheme = () => {
  const scheme = localStorage.getItem("posttrain-scheme") || SCHEMES[0];
  document.documentElement.style.setProperty("color-scheme", scheme);
  const words = { "light dark": "as the system", light: "light", dark: "dark" };
  document.getElementById("theme").title = `Colours: ${words[scheme]}`;
};
document.getElementById("theme").addEventListener("click", () => {
  const now = SCHEMES.indexOf(localStorage.getItem("posttrain-scheme") || SCHEMES[0]);
  localStorage.setItem("posttrain-scheme", SCHEMES[(now + 1) % SCHEMES.length]);
  applyScheme();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address is that of the page
  document.getElementById("view").focus();
});
document.getElementById("nav").append(...NAV.map(([href, text]) => link(href, text)));
applyScheme();
window.addEventListener("hashchange", show);
show();
